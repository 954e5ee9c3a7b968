"""A watch on an embedded store: its events are those that the client has in memory."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from flashrun.rendezvous.kv import Compacted, Event, Forked, Snapshot
from flashrun.rendezvous.watch import Watch, difference, note

if TYPE_CHECKING:
    from flashrun.rendezvous.embedded import EmbeddedStore


class EmbeddedWatch(Watch):
    """Reads what the client has in memory."""

    def __init__(self, store: EmbeddedStore, prefix: str, start: Snapshot | int) -> None:
        super().__init__(prefix, start if isinstance(start, int) else start.revision)
        self._store = store
        self._known: dict[str, int] | None = None
        if isinstance(start, Snapshot):
            self._known = {key: entry.revision for key, entry in start.entries.items()}
        self._closed = False

    def get(self, timeout_s: float) -> list[Event]:
        store = self._store
        if os.getpid() != store._pid:
            raise Forked(f"The watch of {store.where} was made in another process.")
        deadline = time.monotonic() + timeout_s
        with store._news:
            while not self._closed:
                events = self._new()
                if events:
                    return events
                if store._lost is not None:
                    raise store._lost
                left = deadline - time.monotonic()
                if left <= 0 or store._closed:
                    break
                store._news.wait(left)
            return []

    def _new(self) -> list[Event]:
        store = self._store
        if self.revision < store._floor:
            events = self._resync()
        else:
            found = []
            for revision, of_record in reversed(store._recent):
                if revision <= self.revision:
                    break
                found.append([e for e in of_record if e.key.startswith(self.prefix)])
            events = [event for of_record in reversed(found) for event in of_record]
        self.revision = store._state.revision
        if self._known is not None:
            note(self._known, events)
        return events

    def _resync(self) -> list[Event]:
        if self._known is None:
            raise Compacted(
                f"{self._store.where} keeps nothing from before revision {self._store._floor}, and "
                f"the watch of {self.prefix!r} is to go on after {self.revision}. Take a snapshot "
                "and watch from that."
            )
        return difference(self._known, self.revision, self._store._snapshot(self.prefix))

    def close(self) -> None:
        with self._store._news:
            self._closed = True
            self._store._news.notify_all()
