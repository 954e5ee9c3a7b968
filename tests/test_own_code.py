"""A replacement runs the code that the dead worker has run."""

from __future__ import annotations

import linecache
import os
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import SimpleNamespace

import pytest

from flashrun.worker.own_code import CodeChanged, OwnCode


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text("first")
    return path


def begun(folder: Path, fresh: bool) -> OwnCode:
    """As in a worker that has imported torch."""
    own = OwnCode(folder / "log", fresh)
    own.settle([])
    return own


def test_what_it_has_run_each_time(tmp_path: Path, file: Path) -> None:
    live = begun(tmp_path, fresh=True)
    assert live.then(str(file)) is None
    file.write_text("sécond\n")
    assert live.then(str(file)) is None  # loaded anew
    file.write_text("third")
    replay = begun(tmp_path, fresh=False)
    assert replay.then(str(file)) == b"first"
    assert replay.then(str(file)) == "sécond\n".encode()
    linecache.checkcache(str(file))
    assert linecache.getline(str(file), 1) == "sécond\n"
    assert replay.then(str(file)) is None  # it goes on, and so does its log
    file.write_text("fourth")
    again = begun(tmp_path, fresh=False)
    assert [again.then(str(file)) for _ in range(4)] == [
        b"first", "sécond\n".encode(), b"third", None,
    ]  # fmt: skip
    assert begun(tmp_path, fresh=True).then(str(file)) is None  # another round
    file.write_text("fifth")
    assert begun(tmp_path, fresh=False).then(str(file)) == b"fourth"


def test_before_torch_is_there_nothing_is_open(tmp_path: Path, file: Path) -> None:
    """Many scripts never import it; what was run until then is kept all the same."""
    before = os.listdir("/proc/self/fd")
    live = OwnCode(tmp_path / "log", fresh=True)
    live.then(str(file))
    assert os.listdir("/proc/self/fd") == before and not (tmp_path / "log").exists()
    live.settle([])
    file.write_text("second")
    assert OwnCode(tmp_path / "log", fresh=False).then(str(file)) == b"first"


def test_packages_and_children_are_not_kept(tmp_path: Path, file: Path) -> None:
    live = begun(tmp_path, fresh=True)
    for package in (os, pytest):
        live.then(str(package.__file__))
    pid = os.fork()
    if pid == 0:
        live.then(str(file))
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    replay = OwnCode(tmp_path / "log", fresh=False)
    assert not replay._kept


def test_what_was_imported_past_it_must_be_as_it_was(tmp_path: Path, file: Path) -> None:
    modules = [SimpleNamespace(__file__=str(file)), SimpleNamespace(__file__=None), None, os]
    OwnCode(tmp_path / "log", fresh=True).settle(modules)
    OwnCode(tmp_path / "log", fresh=False).settle(modules)
    file.write_text("second")
    with pytest.raises(CodeChanged, match=r"mine\.py was changed since"):
        OwnCode(tmp_path / "log", fresh=False).settle(modules)


def test_a_log_that_has_no_room_is_told(tmp_path: Path, file: Path) -> None:
    (tmp_path / "log").write_text("in the way")
    live = OwnCode(tmp_path / "log", fresh=True)
    assert live.then(str(file)) is None
    with pytest.raises(OSError, match="exists"):
        live.settle([])


def test_each_import_of_a_source_asks_for_its_code(file: Path) -> None:
    """Relied on in importlib; whether or not the compiled file is there."""
    asked = []

    class Loader(SourceFileLoader):
        def get_code(self, fullname: str) -> object:  # type: ignore[override]
            asked.append(fullname)
            return super().get_code(fullname)

    file.write_text("x = 1")
    for _ in range(2):
        Loader("mine", str(file)).exec_module(SimpleNamespace(__name__="mine"))  # type: ignore[arg-type]
    assert asked == ["mine", "mine"]
