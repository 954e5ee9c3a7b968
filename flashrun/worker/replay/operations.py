"""Operations on names (rename, remove, make a folder, …) of the interval in flight: a replacement
does again what the dead worker had done there, and finds it done.

Each is logged before and after. What had been done, and now fails since it was, counts as done.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from flashrun.worker.replay.journal import Reader, Writer

if TYPE_CHECKING:
    from flashrun.worker.replay.session import Session

FILE_OPERATION = 1  # kind of a record in the log
_BEGINS, _DONE, _FAILED = range(3)
# Kinds of operations; these are none that are done once.
_APPEND = "append"
_MAKE = "make"
_WRITE = "write"
_TAKE_AWAY = ("unlink", "rmdir", "rename")
_SINCE_IT_WAS = (errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY)


class Operations:
    """See the module.

    Attributes:
        appended: after a replay, files that the dead worker was the first to change, by appending,
            in what is done again.
        again: the interval that is done again.
        changed: paths whose content the dead worker had changed there, as long as that is not done
            again.
    """

    def __init__(self, session: Session) -> None:
        self.appended: set[str] = set()
        self.again = -1
        self.changed: set[str] = set()
        self._made: set[str] = set()
        self._session = session
        self._folder = session.folder / "operations"
        self._log: Writer | None = None
        # What is done again, and how each time went, in order.
        self._before: dict[tuple[str, str], list[int]] = {}
        self._gone: set[str] = set()  # what was there when that began, and is not any more

    def record(self) -> None:
        """Begin a new log. Raises OSError."""
        self._folder.mkdir(exist_ok=True, parents=True)
        self._log = Writer(self._folder)

    def take_over(self) -> None:
        """The replay is at its end: what the dead worker has done from here on."""
        reader = Reader(self._folder)
        self.again = self._session.boundary
        while (record := reader.peek()) is not None:
            boundary, state, what, path = json.loads(record.payload)
            if boundary >= self.again and what == _APPEND:
                self.appended.add(path)
            elif boundary >= self.again:
                self._was(state, what, path)
            reader.take()
        # those of the interval that begins now stay in the log: it may be done a third time
        self._log = Writer(self._folder, reader.here)

    def _was(self, state: int, what: str, path: str) -> None:
        """An operation of what is done again."""
        name = path.partition("\0")[0]
        if what == _MAKE or (what == "mkdir" and state == _DONE):
            self._made.add(name)
        elif what == _WRITE and name not in self._made:
            self.changed.add(name)
        if what in (_MAKE, _WRITE):
            return
        times = self._before.setdefault((what, path), [])
        if state != _BEGINS:
            del times[-1:]
        times.append(state)
        if state == _DONE and what in _TAKE_AWAY and name not in self._made:
            self._gone.add(name)

    def do(
        self, what: str, path: str, call: Callable[[], Any],
        instead: Callable[[], Any] = lambda: None,
    ) -> Any:  # fmt: skip
        """Carry one out.

        Args:
            what: kind of operation; with `path` (or two, a NUL between) what it is known by.
            instead: what there is left to do where it had been done before.
        """
        before = self._take(what, path)
        self._note(_BEGINS, what, path)
        try:
            result = call()
        except OSError as error:
            if error.errno not in _SINCE_IT_WAS or not self._was_done(before, what, path):
                self._note(_FAILED, what, path)
                raise
            result = instead()
        self._gone.discard(path.partition("\0")[0])
        self.mine(path.rpartition("\0")[2])
        self._note(_DONE, what, path)
        return result

    def appends(self, path: str) -> None:
        """A file that nobody has changed before is about to be appended to."""
        self._note(_DONE, _APPEND, path)

    def writes(self, path: str, is_there: bool) -> None:
        """A file is about to be written, or another one to get its name."""
        self.mine(path)
        self._note(_DONE, _WRITE if is_there else _MAKE, path)

    def mine(self, path: str) -> None:
        """It is done again from here on."""
        self._made.discard(path)
        self.changed.discard(path)

    def is_hidden(self, path: str) -> bool:
        """Whether there was nothing when what is done again began, and is now since the dead worker
        has made it."""
        made = self._made
        return bool(made) and (path in made or any(folder in made for folder in above(path)))

    def hidden_in(self, folder: str) -> set[str]:
        """Names in a folder that are hidden."""
        return {os.path.basename(path) for path in self._made if os.path.dirname(path) == folder}

    def _note(self, state: int, what: str, path: str) -> None:
        if self._log is None or not self._session.on:
            return
        said = [self._session.boundary, state, what, path]
        try:
            self._log.append(FILE_OPERATION, 0, json.dumps(said).encode())
        except OSError as error:
            self._session.give_up(f"the log of file operations can't grow: {error}", "")

    def was_done(self, what: str, path: str) -> bool:
        """Whether the dead worker had done it, and it is not done again."""
        self._gone.discard(path)
        return self._was_done(self._take(what, path), what, path)

    def missed(self, path: str | None) -> None:
        """The script finds nothing there; it did, if the dead worker took it away after that."""
        if path in self._gone and self._session.boundary == self.again and self._session.on:
            self._session.refuse(
                f"the script looks for {path}, which the dead worker had removed in this step"
            )

    def _take(self, what: str, path: str) -> int:
        """How it went the time that is now done again."""
        if self._session.boundary != self.again or not self._session.on:
            return _FAILED
        times = self._before.get((what, path))
        return times.pop(0) if times else _FAILED

    def _was_done(self, before: int, what: str, path: str) -> bool:
        if before == _BEGINS:
            self._session.refuse(
                f"the dead worker was about to {what} {path.replace(chr(0), ' to ')}; whether it"
                " had done so is not known"
            )
        return before == _DONE


def above(full: str) -> Iterator[str]:
    """The folders that a path is in, but for the root."""
    while len(full := os.path.dirname(full)) > 1:
        yield full


def merge(source: str, target: str) -> None:
    """Move what is in a folder into another one, where it may be already, and remove the folder."""
    with os.scandir(source) as found:
        entries = list(found)
    for entry in entries:
        there = os.path.join(target, entry.name)
        if entry.is_dir(follow_symlinks=False) and os.path.isdir(there):
            merge(entry.path, there)
        else:
            os.replace(entry.path, there)
    os.rmdir(source)
