"""The functions of Python and torch that look at files, led to a `FileView`: those that ask for a
status, list a folder, or open a file to read it. See `filepatches`.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from flashrun.worker.replay.looks import CONTENT, LINK, NAMES, STATUS, TARGET
from flashrun.worker.replay.seen import Seen, missing, status_of

if TYPE_CHECKING:
    from flashrun.worker.replay.fileview import FileView


class Entry:
    """An ``os.DirEntry`` of the old view."""

    def __init__(self, folder: str, name: str) -> None:
        self.name = name
        self.path = os.path.join(folder, name)

    def __fspath__(self) -> str:
        return self.path

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self.path) if follow_symlinks else os.lstat(self.path)

    def inode(self) -> int:
        return self.stat(follow_symlinks=False).st_ino

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_ISDIR, follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_ISREG, follow_symlinks)

    def is_symlink(self) -> bool:
        return self._is(stat.S_ISLNK, False)

    def is_junction(self) -> bool:
        return False

    def _is(self, test: Callable[[int], bool], follow: bool) -> bool:
        try:
            return test(self.stat(follow_symlinks=follow).st_mode)
        except FileNotFoundError:
            return False


class Scan:
    """What ``os.scandir`` returns."""

    def __init__(self, entries: list[Any]) -> None:
        self._entries: Iterator[Any] = iter(entries)

    def __iter__(self) -> Scan:
        return self

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> Scan:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries = iter(())


def name_it(file: Any, path: Any) -> None:
    """A file in the scratch place says the name that the script gave."""
    raw = file
    for attribute in ("buffer", "raw"):
        raw = getattr(raw, attribute, raw)
    if isinstance(raw, io.FileIO):
        raw.name = path


def at_folder(path: Any, kwargs: dict[str, Any]) -> Any:
    """A path relative to an open folder as one that stands for itself; takes the argument away."""
    folder = kwargs.pop("dir_fd", None)
    if folder is None:
        return path
    return os.path.join(os.readlink(f"/proc/self/fd/{folder}"), os.fsdecode(path))


def opening(view: FileView, original: Callable[..., Any]) -> Callable[..., Any]:
    """``open`` to read."""
    seen = view.seen

    def read(file: Any, mode: str, *args: Any, **kwargs: Any) -> Any:
        where = seen.read(file) if seen.answers else file
        try:
            opened = original(where, mode, *args, **kwargs)
        except FileNotFoundError:
            view.missed(file)
            seen.nothing(CONTENT, file)
            raise
        if where is file:
            seen.opened(file, opened.fileno())
        else:
            name_it(opened, file)
        return opened

    return read


def os_opening(view: FileView, original: Callable[..., Any]) -> Callable[..., Any]:
    """``os.open`` to read."""
    seen = view.seen

    def read(path: Any, at: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        where = seen.read(path, at) if seen.answers else at
        try:
            fd = int(original(where, flags, *args, **kwargs))
        except FileNotFoundError:
            view.missed(at)
            seen.nothing(CONTENT, path, at)
            raise
        if where is at:
            seen.opened(path, fd, at)
        return fd

    return read


def readlink(view: FileView, original: Callable[..., Any]) -> Callable[..., Any]:
    seen = view.seen

    def readlink(path: Any, *args: Any, **kwargs: Any) -> Any:
        seen.count(path)
        at = at_folder(path, kwargs)
        look = seen.found(TARGET, path, at) if seen.answers else None
        if look is not None and look.state is None:
            raise missing(path)
        if look is not None:
            return os.fsencode(look.state) if isinstance(path, bytes) else look.state
        try:
            target = original(view.read_path(at), *args, **kwargs)
        except FileNotFoundError:
            seen.nothing(TARGET, path, at)
            raise
        seen.target(path, os.fsdecode(target), at)
        return target

    return readlink


def reading_in_c(view: FileView, original: Callable[..., Any]) -> Callable[..., Any]:
    seen = view.seen

    def read(path: Any, *args: Any, **kwargs: Any) -> Any:
        seen.count(path)
        where = seen.read(path) if seen.answers else path
        if where is path:
            seen.before(path)
        try:
            return original(where, *args, **kwargs)
        except FileNotFoundError:
            seen.nothing(CONTENT, path)
            raise

    return read


def status(view: FileView, original: Callable[..., Any]) -> Callable[..., Any]:
    seen = view.seen
    kind = LINK if original.__name__ == "lstat" else STATUS

    def status(path: Any, *args: Any, **kwargs: Any) -> Any:
        seen.count(path)
        what = LINK if kwargs.get("follow_symlinks") is False else kind
        at = at_folder(path, kwargs) if "dir_fd" in kwargs else path
        if seen.answers:
            look = seen.found(what, path, at)
            if look is not None and look.state is None:
                raise missing(path)
            if look is not None:
                return status_of(look.state, look.more)
        if view.replaying:
            return view.status(at, original(view.read_path(at), *args, **kwargs))
        try:
            found = original(at, *args, **kwargs)
        except FileNotFoundError:
            view.missed(at)
            seen.nothing(what, path, at)
            raise
        if found.st_ctime_ns > seen.since:
            seen.status(what, path, found, at)
        return found

    return status


def access(view: FileView, original: Callable[..., Any]) -> Callable[..., Any]:
    def access(path: Any, *args: Any, **kwargs: Any) -> bool:
        try:
            found = os.stat(path, dir_fd=kwargs.get("dir_fd"))
        except FileNotFoundError:
            return False
        except OSError:
            return bool(original(path, *args, **kwargs))
        where = path if view.path(path) is None else view.readable(path)
        return bool(original(where, *args, **kwargs)) if where is not None else bool(found)

    return access


def listdir(view: FileView, original: Callable[..., Any]) -> Callable[..., Any]:
    seen = view.seen

    def listdir(path: Any = ".") -> Any:
        seen.count(path)
        names = None
        if not isinstance(path, bytes):
            names = _names_of_then(view, path, lambda: original(path))
        if names is None:
            names = _listed(seen, path, lambda: original(path))
        seen.names(path, names)
        return names

    return listdir


def _names_of_then(view: FileView, path: Any, real: Callable[[], Any]) -> Any:
    """The names in a folder as the dead worker had found them, or as they were when the run began;
    None: those that are there."""
    if not view.seen.answers:
        return None
    names = view.seen.names_again(path, real)
    full = view.path(path)
    if names is None and full is not None and view.replaying and view.changed_folder(full):
        names = view.members(full)
    return names


def _listed(seen: Seen, path: Any, names: Callable[[], Any]) -> Any:
    try:
        return names()
    except FileNotFoundError:
        seen.nothing(NAMES, path)
        raise


def scandir(view: FileView, original: Callable[..., Any]) -> Callable[..., Any]:
    seen = view.seen

    def real(path: Any) -> list[Any]:
        with original(path) as found:
            return list(found)

    def scandir(path: Any = ".") -> Any:
        seen.count(path)
        if isinstance(path, (bytes, int)):
            return original(path)
        names = _names_of_then(view, path, lambda: [entry.name for entry in real(path)])
        entries: list[Any] = []
        if names is None:
            entries = _listed(seen, path, lambda: real(path))
        found = names if names is not None else [entry.name for entry in entries]
        if seen.names(path, found):
            names = found  # what it says of its members is to be logged as well
        if names is not None:
            entries = [Entry(os.fspath(path), name) for name in names]
        return Scan(entries)

    return scandir


def torch_load(view: FileView, original: Callable[..., Any]) -> Callable[..., Any]:
    """It opens the file in Python, and may map it in C++."""
    seen = view.seen

    def load(f: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(f, (str, os.PathLike)) and seen.answers:
            where = seen.read(f, ahead=1)
            if where is not f:
                seen.count(f)
                f = where
        return original(f, *args, **kwargs)

    return load
