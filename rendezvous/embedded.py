"""ControlStore on torch's TCPStore: every client follows one log of writes (:mod:`ring`).

Each client has all keys in memory, as the records say, so that a read costs one small question: is
there a further record? A write is decided on what is in memory and stands if its record is the next
one; otherwise it is decided again. Leases are counters that their holders count up. One client, the
judge, looks at all of them; one that has not changed for its time to live *by the judge's clock* is
ended by a record, so that no clocks of two machines are compared. Whoever sees the judge's own
counter stand still takes its place; two judges for a moment do no harm.
"""

from __future__ import annotations

import base64
import json
import logging
import math
import os
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not in __all__

from flashrun.rendezvous.embedded_watch import EmbeddedWatch
from flashrun.rendezvous.kv import (
    HOST_LOST_REMEDY,
    ControlStore,
    Delete,
    Entry,
    Event,
    Forked,
    LeaseLost,
    Put,
    Snapshot,
    StoreLost,
    check_transaction,
)
from flashrun.rendezvous.lease import Lease
from flashrun.rendezvous.lease_judge import LeaseJudge
from flashrun.rendezvous.links import with_links
from flashrun.rendezvous.ring import Lapped, Ring, Stored
from flashrun.rendezvous.tcp_kv import connect_store

log = logging.getLogger(__name__)

_T = TypeVar("_T")

PREFIX = "flashrun/log/"
"""Ours in a TCPStore that the workers use as well."""

_RING = 1024  # records that are kept
_LONG = timedelta(days=1)  # a wait that ends earlier prints a warning of torch's
_CLOSE_S = 2.0  # how long a call of another thread may hold up the end
_LOOK_S = 1.0  # how often a client looks by itself, should nobody wake it


@dataclass(frozen=True)
class _Value:
    value: bytes
    revision: int
    lease: str | None


class _State:
    """What the records so far lead to."""

    def __init__(self, stored: Stored | None = None) -> None:
        self.revision = 0 if stored is None else stored.number
        data: dict[str, Any] = {} if stored is None else json.loads(stored.data)
        self.leases: dict[str, float] = data.get("leases", {})
        self.values = {
            key: _Value(base64.b64decode(value), revision, lease)
            for key, (value, revision, lease) in data.get("values", {}).items()
        }

    def stored(self) -> Stored:
        values = {
            key: (base64.b64encode(v.value).decode(), v.revision, v.lease)
            for key, v in self.values.items()
        }
        data = json.dumps({"leases": self.leases, "values": values}).encode()
        return Stored(self.revision, data)

    def apply(self, record: bytes) -> tuple[list[Event], list[str]]:
        """Take in the next record; the events, and the leases that it ended."""
        self.revision += 1
        events, ended = [], []
        for kind, name, *rest in json.loads(record):
            if kind == "put":
                value = base64.b64decode(rest[0])
                self.values[name] = _Value(value, self.revision, rest[1])
                events.append(Event("put", name, value, self.revision))
            elif kind == "delete":
                events += self._delete([name])
            elif kind == "lease":
                self.leases[name] = rest[0]
            elif kind == "end":
                ended.append(name)
                self.leases.pop(name, None)
                events += self._delete(
                    sorted(key for key, v in self.values.items() if v.lease == name)
                )
        return events, ended

    def _delete(self, keys: list[str]) -> list[Event]:
        gone = [key for key in keys if self.values.pop(key, None) is not None]
        return [Event("delete", key, b"", self.revision) for key in gone]


class EmbeddedStore(ControlStore):
    """One client of one process.

    Args:
        store: a TCPStore client of our own; ``where`` names it.
        report: told of leases that ran out, in one line each.
        ring: how many records are kept; the same for all clients.
    """

    def __init__(
        self,
        store: TCPStore,
        where: str,
        report: Callable[[str], None] = log.warning,
        ring: int = _RING,
    ) -> None:
        self._store: Any = store  # torch's stubs lack clone
        self._where = where
        self._report = report
        self._pid = os.getpid()
        self._id = uuid.uuid4().hex
        self._calls = threading.RLock()  # of the connection; taken before ``_news``
        self._news = threading.Condition()  # of what is in memory
        self._ring = Ring(store, PREFIX, ring)
        self._state = _State()
        self._recent: deque[tuple[int, list[Event]]] = deque()  # of the last ``ring`` revisions
        self._floor = 0  # events up to it are not in ``_recent``
        self._mine: dict[str, Lease] = {}
        self._judge = LeaseJudge(self._id)
        self._lost: StoreLost | None = None
        self._closed = False
        self._wake = threading.Event()
        self._awaited = 0  # the record that the follower waits for
        self._threads: list[threading.Thread] = []
        self._links: list[socket.socket] = []  # of the follower's connection
        self._guarded(lambda: self._load(), "the first read")

    @property
    def where(self) -> str:
        return f"the store at {self._where}"

    # --- reads and writes -----------------------------------------------------------------------

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        values = self._current(f"the value of {', '.join(map(repr, keys[:3]))}").values
        return [values[key].value if key in values else None for key in keys]

    def list_keys(self, prefix: str = "") -> list[str]:
        state = self._current(f"the keys under {prefix!r}")
        with self._news:
            return sorted(key for key in state.values if key.startswith(prefix))

    def snapshot(self, prefix: str = "") -> Snapshot:
        self._current(f"the keys under {prefix!r}")
        with self._news:
            return self._snapshot(prefix)

    def _snapshot(self, prefix: str) -> Snapshot:
        entries = {
            key: Entry(v.value, v.revision)
            for key, v in sorted(self._state.values.items())
            if key.startswith(prefix)
        }
        return Snapshot(prefix, self._state.revision, entries)

    def _current(self, what: str) -> _State:
        self._guarded(self._catch_up, what)
        if self._state.leases:
            self._start_threads()
        return self._state

    def transaction(
        self, expected: Mapping[str, bytes | None], operations: Sequence[Put | Delete]
    ) -> bool:
        check_transaction(operations)
        names = ", ".join(repr(operation.key) for operation in operations) or "nothing"

        def decide() -> list[list[Any]] | None:
            values = self._state.values
            for key, value in expected.items():
                if (values[key].value if key in values else None) != value:
                    return None
            return [r for operation in operations if (r := self._record(operation)) is not None]

        return self._write(decide, names)

    def _record(self, operation: Put | Delete) -> list[Any] | None:
        """The operation as it stands in a record; None when it changes nothing."""
        if isinstance(operation, Delete):
            return ["delete", operation.key] if operation.key in self._state.values else None
        lease = operation.lease
        if lease is not None and lease.id not in self._state.leases:
            lease.lost.set()
            raise LeaseLost(
                f"{lease} for {operation.key!r} has run out at {self.where}; nothing was written. "
                "Take a new lease."
            )
        value = base64.b64encode(operation.value).decode()
        return ["put", operation.key, value, None if lease is None else lease.id]

    def _write(self, decide: Callable[[], list[list[Any]] | None], names: str) -> bool:
        def write() -> bool:
            while True:
                self._catch_up()
                record = decide()
                if record is None:
                    return False
                if not record:
                    return True
                number = self._state.revision + 1
                if self._ring.snapshot_due(number):
                    self._ring.write_snapshot(self._state.stored())
                data = json.dumps(record).encode()
                if self._ring.append(number, data):
                    self._take(data)
                    return True

        return self._guarded(
            write, f"the write of {names}, which may or may not have been carried out"
        )

    # --- following the log ----------------------------------------------------------------------

    def _guarded(self, call: Callable[[], _T], what: str) -> _T:
        """Use the connection; torch's errors are RuntimeErrors for everything."""
        if os.getpid() != self._pid:
            raise Forked(
                f"The client of {self.where} was made in process {self._pid} and can't be used in "
                f"process {os.getpid()}, which was forked from it: they would read each other's "
                "answers. Open a client of its own there."
            )
        with self._calls:
            if self._lost is not None:
                raise self._lost
            if self._closed:
                raise StoreLost(f"The client of {self.where} was closed while {what} was asked for")
            try:
                return call()
            except (StoreLost, LeaseLost):
                raise
            except RuntimeError as error:
                raise self._lose(error, what) from error

    def _lose(self, error: Exception, what: str) -> StoreLost:
        """A client of torch's never reconnects: it is over."""
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        lost = StoreLost(
            f"{self.where[0].upper()}{self.where[1:]} does not answer ({first_line}); waited for "
            f"{what}. The node that hosts it has ended or can't be reached, and what it held is "
            f"gone; {HOST_LOST_REMEDY}"
        )
        with self._news:
            self._lost = lost
            self._news.notify_all()
        for connection in self._links:  # the follower may wait for a server that is silent for ever
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it knows
        return lost

    def _load(self) -> None:
        stored = self._ring.read_snapshot()
        with self._news:
            if stored is not None and stored.number > self._state.revision:
                self._state = _State(stored)
                self._recent.clear()
                self._floor = stored.number
                self._find_lost_leases()
                self._news.notify_all()
        self._catch_up()

    def _catch_up(self) -> None:
        while True:
            try:
                record = self._ring.read(self._state.revision + 1)
            except Lapped:
                self._load()
                return
            if record is None:
                return
            self._take(record)

    def _take(self, record: bytes) -> None:
        with self._news:
            events, ended = self._state.apply(record)
            self._recent.append((self._state.revision, events))
            if len(self._recent) > self._ring.size:
                self._floor = self._recent.popleft()[0]
            if ended:
                self._find_lost_leases()
            self._news.notify_all()

    def _find_lost_leases(self) -> None:
        for lease in [x for x in self._mine.values() if x.id not in self._state.leases]:
            del self._mine[lease.id]
            if lease.renewing:
                self._report(f"{self.where}: {lease} has run out; its keys are gone")
            lease.lost.set()

    # --- leases and watches ---------------------------------------------------------------------

    def lease(self, ttl_s: float) -> Lease:
        ttl = float(max(1, math.ceil(ttl_s)))
        id_, sent = uuid.uuid4().hex, time.monotonic()
        lease = Lease(id_, ttl, sent, self._revoke)

        def grant() -> None:
            self._store.add(f"{PREFIX}l/{id_}", 1)
            self._write(lambda: [["lease", id_, ttl]], "a lease")
            self._mine[id_] = lease

        self._guarded(grant, "a lease")
        self._start_threads()
        self._wake.set()
        return lease

    def _revoke(self, lease: Lease) -> None:
        self._mine.pop(lease.id, None)
        self._end(lease.id)

    def _end(self, lease: str) -> None:
        def decide() -> list[list[Any]]:
            return [["end", lease]] if lease in self._state.leases else []

        def end() -> None:
            self._write(decide, f"the end of lease {lease}")
            self._store.delete_key(f"{PREFIX}l/{lease}")

        self._guarded(end, f"the end of lease {lease}")

    def watch(self, prefix: str = "", start: Snapshot | int | None = None) -> EmbeddedWatch:
        if start is None:
            start = self.snapshot(prefix)
        self._start_threads()
        return EmbeddedWatch(self, prefix, start)

    def close(self) -> None:
        self._closed = True
        self._wake.set()
        if os.getpid() != self._pid:
            return
        with self._news:
            self._news.notify_all()
        if not self._calls.acquire(timeout=_CLOSE_S):
            return  # a call is in there, and the store may not answer: it ends by its own deadline
        try:
            woken, following = self._awaited, bool(self._threads) and self._lost is None
            if following:
                self._try(lambda: self._ring.announce(woken))
        finally:
            self._calls.release()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(2.0)
        for connection in self._links:
            connection.close()
        with self._calls:
            if following and woken > self._state.revision:
                self._try(lambda: self._ring.hush(woken))

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except RuntimeError as error:  # it went away while we did
            log.debug("closing %s: %s", self.where, error)

    # --- the threads ----------------------------------------------------------------------------

    def _start_threads(self) -> None:
        with self._calls:
            if self._threads or self._closed:
                return
            self._threads = [
                threading.Thread(target=target, name=name, daemon=True)
                for target, name in ((self._follow, "store follower"), (self._keep, "store leases"))
            ]
            for thread in self._threads:
                thread.start()

    def _follow(self) -> None:
        """Learn of each record when it is written, on a connection of its own."""
        try:
            # Outside the lock: torch looks up the peer's name, and a bad resolver takes seconds.
            link, self._links = with_links(self._store.clone, self._store.port)
            while not self._closed:
                awaited = self._guarded(self._await_next, "the next write")
                link.wait([self._ring.waiting_key(awaited)], _LONG)
        except StoreLost:
            return  # told to everybody by who found it
        except RuntimeError as error:
            if not self._closed:
                self._lose(error, "the next write")

    def _await_next(self) -> int:
        """The record to wait for. Under the lock, so that ``close`` knows what to announce."""
        self._catch_up()
        if self._awaited == self._state.revision + 1:
            # Woken for nothing, by a client that closes. It may have died before it took its
            # announcement back, so this must not become a tight loop.
            time.sleep(0.02)
        self._awaited = self._state.revision + 1
        return self._awaited

    def _keep(self) -> None:
        """Renew our leases, judge all if we are the judge, look for what nobody told us of."""
        try:
            while not self._closed:
                now = time.monotonic()
                renewing = [x for x in list(self._mine.values()) if x.renewing]
                for lease in [x for x in renewing if x.renewal_due() <= now]:
                    self._guarded(partial(self._renew, lease), f"the renewal of {lease}")
                self._guarded(self._look, "the next write")
                judge_in = self._guarded(self._judge_leases, "the leases")
                dues = [x.renewal_due() - time.monotonic() for x in renewing]
                self._wake.wait(max(0.01, min([_LOOK_S, judge_in, *dues])))
                self._wake.clear()
        except StoreLost:
            return  # told to everybody by who found it

    def _look(self) -> None:
        self._catch_up()
        if 0 < self._awaited <= self._state.revision:  # its announcement is missing
            self._ring.announce(self._awaited)

    def _renew(self, lease: Lease) -> None:
        sent = time.monotonic()
        self._catch_up()
        if lease.id in self._state.leases:
            self._store.add(f"{PREFIX}l/{lease.id}", 1)
            lease.renewed(sent)

    def _judge_leases(self) -> float:
        """Look at the leases if it is our turn; seconds until the next look."""
        judge = self._judge
        every = judge.every(self._state.leases)
        due = bool(self._state.leases) and judge.is_due(every)
        if due and judge.in_office(self._ring, every):
            begun = time.monotonic()
            counts = {name: self._ring.peek(f"l/{name}") for name in list(self._state.leases)}
            over = judge.silent(counts, self._state.leases, begun, time.monotonic())
            for name in over:
                self._end(name)
        return every


def connect_embedded(
    host: str,
    port: int,
    timeout_s: float,
    read_timeout_s: float = 60.0,
    cancel: threading.Event | None = None,
    waiting: Callable[[float, str], None] | None = None,
    report: Callable[[str], None] = log.warning,
    ring: int = _RING,
) -> EmbeddedStore:
    """As :func:`flashrun.rendezvous.tcp_kv.connect`, with revisions, leases and watches."""
    store, where = connect_store(host, port, timeout_s, read_timeout_s, cancel, waiting)
    return EmbeddedStore(store, where, report, ring)
