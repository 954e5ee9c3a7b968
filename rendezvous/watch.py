"""A watch as its reader sees it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from flashrun.rendezvous.kv import Event, Snapshot


class Watch(ABC):
    """Events of the keys under ``prefix``: each once, in order, a transaction's together.

    It outlives failures of the store's servers: it goes on where it stopped. Where what happened
    since then is not kept any more (compaction), the difference is found by reading all keys and
    told with ``resynced`` set; a watch that began at a bare revision can't know what was deleted
    and ends with Compacted.

    Attributes:
        revision: all events up to it were given out; resume with ``watch(prefix, revision)``.
    """

    def __init__(self, prefix: str, revision: int) -> None:
        self.prefix = prefix
        self.revision = revision

    @abstractmethod
    def get(self, timeout_s: float) -> list[Event]:
        """Wait for events and take all that are there; empty when none came in time.

        Raises:
            StoreLost: the store is gone for good. StoreRefused, Compacted: see there.
        """

    @abstractmethod
    def close(self) -> None:
        """End it; a reader that waits gets an empty list."""

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def difference(known: Mapping[str, int], after: int, now: Snapshot) -> list[Event]:
    """The events that lead from ``known`` (key to revision, as of ``after``) to ``now``."""
    puts = [
        Event("put", key, entry.value, entry.revision, resynced=True)
        for key, entry in now.entries.items()
        if entry.revision > after
    ]
    gone = [
        Event("delete", key, b"", now.revision, resynced=True)
        for key in known
        if key not in now.entries
    ]
    return sorted(puts, key=lambda event: event.revision) + gone


def note(known: dict[str, int], events: list[Event]) -> None:
    """Bring ``known`` up to ``events``."""
    for event in events:
        if event.kind == "put":
            known[event.key] = event.revision
        else:
            known.pop(event.key, None)
