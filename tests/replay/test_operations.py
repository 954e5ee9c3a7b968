"""What a dead worker had done to names in the step that its replacement does again."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashrun.worker.replay.operations import Operations, merge


class Refused(Exception):
    """What `Session.refuse` ends a process with."""


class Lives:
    """A worker that dies, and those that take over."""

    def __init__(self, folder: Path) -> None:
        self.session: Any = SimpleNamespace(
            folder=folder, boundary=7, on=True, refuse=self._refuse, give_up=None
        )
        self.now = Operations(self.session)
        self.now.record()

    def _refuse(self, why: str) -> None:
        raise Refused(why)

    def next(self, boundary: int = 7) -> None:
        self.session.boundary = boundary
        self.now = Operations(self.session)
        self.now.take_over()


@pytest.fixture
def lives(tmp_path: Path) -> Lives:
    return Lives(tmp_path / "log")


def test_what_fails_since_it_was_done_is_done(lives: Lives, tmp_path: Path) -> None:
    def step() -> None:
        folder, file, other = (str(tmp_path / name) for name in ("folder", "file", "other"))
        lives.now.do("mkdir", folder, lambda: os.mkdir(folder))
        with pytest.raises(FileExistsError):
            lives.now.do("mkdir", folder, lambda: os.mkdir(folder))
        lives.now.do("rename", f"{file}\0{other}", lambda: os.rename(file, other))
        lives.now.do("unlink", other, lambda: os.unlink(other))
        with pytest.raises(FileNotFoundError):
            lives.now.do("unlink", other, lambda: os.unlink(other))

    (tmp_path / "file").write_text("once")
    step()
    for _ in range(2):  # the second time as well
        lives.next()
        step()
    assert {p.name for p in tmp_path.iterdir()} == {"log", "folder"}


def test_not_in_another_step(lives: Lives, tmp_path: Path) -> None:
    folder = str(tmp_path / "folder")
    lives.now.do("mkdir", folder, lambda: os.mkdir(folder))
    lives.next(boundary=8)
    with pytest.raises(FileExistsError):
        lives.now.do("mkdir", folder, lambda: os.mkdir(folder))
    lives.next(boundary=7)
    lives.session.boundary = 8  # it has done that step
    with pytest.raises(FileExistsError):
        lives.now.do("mkdir", folder, lambda: os.mkdir(folder))


def test_one_that_was_under_way(lives: Lives, tmp_path: Path) -> None:
    class Killed(BaseException): ...

    def kill(before: bool, call: Callable[[], None]) -> None:
        if not before:
            call()
        raise Killed

    paths = [str(tmp_path / name) for name in ("a", "b")]
    for before, path in zip((True, False), paths, strict=True):
        with pytest.raises(Killed):
            lives.now.do("mkdir", path, lambda b=before, p=path: kill(b, lambda: os.mkdir(p)))
    lives.next()
    lives.now.do("mkdir", paths[0], lambda: os.mkdir(paths[0]))  # it had not
    with pytest.raises(Refused, match=r"was about to mkdir .*/b; whether it had"):
        lives.now.do("mkdir", paths[1], lambda: os.mkdir(paths[1]))


def test_what_was_there_and_is_gone(lives: Lives, tmp_path: Path) -> None:
    flag, other = str(tmp_path / "flag"), str(tmp_path / "other")
    for path in (flag, other):
        Path(path).touch()
        lives.now.do("unlink", path, lambda p=path: os.unlink(p))
    lives.now.missed(flag)  # the script itself has removed it
    lives.next()
    lives.now.missed(str(tmp_path / "never"))
    lives.now.do("unlink", other, lambda: os.unlink(other))
    lives.now.missed(other)
    with pytest.raises(Refused, match=r"looks for .*/flag, which the dead worker had removed"):
        lives.now.missed(flag)
    lives.session.boundary += 1
    lives.now.missed(flag)


def test_a_folder_that_was_renamed_before(tmp_path: Path) -> None:
    """Another rank has put something into it since."""
    new, old = tmp_path / "new", tmp_path / "old"
    for folder in (new, old):
        (folder / "deep").mkdir(parents=True)
        (folder / "model").write_text("the same")
        (folder / "deep" / "x").write_text("the same")
    (old / "random-1").write_text("another rank's")
    (new / "deep" / "y").write_text("not there yet")
    merge(str(new), str(old))
    assert not new.exists()
    found = {str(p.relative_to(old)) for p in old.rglob("*") if p.is_file()}
    assert found == {"model", "deep/x", "deep/y", "random-1"}
