"""The controller's thread: leads the recovery of one round while this node holds the lease.

Every agent of a job on several nodes has one. It wakes up when an entry comes into the inbox, or
when the recovery machine has a deadline, and otherwise only renews its lease. Whoever leads is
fenced by the books' compare-and-swap (:mod:`flashrun.control.ledger`), not by the clock: two that
believe to lead do no harm, and one of them notices.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from flashrun.control.blobs import Gone, unpacked
from flashrun.control.ledger import RECOVERY, Keys, Ledger, keys_of, round_of
from flashrun.control.membership_plan import why_no_spare
from flashrun.control.probing import Nobody, lost_nodes
from flashrun.control.recovery import Limits
from flashrun.rendezvous.kv import (
    MAX_OPERATIONS,
    ControlStore,
    Delete,
    LeaseLost,
    Put,
    StoreLost,
    StoreRefused,
)
from flashrun.rendezvous.lease import Lease
from flashrun.rendezvous.table import NodeRanks, RankTable
from flashrun.rendezvous.watch import Watch

LEASE_S = 5.0  # after which another agent leads, should this one's node be gone
_LONG_S = 3600.0
_AGAIN_S = 0.5  # after the store did not answer
_RING_S = 0.2  # without a word from a rank, until its node is asked whether it lives
_RING_AGAIN_S = 2.0


@dataclass
class Place:
    """This node in a round: what the two threads of a recovery on several nodes work from.

    Attributes:
        table: replaced, never changed, when another node takes a place in it.
        prefix: in the control store, of all rounds.
        outlived: the store is there after the job, which therefore leaves nothing in it.
        policy: by which places are given (membership_plan).
        backend: of the rendezvous.
        detection: seconds in which a node that is cut off has stopped its workers.
        life: of this agent process.
        on_quiet: told whether a recovery is under way (`Ledger.quiet`) by who leads; in a thread.
    """

    table: RankTable
    node: str
    limits: Limits
    outlived: bool = False
    policy: str = "elastic"
    backend: str = "flash"
    detection: float = 15.0
    prefix: str = RECOVERY
    life: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    on_quiet: Callable[[int | None], None] = lambda joins: None

    @property
    def keys(self) -> Keys:
        return keys_of(self.table, self.prefix)

    @property
    def ranks(self) -> range:
        """Of this node."""
        mine = self.table.of(self.node)
        assert mine is not None  # whoever has no place in a round is not told of it
        return mine.ranks

    def no_spare(self, node: str) -> str:
        """Why no other node can take the place of ``node``; "": one can."""
        return why_no_spare(self.policy, self.backend, self.table, self.table.of(node))

    def new_ledger(self) -> Ledger:
        """The books of a round in which nothing has happened."""
        return Ledger(self.keys, self.table, self.limits)


class RecoveryLead:
    """See the module.

    Args:
        store: a client that others may use as well.
        broken: told of an error that nobody expected; the thread ends.
        on_lost: told of another node that is lost, and why.
    """

    def __init__(
        self,
        store: ControlStore,
        place: Place,
        broken: Callable[[Exception], None],
        on_lost: Callable[[str, str], None],
    ) -> None:
        self._store = store
        self._place = place
        self._keys = place.keys
        self._broken = broken
        self._on_lost = on_lost
        self._nudged = False
        self._ring_at: float | None = None
        self._missing = ""
        self._lost: set[NodeRanks] = set()  # are known to be; who is back has another place
        self._unanswered: dict[str, float] = {}  # other nodes that do not answer, and since when
        self._closed = threading.Event()
        self._watch: Watch | None = None
        self._thread = threading.Thread(target=self._run, name="recovery lead", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """End the thread."""
        self._closed.set()
        watch = self._watch
        if watch is not None:
            watch.close()
        self._thread.join(timeout_s)

    def nudge(self) -> None:
        """A worker here misses a peer: should the leader's node be the one that is lost, its lease
        need not be waited for."""
        self._nudged = True
        watch = self._watch
        if watch is not None and watch.prefix == self._keys.leader:
            watch.close()

    # --- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed.is_set():
            lease: Lease | None = None
            try:
                lease = self._win()
                if lease is not None:
                    self._lead(lease)
                    if self._closed.is_set():
                        self._clean()
            except (LeaseLost, Gone):
                continue
            except (StoreLost, StoreRefused):
                # The coordinator finds the same, and the embedded store does not come back.
                self._closed.wait(_AGAIN_S)
            except Exception as error:  # noqa: BLE001  # the top of a thread
                self._broken(error)
                return
            finally:
                if lease is not None:
                    self._resign(lease)

    def _clean(self) -> None:
        """The round is over."""
        if self._place.outlived:
            self._delete(self._store.list_keys(self._keys.prefix))

    def _resign(self, lease: Lease) -> None:
        try:
            lease.revoke()
        except (StoreLost, StoreRefused):
            lease.abandon()

    def _win(self) -> Lease | None:
        """Wait until nobody leads, and lead; None: closed."""
        claim = json.dumps({"node": self._place.node, "life": self._place.life}).encode()
        key = self._keys.leader
        while not self._closed.is_set():
            found = self._store.snapshot(key)
            entry = found.entries.get(key)
            if entry is None or self._is_over(json.loads(entry.value)["node"]):
                lease = self._store.lease(LEASE_S)
                old = None if entry is None else entry.value
                if self._store.transaction({key: old}, [Put(key, claim, lease)]):
                    return lease
                self._resign(lease)
                continue
            with self._store.watch(key, found) as self._watch:
                if not (self._closed.is_set() or self._nudged):
                    self._watch.get(_LONG_S)
        return None

    def _is_over(self, leader: str) -> bool:
        """Whether the one that leads is dead, so that its lease need not be waited for: an agent of
        this node that was before this one, or one whose node is lost."""
        if leader == self._place.node:
            return True
        nudged, self._nudged = self._nudged, False
        node = self._place.table.of(leader)
        if node is None:
            return True  # another one has its place
        return nudged and bool(lost_nodes([node]))

    def _lead(self, lease: Lease) -> None:
        """Until the lease or the books are another's, or the round is over."""
        store, keys = self._store, self._keys
        ledger = self._place.new_ledger()
        head = store.get(keys.head)
        if head is None:
            self._tidy()
        else:
            ledger.load(head, unpacked(keys.prefix, head, store), time.monotonic())
        inbox = store.snapshot(keys.inbox)
        entries = sorted(inbox.entries.items(), key=lambda item: item[1].revision)
        news = [(key, entry.value) for key, entry in entries]
        quiet: int | None = -1  # nothing was told
        with store.watch(keys.inbox, inbox) as self._watch:
            while not self._closed.is_set() and lease.remaining_s() > 0:
                for key, first in news:
                    value = unpacked(keys.prefix, first, store)
                    ledger.take(key, first, value, time.monotonic())
                    if not self._settle(ledger):
                        return
                self._ring(ledger)
                ledger.tick(time.monotonic())
                if not self._settle(ledger):
                    return
                if quiet != ledger.quiet:
                    quiet = ledger.quiet
                    self._place.on_quiet(quiet)
                times = [ledger.director.wake_at(), self._ring_at]
                at = min((t for t in times if t is not None), default=None)
                wait = _LONG_S if at is None else max(0.0, at - time.monotonic())
                events = self._watch.get(wait)
                news = [(event.key, event.value) for event in events if event.kind == "put"]

    def _ring(self, ledger: Ledger) -> None:
        """Ask the nodes from whose ranks no word comes whether they live."""
        wait, ranks = ledger.missed()
        now = time.monotonic()
        if not ranks:
            self._ring_at, self._missing = None, ""
        elif wait != self._missing:
            self._ring_at, self._missing = now + _RING_S, wait
        elif self._ring_at is not None and now >= self._ring_at:
            nodes = {n.node: n for n in ledger.table.nodes if n not in self._lost}
            nodes.pop(self._place.node, None)
            missed = [n for n in nodes.values() if ranks.intersection(n.ranks)]
            nobody = lost_nodes(missed)
            now = time.monotonic()
            self._unanswered = {node: self._unanswered.get(node, now) for node in nobody}
            for node in self._given_up(nobody, now):
                why = nobody[node].why
                self._lost.add(nodes[node])
                ledger.node_lost(node, why, now, self._place.no_spare(node))
                self._on_lost(node, why)
            self._ring_at = now + _RING_AGAIN_S

    def _given_up(self, nobody: Mapping[str, Nobody], now: float) -> list[str]:
        """Those of whom nothing is left; and the others once they have had the time to stop, should
        they live and be cut off."""
        gone = {node for node in nobody if nobody[node].gone}
        late = {node for node in nobody if now - self._unanswered[node] >= self._place.detection}
        return sorted(gone | late)

    def _settle(self, ledger: Ledger) -> bool:
        """Make durable what is due; False: somebody else leads."""
        while ledger.due:
            commit = ledger.commit(time.monotonic())
            for put in commit.first:
                self._store.transaction({}, [put])
            if not self._store.transaction(commit.expected, commit.operations):
                return False
            ledger.committed(commit)
        return True

    def _tidy(self) -> None:
        """Remove what rounds before this one have left. (A later one may be under way: a node that
        stood still believes for a moment that its round is the present one.)"""
        prefix, present = self._place.prefix, self._place.table.round
        keys = self._store.list_keys(prefix)
        self._delete([key for key in keys if round_of(key, prefix) < present])

    def _delete(self, keys: Sequence[str]) -> None:
        for first in range(0, len(keys), MAX_OPERATIONS):
            part = keys[first : first + MAX_OPERATIONS]
            self._store.transaction({}, [Delete(key) for key in part])
