"""What this rank's looks at files have found, where that is not simply what was there when the run
began: a log beside the host-read log, and in a replay the answers from it.

A *look* has a place: the number of regions before it, whether it is in one, and the how-manyeth use
of that path it is since. Logged is what differs from the look at the same path before, so a replay
has at each place what was found last. Failed changes of names (a folder that is there already) are
logged each time.
"""

from __future__ import annotations

import marshal
import os
from collections.abc import Container
from threading import Lock, get_ident
from typing import TYPE_CHECKING, Any, NamedTuple

from flashrun.errors import writing_remedy
from flashrun.worker.replay.journal import Reader, Writer

if TYPE_CHECKING:
    from flashrun.worker.replay.session import Session

LOOK = 1  # kind of a record in the log
_AGAIN = 2  # what a dead worker had found in the interval that its replacement does again

STATUS = "status"
LINK = "link"  # its status, not that of what it leads to
TARGET = "target"  # of a link
CONTENT = "content"
NAMES = "names"  # in a folder
FAILED = "failed"  # a change of it
FORK = "fork"  # no look: when a child was forked
LOCK = "lock"  # in place of a path
NAME = "name"  # that `tempfile` makes
_CHANNELS = (STATUS, LINK, TARGET, CONTENT, NAMES)

Key = tuple[str, str]
Place = tuple[int, int, Any]  # regions and side, uses of the path since, the path as it was written


class Look(NamedTuple):
    """Attributes:
    what: one of the words above.
    state: what was there; None: nothing.
    more: what belongs to it and is not compared.
    """

    boundary: int
    place: Place
    what: str
    path: str
    state: Any
    more: Any

    @property
    def key(self) -> Key:
        return self.what, self.path


class Looks:
    """See the module.

    Args:
        busy: threads whose looks are none of the script's.
    """

    def __init__(self, session: Session, busy: Container[int]) -> None:
        self._session = session
        self._busy = busy
        self._folder = session.folder / "looks"
        self._log: Writer | None = None
        self._lock = Lock()
        self._uses: dict[Any, int] = {}  # of a path as the script writes it, since `_stretch` began
        self._stretch = -1
        self._last: dict[Key, Any] = {}  # what was found last
        self._logged: dict[Key, list[Look]] = {}  # in a replay, what is to come, the next one last
        self._now: dict[Key, Look] = {}
        self._again: dict[Key, list[Look]] = {}  # of the interval that is done again
        self._before: dict[Key, Look] = {}  # found last before that

    def record(self) -> None:
        """Begin a new log. Raises OSError."""
        self._folder.mkdir(exist_ok=True, parents=True)
        self._log = Writer(self._folder)

    # --- places

    def count(self, path: Any) -> None:
        """The script uses a path."""
        session = self._session
        if get_ident() != session.main or session.main in self._busy:
            return
        stretch = session.ordinal * 2 + (session.depth == 0)
        if stretch != self._stretch:
            self._stretch = stretch
            self._uses.clear()
        path = _written(path)
        self._uses[path] = self._uses.get(path, 0) + 1

    def _place(self, path: Any, ahead: int = 0) -> Place:
        session = self._session
        stretch = session.ordinal * 2 + (session.depth == 0)
        path = _written(path)
        uses = self._uses.get(path, 0) if stretch == self._stretch else 0
        return stretch, uses + ahead, path

    def _reached(self, place: Place, now: Place) -> bool:
        """Whether the script has come to a place."""
        if place[0] != now[0]:
            return place[0] < now[0]
        if place[2] == now[2]:
            return place[1] <= now[1]
        uses = self._uses if now[0] == self._stretch else {}
        return place[1] <= uses.get(place[2], 0)

    # --- live

    def was(self, what: str, full: str, state: Any) -> bool:
        """Whether that is what was found there last."""
        return bool(self._last.get((what, full), self) == state)

    def note(self, what: str, path: Any, full: str, state: Any, more: Any = None) -> None:
        """Log what a look has found, if that is new."""
        key = what, full
        if what in _CHANNELS:
            if self.was(what, full, state):
                return
            self._last[key] = state
        look = Look(self._session.boundary, self._place(path), what, full, state, more)
        with self._lock:
            self._append(LOOK, tuple(look))

    def _append(self, kind: int, said: Any) -> None:
        if self._log is None or not self._session.on:
            return
        try:
            self._log.append(kind, 0, marshal.dumps(said))
        except OSError as error:
            self._session.give_up(
                f"the log of looks at files can't grow: {error}",
                writing_remedy(error, self._folder),
            )

    def mine(self, full: str, folder: str, below: bool = False) -> None:
        """This rank is about to change a path: what was found there before does not count.

        Args:
            folder: that it is in.
            below: what is in it changes with it.
        """
        stretch = self._session.ordinal * 2
        for what in _CHANNELS if self._logged else ():
            to_come = self._logged.get((what, full))
            while to_come and to_come[-1].place[0] < stretch:  # in what was skipped
                to_come.pop()
        for table in (self._last, self._now, self._again, self._before):
            if not table:
                continue
            table.pop((NAMES, folder), None)
            for what in _CHANNELS:
                table.pop((what, full), None)
            if below:
                for key in [key for key in table if key[1].startswith(full + "/")]:
                    del table[key]

    # --- replay

    def load(self) -> None:
        """Read what the dead worker has left.

        Raises:
            OSError, ValueError: it can't be had.
        """
        reader = Reader(self._folder)
        while (record := reader.take()) is not None:
            if record.kind == LOOK:
                look = Look(*marshal.loads(record.payload))
                self._logged.setdefault(look.key, []).append(look)
        for looks in self._logged.values():
            looks.reverse()

    def at(self, what: str, full: str, path: Any, ahead: int = 0) -> Look | None:
        """What this look found; None: what was there when the run began, or what the replay has
        made of it.

        Args:
            path: as the script has it.
            ahead: the use of it that is meant is still to come.
        """
        key = what, full
        place = self._place(path, ahead)
        to_come = self._logged.get(key)
        while to_come and self._reached(to_come[-1].place, place):
            self._now[key] = to_come.pop()
        look = self._now.get(key)
        if look is None and to_come and get_ident() != self._session.main:
            return to_come[-1]  # of a thread, which may be ahead of where it was
        if look is not None and look.place[0] > place[0]:
            raise self._session.diverged(
                f"a batch that is kept from before {full} was changed is read again"
            )
        return look

    def failed_at(self, full: str, path: Any) -> int:
        """The error of a change of names here; 0: it succeeded."""
        return int(self.said_at(FAILED, full, path) or 0)

    def said_at(self, what: str, full: str, path: Any) -> Any:
        """What is logged of exactly this place; None: nothing."""
        place = self._place(path)
        looks = [*self._logged.get((what, full), ()), *self._again.get((what, full), ())]
        return next((look.state for look in looks if look.place == place), None)

    def take_over(self) -> None:
        """The replay is at its end: go on from here, as if the dead worker had died here. What it
        had found since is kept for the interval that is done again."""
        boundary = self._session.boundary
        reader = Reader(self._folder)
        again: list[Look] = []
        end = None
        while (record := reader.peek()) is not None:
            said = marshal.loads(record.payload)
            looks = [Look(*said)] if record.kind == LOOK else [Look(*look) for look in said]
            if end is None and any(look.boundary >= boundary for look in looks):
                end = reader.here
            again += (look for look in looks if look.boundary >= boundary)
            reader.take()
        for key, to_come in self._logged.items():
            past = [look for look in to_come if look.boundary < boundary]
            if past:
                self._now[key] = past[0]
        for look in again:
            self._again.setdefault(look.key, []).append(look)
        self._last = {key: look.state for key, look in self._now.items()}
        self._before = dict(self._now)
        self._logged.clear()
        self._now.clear()
        self._log = Writer(self._folder, end or reader.here)
        if again:
            self._append(_AGAIN, [tuple(look) for look in again])

    # --- the interval that is done again

    def again(self, what: str, full: str, path: Any, came: bool = False) -> Look | None:
        """What the dead worker had found here; None: it had not come to this, or nothing says.

        Args:
            came: it is known that it had.
        """
        looks = self._again.get((what, full), [])
        place = self._place(path)
        before = [look for look in looks if self._reached(look.place, place)]
        if looks:
            came = came or len(before) < len(looks) or looks[-1].place == place
        return (before[-1] if before else self._before.get((what, full))) if came else None

    def forget(self) -> None:
        """The interval that was done again is over."""
        self._again.clear()
        self._before.clear()


def _written(path: Any) -> Any:
    """A path as the script has it, to tell it from others."""
    if type(path) is str:
        return path
    return os.fspath(path) if isinstance(path, (str, bytes, os.PathLike)) else ""
