"""Recovery in place of workers that are fresh processes (no zygote, ``--no-python``)."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests import helpers
from tests.jobs import job, running, write_script
from tests.test_recovery import RANKS, STEPS, TRAIN, results

_OWN_SITE = """
import os
open(os.environ["FRTEST_FOLDER"] + "/seen", "a").write("x")
"""
_LOOKS = """
import subprocess
assert "plain_site" not in str(sys.path) + str(dict(os.environ)), sys.path
assert os.environ["PYTHONPATH"] == os.environ["WANTED"]
child = "import sys, os; print('flashrun' in sys.modules, os.environ['PYTHONPATH'])"
said = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True).stdout
assert said == f"False {os.environ['PYTHONPATH']}\\n", said
assert type(__import__("torch").__loader__).__name__ == "SourceFileLoader"
"""


def _environment(out: Path, site: Path) -> dict[str, str]:
    site.mkdir()
    (site / "sitecustomize.py").write_text(_OWN_SITE)
    return {"OUT": str(out), "PYTHONPATH": str(site), "WANTED": str(site)}


@pytest.mark.parametrize(
    "how", ["--no-zygote", pytest.param("--no-python", marks=pytest.mark.slow)]
)
def test_a_killed_worker(tmp_path: Path, how: str) -> None:
    """Replaced with the same result; the user's sitecustomize runs, ours is not to be seen."""
    steps = 60
    out = tmp_path / "out"
    plain = tmp_path / "plain"
    out.mkdir()
    plain.mkdir()
    with job(tmp_path, TRAIN, f"--nproc-per-node={RANKS}", args=[str(steps)],
             env={"OUT": str(plain)}, recovery="off", name="p", forked=True) as first:  # fmt: skip
        assert first.ended() == 0, first.describe()
    env = _environment(out, tmp_path / "site")
    script = str(write_script(tmp_path, _LOOKS + TRAIN))
    program = [script] if how == "--no-zygote" else ["--no-python", sys.executable, "-u", script]
    command = [*helpers.launcher("flashrun"), f"--nproc-per-node={RANKS}", *program, str(steps)]
    with running(command, tmp_path, env, recovery="in-place") as second:
        second.await_told("step", step=20, rank=1)
        (pid,) = {e["pid"] for e in second.events if e["rank"] == 1}
        os.kill(pid, signal.SIGKILL)
        assert second.ended() == 0, second.describe()
    assert results(out) == results(plain), second.err
    assert "rank 1 lost (SIGKILL); replacing it in place" in second.err
    assert "no step lost" in second.err
    # three workers and their children, one replacement and its child
    assert len((tmp_path / "seen").read_text()) >= 8


@pytest.mark.parametrize(
    ("line", "status"), [("sys.exit(3)", 3), ("raise ValueError('mine')", 1), ("sys.exit(0)", 0)]
)
def test_the_scripts_own_end(tmp_path: Path, line: str, status: int) -> None:
    """It is the script's failure, at once: nobody waits for a worker that has failed."""
    body = TRAIN.replace(
        'tell("step", step=step)',
        f'tell("step", step=step)\n        if step == 20: {line}',
    )
    with job(tmp_path, body, "--nproc-per-node=2", args=[str(STEPS)],
             env={"OUT": str(tmp_path)}, recovery="in-place") as run:  # fmt: skip
        assert run.ended() == (1 if status else 0), run.describe()
    assert "replacing it in place" not in run.err
    if status:
        assert f"exitcode  : {status}" in run.err
