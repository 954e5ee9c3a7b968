"""Files that a replay holds open for writing: at its end they lead to the real ones, as far as they
were written at this boundary.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from collections.abc import Callable
from typing import Any

from flashrun.worker.replay.registry import Line


class OpenFiles:
    """See the module."""

    def __init__(self) -> None:
        self._handles: list[tuple[weakref.ref[Any], str, str]] = []
        self._descriptors: dict[int, tuple[str, str]] = {}

    def add(self, file: Any, full: str, scratch: str) -> None:
        """One more.

        Args:
            file: or a descriptor.
            full: what it stands for.
            scratch: where it is.
        """
        if isinstance(file, int):
            self._descriptors[file] = (full, scratch)
        else:
            self._handles.append((weakref.ref(file), full, scratch))

    def lead_all(self, is_mine: Callable[[str], bool]) -> set[str]:
        """Lead them to the real ones; gives which.

        Args:
            is_mine: nobody else has written to it.
        """
        still = [(file.fileno(), full, scratch) for reference, full, scratch in self._handles
                 if (file := reference()) is not None and not file.closed]  # fmt: skip
        still += [(fd, full, scratch) for fd, (full, scratch) in self._descriptors.items()
                  if _is_open_on(fd, scratch)]  # fmt: skip
        for fd, full, scratch in still:
            _lead(fd, full, scratch, is_mine(full))
        self._handles.clear()
        self._descriptors.clear()
        return {full for _, full, _ in still}


def _lead(fd: int, full: str, scratch: str, is_mine: bool) -> None:
    position = os.lseek(fd, 0, os.SEEK_CUR)
    flags = fcntl.fcntl(fd, fcntl.F_GETFL) & (os.O_ACCMODE | os.O_APPEND)
    real = os.open(full, os.O_RDWR | os.O_CREAT | (flags & os.O_APPEND), 0o666)
    try:
        if is_mine:  # else: what others have written would go
            _cut(real, _content(scratch), extend=True)
        os.lseek(real, position, os.SEEK_SET)
        os.dup2(real, fd, inheritable=False)
    finally:
        os.close(real)


def as_before(line: Line) -> None:
    """A file that the dead worker began to append to after this boundary: it is done again."""
    if line.kept is None:
        os.unlink(line.path)
    elif line.content is not None:
        cut(line.path, line.content)


def cut(path: str, wanted: str) -> None:
    """Take off a real file what comes after the content of another one."""
    with open(path, "r+b") as file:
        _cut(file.fileno(), _content(wanted), extend=False)


def _content(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _cut(fd: int, wanted: bytes, extend: bool) -> None:
    """Make a real file what the replay says it was, if one is the beginning of the other (a line
    with another time in it makes it neither; then it stays)."""
    size = os.fstat(fd).st_size
    have = os.pread(fd, min(size, len(wanted)), 0)
    if size >= len(wanted):
        if have == wanted:
            os.ftruncate(fd, len(wanted))
    elif extend and wanted.startswith(have):
        os.pwrite(fd, wanted[size:], size)


def _is_open_on(fd: int, path: str) -> bool:
    try:
        here, there = os.fstat(fd), os.stat(path)
    except OSError:
        return False
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)
