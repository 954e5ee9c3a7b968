"""The node's end of a recovery on several nodes: what its workers say goes to the controller's
inbox in the control store, and the controller's commands come back in order.

Two threads, so that neither a store that answers slowly nor one that is away for a while holds up
the agent. Nothing is written while nothing happens.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from flashrun.control import commands as codec
from flashrun.control.blobs import Gone, packed, unpacked
from flashrun.control.commands import Command, RestartAll
from flashrun.control.recovery_lead import Place, RecoveryLead
from flashrun.rendezvous.kv import ControlStore, LeaseLost, Put, StoreLost, StoreRefused
from flashrun.rendezvous.table import RankTable
from flashrun.rendezvous.watch import Watch

_LONG_S = 3600.0
_AGAIN_S = 0.5  # after the store did not answer
_WORTH_A_LINE_S = 3.0

Batch = tuple[int, list[Command]]


class RecoveryPost:
    """See the module.

    Args:
        open_store: connects to the control store; called in a thread.
        place: in the round.
        read: number of the last batch that this node (an agent before this one) has carried out.
        deliver: takes the next batch, from a thread.
        report: told, in a line, what a person should know.
        on_lost: told of another node that is lost, and why.
        copies: port at which this node takes copies of what another's ranks leave; 0: it does not.
        arrive: this node takes a lost one's place: fetches what its ranks have left, and gives why
            that can't be had ("": it is here). Called in a thread, before anything is delivered.
    """

    def __init__(
        self,
        open_store: Callable[[], ControlStore],
        place: Place,
        read: int,
        deliver: Callable[[Batch], None],
        report: Callable[[str], None],
        on_lost: Callable[[str, str], None] = lambda node, why: None,
        copies: int = 0,
        arrive: Callable[[], str] | None = None,
    ) -> None:
        self._open_store = open_store
        self._place = place
        self._keys = place.keys
        self._read = self._done = read
        self._deliver = deliver
        self._report = report
        self._on_lost = on_lost
        self._copies = copies
        self._arrive = arrive
        self._seen: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._number = 0
        self._silent: float | None = None  # since when the store does not answer
        self._said = False
        self._closed = threading.Event()
        self._watch: Watch | None = None
        self._store: ControlStore | None = None
        self._lead: RecoveryLead | None = None
        self._threads = [threading.Thread(target=self._run, name="recovery post", daemon=True)]

    def start(self) -> None:
        self._threads[0].start()

    def send(self, seen: dict[str, Any]) -> None:
        """Something happened to a worker of this node; never waits."""
        self._seen.put(seen)

    def tell_seats(self, table: RankTable) -> None:
        """Another node has taken a place in the round."""
        self.send({"table": table.to_dict()})

    def reseat(self, table: RankTable) -> None:
        """That was commanded."""
        self._place.table = table

    def copies_at(self, node: str) -> int | None:
        """The port at which a node takes copies; None: not known (yet). Raises OSError."""
        if self._store is None:
            return None
        try:
            value = self._store.get(self._keys.copies + node)
        except (StoreLost, StoreRefused) as error:
            raise OSError(f"no answer from the control store: {error}") from error
        return None if value is None else int(value)

    def done(self, number: int) -> None:
        """That batch was carried out, and the next agent will know it: nobody needs it again."""
        self._done = number

    def close(self, timeout_s: float = 1.0) -> None:
        """The round is over. What can't be ended in time is abandoned (daemon threads)."""
        self._closed.set()
        self._seen.put(None)
        if self._lead is not None:
            self._lead.close(timeout_s)
        watch = self._watch
        if watch is not None:
            watch.close()
        for thread in self._threads:
            thread.join(timeout_s)
        if self._store is not None:
            self._store.close()

    # --- the threads ----------------------------------------------------------------------------

    def _broken(self, error: Exception) -> None:
        """A bug must end the recovery in place visibly, not hang it."""
        reason = f"internal error in the recovery: {type(error).__name__}: {error}"
        self._report(f"recovery: {reason}")
        self._deliver((0, [RestartAll(reason)]))

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:  # noqa: BLE001  # the top of a thread
            self._broken(error)

    def _run_orders(self) -> None:
        try:
            self._follow()
        except Exception as error:  # noqa: BLE001  # the top of a thread
            self._broken(error)

    def _work(self) -> None:
        store = self._connect()
        if store is None:
            return
        self._store = store
        if self._copies:
            key = self._keys.copies + self._place.node
            self._put(store, Put(key, str(self._copies).encode()))
        if self._arrive is not None:
            self._join(store, self._arrive)
        self._lead = RecoveryLead(store, self._place, self._broken, self._on_lost)
        self._lead.start()
        reader = threading.Thread(target=self._run_orders, name="recovery orders", daemon=True)
        self._threads.append(reader)
        reader.start()
        while not self._closed.is_set():
            batch = [self._seen.get()]
            while not self._seen.empty():
                batch.append(self._seen.get())
            seen = [item for item in batch if item is not None]
            if seen:
                self._write(store, seen)
            if any(item.get("message", {}).get("op") == "suspect" for item in seen):
                self._lead.nudge()

    def _connect(self) -> ControlStore | None:
        while not self._closed.is_set():
            try:
                return self._open_store()
            except (StoreLost, StoreRefused) as error:
                self._lost(error)
        return None

    def _write(self, store: ControlStore, seen: list[dict[str, Any]]) -> None:
        keys = self._keys
        self._number += 1
        value = {"node": self._place.node, "read": self._done, "seen": seen}
        blob = packed(keys.prefix, value)
        key = keys.entry(self._place.node, self._place.life, self._number)
        for put in (*blob.parts, Put(key, blob.first)):
            self._put(store, put)

    def _put(self, store: ControlStore, put: Put) -> None:
        while not self._closed.is_set():
            try:
                store.transaction({}, [put])
                self._silent, self._said = None, False
                return
            except LeaseLost:
                return  # the job is over, which the coordinator finds, too
            except (StoreLost, StoreRefused) as error:
                # It may have been written: what comes twice changes nothing.
                self._lost(error)
                if self._is_enough(error):
                    return

    def _join(self, store: ControlStore, arrive: Callable[[], str]) -> None:
        """Take a lost node's place. What was commanded before was for that."""
        while not self._closed.is_set():
            try:
                head = store.get(self._keys.head)
                if head is not None:
                    books = unpacked(self._keys.prefix, head, store)
                    self._read = self._done = int(books["last"])
                break
            except Gone:
                continue
            except (StoreLost, StoreRefused) as error:
                self._lost(error)
        unable = arrive()
        table = self._place.table.to_dict()
        self._write(store, [{"table": table, "joined": self._place.life, "unable": unable}])

    def _is_enough(self, error: Exception) -> bool:
        """Whether the control store has been away for so long that what is to be dealt with here
        can't wait any more."""
        limit = self._place.limits.hold
        if self._silent is None or time.monotonic() - self._silent <= limit:
            return False
        reason = f"no control store for {limit:g} s (--recovery-timeout): {error}"
        self._deliver((0, [RestartAll(reason)]))
        return True

    def _follow(self) -> None:
        assert self._store is not None
        store, keys = self._store, self._keys
        while not self._closed.is_set():
            try:
                found = store.snapshot(keys.out)
                entries = sorted(found.entries.items())
                with store.watch(keys.out, found) as self._watch:
                    news = [(key, entry.value) for key, entry in entries]
                    while not self._closed.is_set():
                        for key, first in news:
                            self._take(store, key, first)
                        events = self._watch.get(_LONG_S)
                        news = [(e.key, e.value) for e in events if e.kind == "put"]
            except Gone:
                continue
            except (StoreLost, StoreRefused) as error:
                self._lost(error)

    def _take(self, store: ControlStore, key: str, first: bytes) -> None:
        number = self._keys.number_of(key)
        if number <= self._read:
            return
        commands = codec.from_json(unpacked(self._keys.prefix, first, store)["commands"])
        mine = [c for c in commands if codec.concern(c, self._place.ranks)]
        self._read = number
        self._deliver((number, mine))

    def _lost(self, error: Exception) -> None:
        """Training goes on; a worker that is lost meanwhile is dealt with when it is back."""
        now = time.monotonic()
        self._silent = self._silent or now
        # (At the end of a job the store may be gone a moment before this node has heard of it.)
        if not (self._said or self._closed.is_set()) and now - self._silent > _WORTH_A_LINE_S:
            self._said = True
            self._report(f"recovery: no answer from the control store, trying again: {error}")
        self._closed.wait(_AGAIN_S)
