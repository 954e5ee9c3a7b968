"""A log of records in a torch Store, by which many clients agree on one order of writes.

The record with number n is in slot n modulo ``size``, and is put there by ``compare_set`` in the
place of record n - size: so exactly one client writes record n, a client that has fallen behind can
never write one that is out of date, and memory is bounded. A snapshot of what the records lead to
is kept in the store, never further behind than the ring reaches back.

=================  ==========================================================================
``r/<slot>``       ``<n> <id> i<record>``, or ``<n> <id> b`` with the record in ``b/<id>``
``b/<id>``         a long record
``w/<n>``          set after record n, for ``wait``; deleted when its slot is written again
``s``              ``<n> <parts> <id>``: the newest snapshot, in ``s/<id>/<part>``
=================  ==========================================================================

``compare_set`` with a value that is never there gives what is there in one trip, and does not block
as ``get`` does (torch 2.13: an absent key gives back the expected value).
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from functools import partial
from typing import Any

from flashrun.rendezvous.peeking import peek

_SHORT = 1024  # bytes of a record that is kept in its slot
_PART = 4 << 20  # bytes of one part of a snapshot; the server takes 8 MiB
_TRIES = 20  # of reading a snapshot that others replace meanwhile; one is usual


class Lapped(Exception):
    """The record was replaced by a later one: a snapshot has to be read."""


@dataclass(frozen=True)
class Stored:
    """A snapshot of what the records up to ``number`` lead to."""

    number: int
    data: bytes


class Ring:
    """The log under ``prefix`` in ``store``. Not for several threads.

    Args:
        store: a torch Store (whose stubs say str where it takes and gives bytes).
        size: how many records are kept; the same for all clients.
    """

    def __init__(self, store: Any, prefix: str, size: int) -> None:
        self._store = store
        self._prefix = prefix
        self.size = size
        self._slot: tuple[int, bytes | None] = (0, None)  # number asked for, what was in its slot
        self._snapshot_number = 0

    def read(self, number: int) -> bytes | None:
        """Record ``number``; None when it is not written yet. Raises Lapped."""
        raw = self.peek(self._slot_key(number))
        self._slot = (number, raw)
        if raw is None:
            return None
        found, id_, rest = raw.split(b" ", 2)
        if int(found) < number:
            return None
        if int(found) > number:
            raise Lapped
        if rest[:1] == b"i":
            return rest[1:]
        record = self.peek(f"b/{id_.decode()}")
        if record is None:
            raise Lapped
        return record

    def append(self, number: int, record: bytes) -> bool:
        """Write record ``number`` right after ``read(number)`` gave None; whether we were first.

        The caller has taken care of :meth:`snapshot_due`.
        """
        asked, before = self._slot
        assert asked == number
        id_ = uuid.uuid4().hex
        head = f"{number} {id_} ".encode()
        short = len(record) <= _SHORT
        if not short:
            self._store.set(self._key(f"b/{id_}"), record)
        value = head + (b"i" + record if short else b"b")
        if self.swap(self._slot_key(number), before, value) != value:
            if not short:
                self._delete(f"b/{id_}")
            return False
        self.announce(number)
        if before is not None:
            old, old_id, rest = before.split(b" ", 2)
            self._delete(f"w/{int(old)}")
            if rest == b"b":
                self._delete(f"b/{old_id.decode()}")
        return True

    def announce(self, number: int) -> None:
        """Wake who waits for record ``number``."""
        self._store.set(self.waiting_key(number), b"1")

    def hush(self, number: int) -> None:
        """Take an announcement back."""
        self._delete(f"w/{number}")

    def waiting_key(self, number: int) -> str:
        """The key that is there once record ``number`` is, for ``wait``."""
        return self._key(f"w/{number}")

    # --- snapshots ------------------------------------------------------------------------------

    def snapshot_due(self, number: int) -> bool:
        """Whether a snapshot has to be written before record ``number``."""
        if number - self._snapshot_number > self.size // 2:
            raw = self.peek("s")
            self._snapshot_number = int(raw.split()[0]) if raw is not None else 0
        return number - self._snapshot_number > self.size // 2

    def write_snapshot(self, snapshot: Stored) -> None:
        """Keep ``snapshot``, unless there is a newer one."""
        old = self.peek("s")
        if old is not None and int(old.split()[0]) >= snapshot.number:
            return
        id_, data = uuid.uuid4().hex, snapshot.data
        parts = [data[i : i + _PART] for i in range(0, len(data), _PART)]
        for i, part in enumerate(parts):
            self._store.set(self._key(f"s/{id_}/{i}"), part)
        value = f"{snapshot.number} {len(parts)} {id_}".encode()
        won = self.swap("s", old, value) == value
        loser = old if won else value
        if loser is not None:
            _, count, loser_id = loser.decode().split()
            for i in range(int(count)):
                self._delete(f"s/{loser_id}/{i}")

    def read_snapshot(self) -> Stored | None:
        """The newest snapshot; None when none was written yet."""
        for _ in range(_TRIES):
            raw = self.peek("s")
            if raw is None:
                return None
            number, count, id_ = raw.decode().split()
            parts = [self.peek(f"s/{id_}/{i}") for i in range(int(count))]
            data = b"".join(part for part in parts if part is not None)
            if None not in parts:
                self._snapshot_number = int(number)
                return Stored(int(number), data)
        raise RuntimeError(f"the snapshot was replaced {_TRIES} times while it was read")

    # --- the store ------------------------------------------------------------------------------

    def peek(self, key: str) -> bytes | None:
        """The value of ``key``, None when it is absent."""
        return peek(partial(self.swap, key))

    def swap(self, key: str, expected: bytes | None, value: bytes) -> bytes:
        """Write ``value`` if ``expected`` is there (None: nothing); what is there afterwards."""
        return bytes(self._store.compare_set(self._key(key), expected or b"", value))

    def _delete(self, key: str) -> None:
        self._store.delete_key(self._key(key))

    def _slot_key(self, number: int) -> str:
        return f"r/{number % self.size}"

    def _key(self, key: str) -> str:
        return f"{self._prefix}{key}"
