"""The suite's guard finds what a test leaves behind, and names it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests import helpers

LEAVES = {
    "process": "import subprocess, sys\ndef test_it(): subprocess.Popen([sys.executable, '-c',"
    " 'import time; time.sleep(600)'])\n",
    "orphan": "import subprocess\ndef test_it(): subprocess.run('sleep 600 & exit', shell=True)\n",
    "listening": "import socket\nkeep = []\ndef test_it():\n    s = socket.socket()\n"
    "    s.bind(('127.0.0.1', 0)); s.listen(); keep.append(s)\n",
    "temporary": "import tempfile\ndef test_it(): tempfile.mkdtemp()\n",
    "run folder": "from flashrun.node import run_folder\ndef test_it(): run_folder.make()\n",
    "": "import tempfile, subprocess\ndef test_it(tmp_path):\n    subprocess.run(['true'])\n"
    "    with tempfile.TemporaryDirectory(): pass\n",
}


@pytest.mark.parametrize("what", [pytest.param(name, id=name or "nothing") for name in LEAVES])
def test_leftovers_are_named(what: str, tmp_path: Path) -> None:
    # Nothing here is about to be gone, so the guard need not wait for that.
    patience = "from tests import conftest\nconftest._GRACE = 0.2\n"
    (tmp_path / "test_one.py").write_text(patience + LEAVES[what])
    finished = helpers.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "--noconftest",
         "-c", "/dev/null", "--rootdir", str(tmp_path), str(tmp_path / "test_one.py")],
        env=helpers.clean_environment({"PYTHONPATH": str(helpers.ROOT)}),
        cwd=tmp_path,
    )  # fmt: skip
    word = {"orphan": "process", "run folder": "temporary: /dev/shm/flashrun_"}.get(what, what)
    assert finished.status == (1 if what else 0), finished.describe()
    assert f"  {word}" in finished.stdout
    assert ("left behind" in finished.stdout) is bool(what)


def test_waiting_for_a_child_leaves_its_status_alone() -> None:
    child = subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"])
    assert helpers.await_exit([psutil.Process(child.pid)], timeout=30) == []
    assert child.wait(30) == 7
