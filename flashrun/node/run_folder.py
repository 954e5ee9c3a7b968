"""The private folder of a job on its node: in shared memory, and on disk for what is large.

Workers' host-read logs are mapped from it while they train, so it must not be on a disk whose
write-back could stall them, and it outlives a worker but not the job. Files that are kept aside
(old checkpoints) would fill the memory; they go to ``view``, a link into the temporary folder.

A job that is killed with all its helpers can't remove it. So each holds a lock (flock(2)) in its
folder, and the next job of the user removes the folders whose lock nobody holds.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from flashrun.errors import UsageError
from flashrun.node.log_folder import remove_if_empty
from flashrun.observe.console import say
from flashrun.worker.private import PER_RANK

_SHARED_MEMORY = "/dev/shm"  # the folder below it is private to this user
_ENOUGH_BYTES = 64 << 20
_PREFIX = "flashrun_"
_VIEW = "view"
_LOGS = "logs"
_LOCK = "lock"
_LEFT = (*PER_RANK, "sealed", "copied")  # by a rank, `NAME.RANK`


def _base() -> str | None:
    """Shared memory if there is enough of it; None: the temporary folder."""
    try:
        room = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return None
    free = room.f_bavail * room.f_frsize
    return _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) and free >= _ENOUGH_BYTES else None


def make(logs: str = "") -> tuple[str, int]:
    """A new folder, readable by this user only.

    Args:
        logs: a temporary log folder, which goes with it if there is nothing to read in it.

    Returns:
        The folder, and a descriptor: the folder is in use as long as a process has it open.

    Raises:
        UsageError: there is no place for it.
    """
    try:
        folder = tempfile.mkdtemp(prefix=_PREFIX, dir=_base())
    except OSError as error:
        text = f"no folder for the job's own files: {error.strerror or error}"
        raise UsageError(f"{text}; set TMPDIR to a folder that can be written") from None
    _make_view(folder)
    if logs:
        os.symlink(logs, os.path.join(folder, _LOGS))
    lock = os.path.join(folder, _LOCK)
    # Under another name until it is held: it says that nobody is there if it can be had.
    mark = os.open(f"{lock}.new", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(mark, fcntl.LOCK_EX)
    os.rename(f"{lock}.new", lock)
    return folder, mark


def _make_view(folder: str) -> None:
    view = os.path.join(folder, _VIEW)
    try:
        os.symlink(tempfile.mkdtemp(prefix="flashrun_view_"), view)
    except OSError as error:
        os.mkdir(view)
        text = f"old contents of files that the job changes are kept in shared memory: {error}"
        remedy = "set TMPDIR to a folder that can be written"
        say(f"{text}; {remedy}", "warning", event="kept-in-memory")


def remove_abandoned() -> list[str]:
    """Remove what jobs of this user have left that were killed with all their helpers.

    Returns:
        The folders.
    """
    found = []
    try:
        base = Path(_base() or tempfile.gettempdir())
    except OSError:
        return []  # no place, so nothing is there
    for folder in base.glob(f"{_PREFIX}*"):
        try:
            if folder.stat().st_uid != os.getuid():
                continue
            mark = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # just being made or removed, or no folder of a job
        try:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            remove(str(folder))
            found.append(str(folder))
        finally:
            os.close(mark)
    return found


def begin_round(folder: str) -> None:
    """Nothing that workers of a round before have left here may meet those of the next: neither
    their logs nor the list of files that had changed since *they* began. None of them runs."""
    root = Path(folder)
    left = [root / "replay"]
    for name in _LEFT:
        left += root.glob(f"{name}.*")
    _clear(left)
    view = root / _VIEW
    try:
        _clear(view.iterdir())
    except OSError:
        if not view.is_symlink():
            raise
        view.unlink()  # its disk cannot be written any more
        _make_view(folder)


def _clear(left: Iterable[Path]) -> None:
    for path in left:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def remove(folder: str) -> None:
    """Remove the folder and its parts on disk; nothing happens if it is gone."""
    view = Path(folder, _VIEW)
    if view.is_symlink():
        shutil.rmtree(os.readlink(view), ignore_errors=True)
    logs = Path(folder, _LOGS)
    if logs.is_symlink():
        remove_if_empty(os.readlink(logs))
    shutil.rmtree(folder, ignore_errors=True)
