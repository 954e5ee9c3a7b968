"""The script's looks at files: live, what they find is logged (`looks`) where it may differ from
what was there when the run began; in a replay each is answered by what it had found.

A status, a listing and the failure of a change are in the log as a whole. A content is the file
that has the logged stamp: the one that is there, one that is kept (`registry`), or a copy in the
log, which small files that others have changed have there. With none of them the replay ends.

What has not changed for `_BEFORE` ns before the script began costs nothing: its time says so.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, Any

from flashrun.worker.replay import looks
from flashrun.worker.replay.looks import CONTENT, LINK, NAMES, STATUS, TARGET, Look, Looks
from flashrun.worker.replay.registry import Stamp

if TYPE_CHECKING:
    from flashrun.worker.replay.fileview import FileView

_BEFORE = 60 * 10**9  # ns; ranks begin at different times, and the clocks of file servers differ
_SMALL = 64 << 10  # bytes of a content that is logged
_MOST = 16 << 20  # bytes of all of them
_TICK = 20_000_000  # ns; the clock of a file system may stand still for that long
_APART = 2 * 10**9  # ns; the same, of a file server
_MANY = 10_000  # names in a folder, of which only a checksum is logged
_FIELDS = ("mode", "ino", "dev", "nlink", "uid", "gid", "size", "mtime_ns", "ctime_ns", "blksize",
           "blocks", "rdev")  # fmt: skip
_MODE, _INODE, _SIZE, _MODIFIED, _CHANGED = (
    _FIELDS.index(name) for name in ("mode", "ino", "size", "mtime_ns", "ctime_ns")
)

State = tuple[int, ...]


def state_of(status: os.stat_result) -> State:
    """What is logged of a status, and compared."""
    return tuple(getattr(status, f"st_{name}") for name in _FIELDS)


def status_of(state: State, accessed: int) -> os.stat_result:
    """The status again. ``accessed``: in ns."""
    said = dict(zip(_FIELDS, state, strict=True), atime_ns=accessed)
    more: dict[str, Any] = {f"st_{name}": value for name, value in said.items()}
    for name in ("st_atime", "st_mtime", "st_ctime"):
        ns = more[f"{name}_ns"]
        more[name] = ns // 10**9 + 1e-9 * (ns % 10**9)
    tenth = ("mode", "ino", "dev", "nlink", "uid", "gid", "size")
    times = [more[f"st_{name}_ns"] // 10**9 for name in ("atime", "mtime", "ctime")]
    return os.stat_result([*(said[name] for name in tenth), *times], more)


def missing(path: Any) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))


def _stamp(state: State) -> Stamp:
    return Stamp(state[_INODE], state[_SIZE], state[_MODIFIED], state[_CHANGED])


def _names(found: Iterable[str]) -> Any:
    """What is logged of the names in a folder."""
    names = tuple(found)
    return names if len(names) <= _MANY else zlib.crc32("\0".join(sorted(names)).encode())


class Seen:
    """See the module.

    Attributes:
        since: ns of the epoch; what has changed after it is looked at closely.
        names_files: see `naming`.
        answers: looks may have an answer: in a replay, and in the interval that is done again.
    """

    def __init__(self, view: FileView, log: Looks) -> None:
        self._view = view
        self._session = view.session
        self._log = log
        self._pid = os.getpid()
        self._room = _MOST
        self._copies = self._session.folder / "found"
        self._laid: dict[Look, str] = {}
        self._forked = 0  # in a replay: when the dead worker forked the child that this is
        self.count = log.count
        self.answers = view.replaying
        self.names_files = False
        self.since = 0

    def begin(self) -> None:
        """Raises OSError, ValueError."""
        self.since = self._session.began - _BEFORE
        shutil.rmtree(self._copies, ignore_errors=True)
        if self._view.replaying:
            self._log.load()
        else:
            self._log.record()
        os.register_at_fork(before=self._forking)

    # --- live

    def _logs(self, path: Any, at: Any = None) -> str | None:
        """The absolute path, if looks at it are logged; see :meth:`status`."""
        if self._view.replaying or not self._session.on:
            return None
        return self._view.path(path if at is None else at)

    def status(self, what: str, path: Any, status: os.stat_result, at: Any = None) -> None:
        """A look has found this, which has changed after `since`.

        Args:
            path: as the script has it.
            at: the same, where that is relative to an open folder.
        """
        full = self._logs(path, at)
        if full is not None:
            self._log.note(what, path, full, state_of(status), status.st_atime_ns)

    def nothing(self, what: str, path: Any, at: Any = None) -> None:
        """A look has found nothing."""
        full = self._logs(path, at)
        if full is not None:
            self._log.note(what, path, full, None)

    def opened(self, path: Any, fd: int, at: Any = None) -> None:
        """A file was opened to be read."""
        status = os.fstat(fd)
        if status.st_ctime_ns > self.since:
            full = self._logs(path, at)
            if full is not None:
                self._content(path, full, fd, status)

    def _content(self, path: Any, full: str, fd: int, status: os.stat_result) -> None:
        content = None
        if self._log.was(CONTENT, full, state_of(status)):
            return
        if stat.S_ISREG(status.st_mode):
            age = time.time_ns() - status.st_ctime_ns
            if status.st_size <= min(_SMALL, self._room):
                content = os.pread(fd, _SMALL, 0)
            elif age < _TICK and not self._view.is_mine(full):
                # Whatever changes from the next tick on has another time.
                threading.Event().wait(min(_TICK - age, _TICK) / 1e9)
                status = os.fstat(fd)
        self._room -= len(content or b"")
        self._log.note(CONTENT, path, full, state_of(status), content)

    def before(self, path: Any) -> None:
        """A content is about to be used by what opens it in C, or is moved or changed with it. (Not
        opened here: to close it would end locks that this process has on it.)"""
        full = self._logs(path)
        if full is None:
            return
        with self._view.really():
            try:
                status = os.stat(full)
            except OSError:
                return
        if status.st_ctime_ns > self.since and stat.S_ISREG(status.st_mode):
            self._log.note(CONTENT, path, full, state_of(status))

    def changes(self, path: Any) -> str | None:
        """A content is about to be read and changed; gives where a replay has it."""
        look = self.found(CONTENT, path) if self.answers else None
        return self.content(look) if look is not None and look.state is not None else None

    def target(self, path: Any, target: str, at: Any = None) -> None:
        """A link was read."""
        full = self._logs(path, at)
        if full is not None:
            with self._view.really():
                changed = os.lstat(full).st_ctime_ns > self.since
            if changed:
                self._log.note(TARGET, path, full, target)

    def names(self, path: Any, names: Iterable[str]) -> bool:
        """A folder was listed; gives whether it has changed."""
        if self._view.replaying:
            self._view.listed(self._view.path(path), names)
            return False
        try:
            if self._view.real.os_stat(path).st_ctime_ns <= self.since:
                return False
        except FileNotFoundError:
            pass  # since it was listed
        full = None if isinstance(path, (bytes, int)) else self._logs(path)
        if full is not None:
            self._log.note(NAMES, path, full, _names(names))
        return full is not None

    def _failed(self, path: Any, error: int | None, at: Any) -> None:
        full = self._logs(path, at)
        if full is not None and error:
            self._log.note(looks.FAILED, path, full, error)

    def mine(self, full: str, below: bool = False) -> None:
        """See `Looks.mine`."""
        self._log.mine(full, os.path.dirname(full), below)

    def _forking(self) -> None:
        if not (self._session.on and get_ident() == self._session.main):
            return
        self._log.count(looks.FORK)
        if self._view.replaying:
            look = self._log.at(looks.FORK, "", looks.FORK)
            self._forked = look.state if look is not None else 0
        else:
            self._log.note(looks.FORK, looks.FORK, "", time.time_ns())

    # --- replay, and the interval that is done again

    @property
    def _on_main(self) -> bool:
        """Whether this is the script's main thread, in the worker itself."""
        return get_ident() == self._session.main and os.getpid() == self._pid

    @property
    def exact(self) -> bool:
        """Whether the log has all that the script does here."""
        session = self._session
        return self._on_main and session.depth == 0 and session.past is None

    def found(self, what: str, path: Any, at: Any = None, ahead: int = 0) -> Look | None:
        """What this look has found; None: nothing is logged of it.

        Raises:
            Divergence: it is not known.
        """
        full = self._view.path(path if at is None else at)
        if full is None:
            return None
        session = self._session
        if not self._view.replaying:
            return self._found_again(what, path, full)
        if os.getpid() != self._pid:
            return self._found_by_child(what, full)
        look = self._log.at(what, full, path, ahead)
        if get_ident() == session.main and (
            session.past is not None or (session.depth == 0 and session.peek() is None)
        ):
            self._must_be_so_now(what, full, look)
        return look

    def _now(self, what: str, full: str) -> Any:
        """As a state in the log."""
        with self._view.really():
            try:
                if what == NAMES:
                    return _names(os.listdir(full))
                if what == TARGET:
                    return os.readlink(full)
                return state_of(os.lstat(full) if what == LINK else os.stat(full))
            except FileNotFoundError:
                return None

    def _must_be_so_now(self, what: str, full: str, look: Look | None) -> None:
        """Past the end of the dead worker's log nothing says whether it had looked, and when."""
        if look is not None:
            same = self._now(what, full) == look.state
        elif what == NAMES and self._view.changed_folder(full):
            with self._view.really():
                same = {*os.listdir(full)} == {*self._view.members(full)}
        else:
            same = self._view.unchanged(full)
        if not same:
            raise self._session.diverged(
                f"the dead worker's log ends where its script looks at {full}, which was changed"
                " about then: what it had seen there is not known"
            )

    def _found_by_child(self, what: str, full: str) -> Look | None:
        """A child (loader worker) of the replay: its looks are not logged. What has not changed
        since the dead worker had forked its own is as that one saw it."""
        try:
            state = self._now(what, full)
        except OSError:
            return None
        if state is None:
            return None
        apart = _TICK if self._session.rt.others is None else _APART
        with self._view.really():
            changed = os.stat(full).st_ctime_ns
        if changed > self._forked - apart:
            if self._view.is_changed(full):
                raise self._session.diverged(
                    f"a child of the script (a loader's worker?) looks at {full}, which was changed"
                    " after that of the dead worker was started: what it saw there is not known"
                )
            return None
        return Look(0, (0, 0, ""), what, full, state, 0)

    def _found_again(self, what: str, path: Any, full: str) -> Look | None:
        session, operations = self._session, self._view.operations
        if session.boundary != operations.again or not session.on:
            self.answers = False
            self._log.forget()
            return None
        if get_ident() != session.main:
            return None
        # What it had changed it had looked at before, as this does.
        look = self._log.again(what, full, path, what == CONTENT and full in operations.changed)
        if look is None and operations.is_hidden(full):
            look = Look(session.boundary, (0, 0, ""), what, full, None, None)
        if look is None and what == CONTENT and full in operations.changed:
            session.refuse(
                f"the script reads {full}, which the dead worker had changed in this step"
            )
        if look is not None:
            self._log.note(what, path, full, look.state, look.more)
        return look

    @contextmanager
    def outcome(self, path: Any, at: Any = None) -> Iterator[None]:
        """A change of a path. Where it fails that is logged, and in a replay it fails again."""
        if self.answers:
            self._fail_again(path, at)
        try:
            yield
        except OSError as error:
            self._failed(path, error.errno, at)
            raise

    @contextmanager
    def locking(self) -> Iterator[None]:
        """A file is about to be locked; that somebody else has it locked is a look, too."""
        self.count(looks.LOCK)
        mine = self._session.on and self._on_main
        error = self._log.failed_at(looks.LOCK, looks.LOCK) if mine and self.answers else 0
        try:
            if error:
                raise OSError(error, os.strerror(error))
            yield
        except OSError as failed:
            if mine and not self._view.replaying:
                self._log.note(looks.FAILED, looks.LOCK, looks.LOCK, failed.errno)
            raise

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Names that `tempfile` makes are the script's."""
        before, self.names_files = self.names_files, True
        try:
            yield
        finally:
            self.names_files = before

    def named(self, make: Callable[[], str]) -> str:
        """A name that `tempfile` makes for a folder that the script has told it."""
        self.count(looks.NAME)
        if not (self._session.on and self._on_main):
            return make()
        said = self._log.said_at(looks.NAME, "", looks.NAME) if self.answers else None
        name = make() if said is None else str(said)
        if not self._view.replaying:
            self._log.note(looks.NAME, looks.NAME, "", name)
        return name

    def _fail_again(self, path: Any, at: Any) -> None:
        full = self._view.path(path if at is None else at)
        if full is None or not self._on_main:
            return
        error = self._log.failed_at(full, path)
        if error:
            if not self._view.replaying:
                self._log.note(looks.FAILED, path, full, error)
            raise OSError(error, os.strerror(error), os.fspath(path))

    def read(self, path: Any, at: Any = None, ahead: int = 0) -> Any:
        """The path to really read from; in a replay and where something is done again.

        Raises:
            FileNotFoundError: nothing was there.
            Divergence: see `content`.
        """
        where = path if at is None else at
        look = self.found(CONTENT, path, at, ahead)
        if look is None:
            return self._view.read_path(where)
        if look.state is None:
            raise missing(path)
        found = self.content(look)
        return where if found == look.path else found

    def content(self, look: Look) -> str:
        """Where the content is that a look has found.

        Raises:
            Divergence: nobody has it any more.
        """
        view, full, state = self._view, look.path, look.state
        now = self._now(STATUS, full)
        if now is not None and not stat.S_ISREG(state[_MODE]):
            return full
        if now is not None and _stamp(now) == _stamp(state):
            return full
        if look.more is not None:
            return self._lay(look)
        kept = view.kept(full, _stamp(state))
        if kept is not None:
            return kept
        what = (
            f"the script reads {full}, which was made or changed since it began, and again since"
            " this was read: what it held then is not kept; write what changes to a new name each"
            f" time, or in less than {_SMALL >> 10} KB"
        )
        if not view.replaying:
            self._session.refuse(what)
        raise self._session.diverged(what)

    def _lay(self, look: Look) -> str:
        """A file with the content in the log."""
        place = self._laid.get(look)
        if place is None:
            with self._view.really():
                self._copies.mkdir(exist_ok=True)
                place = self._laid[look] = str(self._copies / f"{os.getpid()}-{len(self._laid)}")
                with open(place, "wb") as file:
                    file.write(look.more)
        return place

    def names_again(self, path: Any, real: Any) -> list[str] | None:
        """The names that a listing has found, in their order; None: nothing is logged.

        Args:
            real: gives those that are there.
        """
        look = self.found(NAMES, path)
        if look is None:
            full = self._view.path(path)
            if self._view.replaying or full is None:
                return None
            hidden = self._view.operations.hidden_in(full)
            return [name for name in real() if name not in hidden] if hidden else None
        if look.state is None:
            raise missing(path)
        if isinstance(look.state, int):
            names = list(real())
            if _names(names) != look.state:
                raise self._session.diverged(
                    f"the folder {look.path} holds other files than when the dead worker listed it,"
                    f" and lists of more than {_MANY} are not kept"
                )
            return names
        return list(look.state)

