"""What the workers of a node were the first to change since the run began, and what was there.

One file that all of them append to, a line for each path. Beside what was there it has what the
file system said of it and of its folder in that moment (`Stamp`): by that other nodes tell whether
they see the same file, and who was first (:mod:`sharing`).
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAME = "registry"
KEPT = "kept"
LEFT = "left:"  # the old content was too large to be copied to another node; its bytes
FOLDER = "folder:"  # a folder that was removed; what was in it has lines of its own
MOVED = "moved:"  # a folder that was renamed with all in it
ALSO = "also:"  # not the first change: another rank's
_MARKS = (LEFT, FOLDER, MOVED, ALSO)


@dataclass(frozen=True)
class Stamp:
    """What a file system says of a file or a folder; times in ns, by its own clock."""

    inode: int
    size: int
    modified: int
    changed: int

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        return cls(status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    def to_json(self) -> list[int]:
        return [self.inode, self.size, self.modified, self.changed]


@dataclass(frozen=True)
class Line:
    """Attributes:
    kept: where the old content is; None: there was nothing; ``path`` itself: it is a folder, seen
        through its members; or one of the marks.
    was: what was there, right before.
    folder: the folder it is in, right before; None: not there either.
    rank: that is about to change it.
    node: whose line this is, by its number in the job; -1: this one's.
    """

    path: str
    kept: str | None
    was: Stamp | None = None
    folder: Stamp | None = None
    rank: int = -1
    node: int = -1

    @classmethod
    def parse(cls, raw: bytes | str) -> Line:
        return cls.of(json.loads(raw))

    @classmethod
    def of(cls, said: list[Any], node: int = -1) -> Line:
        """From JSON types."""
        path, kept, was, folder, rank = said
        was, folder = (None if s is None else Stamp(*s) for s in (was, folder))
        return cls(path, kept, was, folder, rank, node)

    def to_json(self) -> list[Any]:
        stamps = [None if s is None else s.to_json() for s in (self.was, self.folder)]
        return [self.path, self.kept, *stamps, self.rank]

    def pack(self) -> bytes:
        return json.dumps(self.to_json()).encode() + b"\n"

    @property
    def content(self) -> str | None:
        """The file with the old content; None: there was none, or it is not kept in one."""
        kept = self.kept
        if kept is None or kept == self.path or kept.startswith(_MARKS):
            return None
        return kept


class Registry:
    """See the module.

    Args:
        root: folder for it and for old contents.

    Attributes:
        lines: by path, as far as they were read.
        ranks: which have changed a path.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.lines: dict[str, Line] = {}
        self.ranks: dict[str, set[int]] = {}
        self._members: dict[str, list[Line]] = {}
        self._open = open  # before anybody replaces them
        self._stat = os.stat
        self._read = 0
        self._number = 0

    def __contains__(self, path: str) -> bool:
        return path in self.lines

    def within(self, folder: str) -> list[Line]:
        """What is known of the members of a folder."""
        return self._members.get(folder, [])

    def refresh(self) -> None:
        """Read what all workers of the node have appended."""
        try:
            size = self._stat(self.root / NAME).st_size
        except FileNotFoundError:
            return
        if size > self._read:
            with self._open(self.root / NAME, "rb") as file:
                self._take(file)

    @contextmanager
    def locked(self) -> Iterator[Callable[[Line], None]]:
        """Nobody else appends meanwhile, and `lines` has all there is; gives what appends."""
        with self._open(self.root / NAME, "a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self._take(file)

            def add(line: Line) -> None:
                file.write(line.pack())
                file.flush()
                self._read = file.tell()
                self._note(line)

            yield add

    def _take(self, file: Any) -> None:
        file.seek(self._read)
        for raw in file:
            if raw.endswith(b"\n"):
                self._note(Line.parse(raw))
                self._read += len(raw)

    def _note(self, line: Line) -> None:
        self.ranks.setdefault(line.path, set()).add(line.rank)
        if line.kept == ALSO:
            return
        if line.path not in self.lines:
            self._members.setdefault(os.path.dirname(line.path), []).append(line)
        self.lines[line.path] = line

    def keep(self, path: str, rank: int, in_place: bool, moves: bool = False) -> Line:
        """Keep what is there aside, before it is changed.

        Args:
            in_place: the content changes (copy); False: only the name goes (hard link).
            moves: it gets another name; a folder with all in it.

        Raises:
            OSError: no room, no permission, …
        """
        folder = stamp_of_folder(os.path.dirname(path))
        try:
            status = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return Line(path, None, None, folder, rank)
        kept = self._kept(path, status, in_place, moves)
        return Line(path, kept, Stamp.of(status), folder, rank)

    def _kept(self, path: str, status: os.stat_result, in_place: bool, moves: bool) -> str:
        mode = status.st_mode
        if stat.S_ISDIR(mode):
            if moves:
                return MOVED
            return path if in_place else FOLDER
        if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
            return path  # devices and sockets as they are
        self._number += 1
        kept = str(self.root / KEPT / f"{os.getpid()}-{len(self.lines)}-{self._number}")
        if stat.S_ISLNK(mode):
            if in_place:  # what it leads to changes
                shutil.copy2(path, kept)
            else:
                os.symlink(os.readlink(path), kept)
            return kept
        if not in_place:
            try:
                os.link(path, kept)
                return kept
            except OSError as error:
                if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK):
                    raise
        shutil.copy2(path, kept)
        return kept


def stamp_of_folder(folder: str) -> Stamp | None:
    """Of a folder, opened: NFS asks the server then, and otherwise may tell what it was. None:
    it is not there, or may not be read."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return Stamp.of(os.fstat(fd))
    finally:
        os.close(fd)
