"""The functions of Python and torch that open, change and remove files, led to a `FileView`; those
that only look at them are in `lookpatches`.

Python code reaches files through ``builtins.open``/``io.open`` and ``os``; ``pathlib``, ``glob``,
``shutil`` and ``os.path`` are built on those. ``torch.save`` opens its file in C++
(``torch/serialization.py``, ``_open_zipfile_writer_file``, torch 2.13) and so does
``torch.load(mmap=True)``, ``safetensors`` in Rust. What opens files in C otherwise (sqlite, HDF5)
is not seen.
"""

from __future__ import annotations

import builtins
import fcntl
import importlib
import importlib.util
import io
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from flashrun.worker.replay import lookpatches
from flashrun.worker.replay.lookpatches import at_folder, name_it
from flashrun.worker.replay.operations import merge

if TYPE_CHECKING:
    from flashrun.worker.replay.fileview import FileView

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def _opening(view: FileView, original: Callable[..., Any]) -> Callable[..., Any]:
    seen = view.seen
    read = lookpatches.opening(view, original)

    def open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        seen.count(file)
        if not any(letter in mode for letter in "wax+"):
            return read(file, mode, *args, **kwargs)
        if view.path(file) is None:
            return original(file, mode, *args, **kwargs)
        with seen.outcome(file):
            if view.replaying:
                return write(file, mode, *args, **kwargs)
            if "r" in mode:
                seen.changes(file)
            view.write_path(file, keep_content=True, append="a" in mode)
            if "x" not in mode:
                try:
                    opened = original(file, mode, *args, **kwargs)
                except FileNotFoundError:
                    view.missed(file)
                    raise
                if "r" in mode:
                    seen.opened(file, opened.fileno())
                return opened
            return view.operations.do(
                "create", str(view.path(file)), lambda: original(file, mode, *args, **kwargs),
                lambda: original(file, mode.replace("x", "w"), *args, **kwargs),
            )  # fmt: skip

    def write(file: Any, mode: str, *args: Any, **kwargs: Any) -> Any:
        """In a replay."""
        full = view.path(file)
        content = None
        if full is not None and "r" in mode:
            content = seen.read(file)  # must exist
        if full is not None and "x" in mode and not seen.exact and view.exists(full):
            raise FileExistsError(17, os.strerror(17), file)
        keeps = "a" in mode or "r" in mode
        scratch = view.write_path(file, keeps, append="a" in mode, content=content)
        opened = original(scratch, mode.replace("x", "w"), *args, **kwargs)
        view.opened(opened, file, scratch)
        name_it(opened, file)
        return opened

    return open


def _os_open(view: FileView, original: Callable[..., Any]) -> Callable[..., Any]:
    seen = view.seen
    read = lookpatches.os_opening(view, original)

    def open(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        seen.count(path)
        at = at_folder(path, kwargs)
        if not flags & _WRITES:
            return int(read(path, at, flags, *args, **kwargs))
        if view.path(at) is None:
            return int(original(at, flags, *args, **kwargs))
        with seen.outcome(path, at):
            return write(at, flags, *args, **kwargs)

    def write(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        full = view.path(path)
        if view.replaying and full is not None and not seen.exact:
            if flags & os.O_EXCL and view.exists(full):
                raise FileExistsError(17, os.strerror(17), path)
            if not flags & os.O_CREAT:
                view.read_path(path)
        append = bool(flags & os.O_APPEND)
        keeps = not flags & os.O_TRUNC
        reads = keeps and bool(flags & os.O_RDWR)
        content = seen.changes(path) if reads else None
        where = view.write_path(path, keeps, append=append, content=content)
        if view.replaying:
            flags = (flags & ~os.O_EXCL) | os.O_CREAT
        if flags & os.O_EXCL and not view.replaying:
            return int(view.operations.do(
                "create", str(full), lambda: original(where, flags, *args, **kwargs),
                lambda: original(where, (flags & ~os.O_EXCL) | os.O_TRUNC, *args, **kwargs),
            ))  # fmt: skip
        fd = int(original(where, flags, *args, **kwargs))
        if view.replaying:
            view.opened(fd, path, where)
        elif reads:
            seen.opened(path, fd)
        return fd

    return open


def _removing(
    view: FileView, original: Callable[..., Any], operation: str
) -> Callable[..., Any]:
    def remove(path: Any, *args: Any, **kwargs: Any) -> Any:
        view.seen.count(path)
        at = at_folder(path, kwargs)
        full = view.path(at)
        if full is None:
            return original(at, *args, **kwargs)
        with view.seen.outcome(path, at):
            if view.replaying:
                return view.remove(at, full)
            view.touch(at, in_place=False)
            return view.operations.do(operation, full, lambda: original(at, *args, **kwargs))

    return remove


def _rmtree(view: FileView, original: Callable[..., Any]) -> Callable[..., Any]:
    """What it removes is seen by the functions above; but it looks for the folder first."""

    def rmtree(path: Any, *args: Any, **kwargs: Any) -> Any:
        path = at_folder(path, kwargs)
        full = view.path(path)
        if full is None or view.replaying or view.is_there(full):
            return original(path, *args, **kwargs)
        if view.operations.was_done("rmdir", full):
            return None
        return original(path, *args, **kwargs)

    rmtree.avoids_symlink_attacks = False  # type: ignore[attr-defined]  # of the original
    return rmtree


def _mkdir(view: FileView, original: Callable[..., Any]) -> Callable[..., Any]:
    def mkdir(path: Any, *args: Any, **kwargs: Any) -> Any:
        view.seen.count(path)
        at = at_folder(path, kwargs)
        full = view.path(at)
        if full is None:
            return original(at, *args, **kwargs)
        with view.seen.outcome(path, at):
            if view.replaying:
                return view.make_folder(at, full)
            if not view.is_there(full):  # else it changes nothing
                view.touch(at, in_place=False)
            return view.operations.do("mkdir", full, lambda: original(at, *args, **kwargs))

    return mkdir


def _renaming(view: FileView, original: Callable[..., Any]) -> Callable[..., Any]:
    def rename(source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        view.seen.count(source)
        said = source
        for name in ("src_dir_fd", "dst_dir_fd"):
            kwargs["dir_fd"] = kwargs.pop(name, None)
            if name == "src_dir_fd":
                source = at_folder(source, kwargs)
            else:
                target = at_folder(target, kwargs)
        full, other = view.path(source), view.path(target)
        if view.replaying and (full is None) != (other is None):
            # from or to a temporary file, which is real: the other one is not to be touched
            full = full or os.path.realpath(os.fsdecode(source))
            other = other or os.path.realpath(os.fsdecode(target))
        if full is None or other is None:
            return original(source, target, *args, **kwargs)
        with view.seen.outcome(said, source):
            if view.replaying:
                return view.rename(source, full, other)
            return live(source, target, full, other, *args, **kwargs)

    def live(source: Any, target: Any, full: str, other: str, *args: Any, **kwargs: Any) -> Any:
        view.seen.before(source)
        view.operations.writes(other, view.is_there(other))
        # Its content may be overwritten under the new name.
        view.touch(source, in_place=True, moves=True)
        view.touch(target, in_place=False)
        view.seen.mine(other, below=True)

        def again() -> None:
            """The target is there from before; others may have put something into it since."""
            with view.really():
                if os.path.isdir(full):
                    merge(full, other)

        return view.operations.do(
            "rename", f"{full}\0{other}", lambda: original(source, target, *args, **kwargs), again
        )

    return rename


def _linking(view: FileView, original: Callable[..., Any]) -> Callable[..., Any]:
    def link(source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        view.seen.count(target)
        other = view.path(target)
        if other is None:
            return original(source, target, *args, **kwargs)
        with view.seen.outcome(target):
            where = view.write_path(target, keep_content=False)
            if not view.replaying:
                return view.operations.do(
                    "link", other, lambda: original(source, target, *args, **kwargs)
                )
            return original(view.read_path(source), where, *args, **kwargs)

    return link


def _changing(view: FileView, original: Callable[..., Any]) -> Callable[..., Any]:
    """chmod, utime, truncate: of the scratch copy, in a replay."""

    def change(path: Any, *args: Any, **kwargs: Any) -> Any:
        view.seen.count(path)
        if view.path(path) is None:
            return original(path, *args, **kwargs)
        with view.seen.outcome(path):
            if not view.replaying:
                view.seen.before(path)
                return original(view.write_path(path, keep_content=True), *args, **kwargs)
            content = view.seen.read(path)
            where = view.write_path(path, keep_content=True, content=content)
            return original(where, *args, **kwargs)

    return change


def _locking(view: FileView, original: Callable[..., Any]) -> Callable[..., Any]:
    """A replay locks nothing: a survivor may hold that lock."""

    def lock(*args: Any, **kwargs: Any) -> Any:
        if view.is_busy():
            return original(*args, **kwargs)
        with view.seen.locking():
            return None if view.replaying else original(*args, **kwargs)

    return lock


def _torch_save(view: FileView, original: Callable[..., Any]) -> Callable[..., Any]:
    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(f, (str, os.PathLike)) and view.path(f) is not None:
            f = view.write_path(f, keep_content=False)
        return original(obj, f, *args, **kwargs)

    return save


def _temporary(view: FileView, original: Callable[..., Any]) -> Callable[..., Any]:
    """A file or folder of a fresh name in the temporary folder: real, and nobody else's."""

    def make(*args: Any, **kwargs: Any) -> Any:
        # (suffix, prefix, dir) of mkdtemp, (dir, ...) of _mkstemp_inner, both in tempfile.py
        inner = original.__name__ == "_mkstemp_inner"
        place = args[0] if inner and args else kwargs.get("dir", args[2] if len(args) > 2 else None)
        if place is not None and os.fsdecode(place) != tempfile.gettempdir():
            with view.seen.naming():
                return original(*args, **kwargs)
        with view.really():  # the look at it as well: it was not there when the run began
            made = original(*args, **kwargs)
            view.left_alone += (os.path.realpath(os.fsdecode(made[1] if inner else made)),)
        return made

    return make


def _names(view: FileView, original: Callable[..., Any]) -> Callable[..., Any]:
    def next_name(sequence: Any) -> Any:
        seen = view.seen
        if not seen.names_files:
            return original(sequence)
        return seen.named(lambda: str(original(sequence)))

    return next_name


def _serialize_file(view: FileView, original: Callable[..., Any]) -> Callable[..., Any]:
    def serialize_file(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
        return original(tensors, view.write_path(filename, keep_content=False), *args, **kwargs)

    return serialize_file


def install(view: FileView) -> None:
    """Replace the functions."""
    wrap = view.session.patches.wrap
    for owner in (builtins, io):
        wrap(owner, "open", lambda original: _opening(view, original))
    places: list[Any] = [os]
    accessor = getattr(pathlib, "_NormalAccessor", None)  # Python 3.10: pathlib's own references
    if accessor is not None:
        places.append(accessor)
    makers: dict[str, Callable[[FileView, Callable[..., Any]], Callable[..., Any]]] = {
        "open": _os_open,
        "stat": lookpatches.status,
        "lstat": lookpatches.status,
        "readlink": lookpatches.readlink,
        "access": lookpatches.access,
        "mkdir": _mkdir,
        "rename": _renaming,
        "replace": _renaming,
        "link": _linking,
        "symlink": _linking,
        "truncate": _changing,
        "utime": _changing,
        "chmod": _changing,
        "listdir": lookpatches.listdir,
        "scandir": lookpatches.scandir,
        "unlink": lambda v, f: _removing(v, f, "unlink"),
        "remove": lambda v, f: _removing(v, f, "unlink"),
        "rmdir": lambda v, f: _removing(v, f, "rmdir"),
    }
    for name, make in makers.items():
        # os.open itself is what io.open's opener and Path.touch use
        wrap(os, name, partial(make, view))
    if accessor is not None:
        for name in makers:
            if name != "open" and hasattr(accessor, name):
                view.session.patches.set(accessor, name, staticmethod(getattr(os, name)))
        view.session.patches.set(accessor, "open", staticmethod(io.open))
    # rmtree by descriptors names files relative to open folders; by paths it is seen like the rest
    view.session.patches.set(shutil, "_use_fd_functions", False)
    wrap(shutil, "rmtree", lambda original: _rmtree(view, original))
    for name in ("mkdtemp", "_mkstemp_inner"):
        wrap(tempfile, name, lambda original: _temporary(view, original))
    wrap(tempfile._RandomNameSequence, "__next__", lambda original: _names(view, original))  # type: ignore[attr-defined]
    for name in ("flock", "lockf"):
        wrap(fcntl, name, lambda original: _locking(view, original))
    wrap(torch, "save", lambda original: _torch_save(view, original))
    wrap(torch, "load", lambda original: lookpatches.torch_load(view, original))
    if importlib.util.find_spec("safetensors") is not None:
        safetensors = importlib.import_module("safetensors")
        wrap(safetensors, "serialize_file", lambda original: _serialize_file(view, original))
        wrap(safetensors, "safe_open", lambda original: lookpatches.reading_in_c(view, original))
