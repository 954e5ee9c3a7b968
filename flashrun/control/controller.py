"""The agent that decides: leadership, heartbeats of the others, the timers, and writing the plan.

Every agent has one; it acts only while its node leads.
"""

from __future__ import annotations

import json
import secrets
import time
import uuid
from collections.abc import Callable

from flashrun.control.cordon import CordonBook, kept_out
from flashrun.control.events import Connected, Membership
from flashrun.control.fence import settled_s, try_s
from flashrun.control.liveness import Doors, Heartbeats, given_up
from flashrun.control.membership_plan import Clock, decide, living
from flashrun.control.plan_book import PlanBook
from flashrun.control.probing import lost_nodes
from flashrun.control.records import Member, Plan, member_from_json
from flashrun.control.silence import SilenceBook
from flashrun.rendezvous.kv import KeyValue
from flashrun.rendezvous.table import RankTable


def _since(holds: bool, since: float | None, now: float) -> float | None:
    """Since when something holds that held since ``since`` at the last look; None: it does not."""
    if not holds:
        return None
    return now if since is None else since


class Controller:
    """Leads when its node holds the ``leader`` key.

    ``leader_order`` is the order number of the node that leads, None while nobody does.
    """

    def __init__(
        self,
        kv: KeyValue,
        membership: Membership,
        connected: Connected,
        prefix: str,
        book: PlanBook,
        knocking: Callable[[], int] = lambda: 0,
    ) -> None:
        self._kv = kv
        self._membership = membership
        self._timing = membership.timing
        self._connected = connected
        self._prefix = prefix
        self._book = book
        self._knocking = knocking
        self._cordons = CordonBook(kv, prefix)
        self._alone = membership.job.max_nodes == 1 and membership.etcd is None
        self._heartbeats = Heartbeats(self._timing.detection_timeout)
        self._doors = Doors(self._timing.detection_timeout / 2)
        self._silent: frozenset[str] = frozenset()
        self._silences = SilenceBook(kv, prefix)
        self._watched = False
        self._losses = 0
        self._beats_due = 0.0
        self._missing = ""
        self._forming: tuple[int, float] | None = None  # round, since
        self._enough_since: float | None = None
        self._lost_since: float | None = None
        self._joined_since: float | None = None
        self._called = False  # the last call of a growth is over
        self._leader_raw: bytes | None = None
        self.leader_order: int | None = None
        self._leader_beat: tuple[tuple[int, int], float] | None = None  # whose and what, since when
        self._leader_due = 0.0
        self._born: float | None = None

    def _key(self, name: str) -> str:
        return self._prefix + name

    @property
    def leads(self) -> bool:
        """Whether this node does, as far as it knows."""
        return self.leader_order == self._connected.order

    # --- leading ------------------------------------------------------------------------------

    def claim(self) -> bool:
        """Take the lead from whoever has it (seen silent) or from nobody."""
        before = json.loads(self._leader_raw)["term"] if self._leader_raw else 0
        claim = {"order": self._connected.order, "term": before + 1, "by": uuid.uuid4().hex}
        raw = json.dumps(claim).encode()
        won = self._kv.compare_and_swap(self._key("leader"), self._leader_raw, raw)
        if won:
            self._kv.increment(self._key("news"))
        self._read_leader()
        return won

    def replaced_leader(self, now: float, changed: bool) -> bool:
        """Take the lead from one that is silent or known to be lost; whether that was tried. Looks
        after each change, and now and then without one."""
        leader = self.leader_order
        if not changed and now < self._leader_due:
            return False
        self._leader_due = now + self._timing.heartbeat_interval / 2
        if leader is None or leader == self._connected.order:
            self._leader_beat = None
            return False
        beat = leader, self._kv.counter(self._key(f"beat/{leader}"))
        lost = self._kv.get(self._key(f"lost/{leader}"))
        if lost is None and (self._leader_beat is None or beat != self._leader_beat[0]):
            self._leader_beat = beat, now
            return False
        since = now if self._leader_beat is None else self._leader_beat[1]
        if lost is None and now - since <= self._timing.detection_timeout:
            return False
        self.claim()
        self._leader_beat = None
        return True

    def _read_leader(self) -> None:
        self._leader_raw = self._kv.get(self._key("leader"))
        order = json.loads(self._leader_raw)["order"] if self._leader_raw else None
        self.leader_order = order

    def act(self, now: float, changed: bool) -> bool:
        """Decide if this node leads; True when a new plan was written."""
        if self._born is None:
            self._born = now
        if changed or self.leader_order is None:
            self._read_leader()
            # The hosting node leads; another one only when that one does not come.
            anybody = self._connected.hosting or self._membership.etcd is not None
            patience = 0.0 if anybody else self._timing.detection_timeout
            if self.leader_order is None and now - self._born >= patience:
                self.claim()
        if not self.leads:
            return False
        beats_due = not self._alone and now >= self._beats_due
        if not (changed or beats_due or self._timer_due(now)):
            return False
        return self._decide(now)

    def _decide(self, now: float) -> bool:
        plan = self._book.read()
        members = self.members()
        if not self._alone:
            self._watch_beats(members, now, plan.table if plan.phase == "running" else None)
        cordons = {} if self._alone else self._cordons.read()
        out = kept_out(self._membership.job, living(members, self._silent), cordons)
        clock = self._clock(plan, [m for m in members if m.node not in out], now)
        decision = decide(
            self._membership.job,
            members,
            plan,
            self._silent,
            clock,
            self._master_addr(members),
            self._connected.port,
            self._knocking() if plan.phase == "running" else 0,
            secrets.token_hex(16),
            out,
            self._quiet(plan),
        )
        self._joined_since = _since(decision.joining, self._joined_since, now)
        self._called = clock.joined is not None and clock.joined >= clock.last_call
        self._lost_since = _since(decision.spare, self._lost_since, now)
        if decision.waiting != self._missing:
            self._missing = decision.waiting
            self._kv.put(self._key("missing"), json.dumps(self._missing).encode())
        if decision.plan is None:
            return False
        if decision.clear_worker_keys:
            self._clear_worker_keys()
        won = self._book.write(decision.plan, f"{self._connected.order}.{uuid.uuid4().hex}")
        self._kv.increment(self._key("news"))
        return won

    def _quiet(self, plan: Plan) -> str:
        """What is said of recoveries, where it matters."""
        if plan.phase != "running" or self._membership.job.grow != "restart":
            return ""
        return (self._kv.get(self._key("quiet")) or b"").decode()

    @property
    def spare_missing(self) -> str:
        """What the workers that are left wait for; "" while nothing is missing."""
        return self._missing if self._lost_since is not None else ""

    def members(self) -> list[Member]:
        """The records of all nodes that ever came."""
        count = int(self._kv.get(self._key("count")) or b"0")
        records = self._kv.get_many([self._key(f"node/{i}") for i in range(1, count + 1)])
        return [member_from_json(r) for r in records if r is not None]

    def unread(self, now: float) -> list[str]:
        """The addresses of living nodes that have not read the verdict."""
        members = self.members()
        self._watch_beats(members, now)
        return [
            m.addr
            for m in members
            if not m.done and m.state != "left" and m.node not in self._silent
        ]

    def _watch_beats(
        self, members: list[Member], now: float, table: RankTable | None = None
    ) -> None:
        """Read the heartbeats if it is time, or somebody is known to be lost since.

        Args:
            table: of the round that runs.
        """
        losses = self._kv.counter(self._key("losses"))
        if now < self._beats_due and losses == self._losses:
            return
        self._losses = losses
        others = [m for m in members if m.order != self._connected.order]
        beats = self._kv.get_many([self._key(f"beat/{m.order}") for m in others])
        values = {m.node: beat for m, beat in zip(others, beats, strict=True)}
        lost: set[str] = set()
        if losses:
            told = self._kv.get_many([self._key(f"lost/{m.order}") for m in others])
            lost = {m.node for m, why in zip(others, told, strict=True) if why is not None}
        still = self._heartbeats.observe(values, now)
        here = {m.order: m.node for m in others if m.state != "left"}
        self._silences.note(
            {order: values[node] for order, node in here.items()},
            {o: self._heartbeats.still_for(n, now) for o, n in here.items() if n in still},
            time.time(),
        )
        self._beats_due = now + self._timing.heartbeat_interval / 2
        silent = self._lost_of(still - lost, table, now) | lost
        # (One that is silent when this node begins to lead has been counted.)
        new = silent - self._silent if self._watched else frozenset()
        self._silent, self._watched = silent, True
        timing = self._timing
        for member in others:
            if member.node in new and member.state == "running":
                self._cordons.note_fault(
                    member.addr, "the node was lost", timing.cordon_after, timing.cordon_window
                )

    def _lost_of(
        self, still: frozenset[str], table: RankTable | None, now: float
    ) -> frozenset[str]:
        """Which of the nodes whose heartbeat stands still are lost."""
        if self._membership.etcd is None or table is None:
            return still  # they do not reach the node on which the store is
        # So early that what they need to stand still is over when they count as silent.
        interval, timeout = self._timing.heartbeat_interval, self._timing.detection_timeout
        early = max(interval, timeout - settled_s(timeout) - interval / 2)
        beats = self._heartbeats
        places = [
            place for place in table.nodes
            if place.node not in self._silent and beats.still_for(place.node, now) > early
        ]  # fmt: skip
        began = time.monotonic()
        nobody = lost_nodes(places, try_s(timeout))
        missed = self._doors.note(nobody.keys(), began)
        missed |= {place.node: float("inf") for place in places if not place.alive}
        if nobody:
            self._beats_due = now + try_s(timeout)
        gone = {node for node in nobody if nobody[node].gone}
        of_round = still.intersection(place.node for place in table.nodes)
        lost = given_up(of_round, missed, gone, settled_s(timeout)) | (of_round & self._silent)
        # No wait is for ever.
        lost |= {n for n in of_round if beats.still_for(n, now) > self._timing.outage}
        return (still - of_round) | lost

    def _master_addr(self, members: list[Member]) -> str:
        if self._membership.job.policy == "static":
            return self._membership.endpoint.host
        return next((m.addr for m in members if m.host), self._membership.endpoint.host)

    def _clear_worker_keys(self) -> None:
        """What the workers of the last round left in the store must not meet the next ones."""
        if self._membership.store != "tcp" or self._membership.handler is not None:
            return  # the workers have never seen this store
        for key in self._kv.list_keys():
            if not key.startswith(self._prefix):
                self._kv.delete(key)

    # --- timers: this controller's own clock ------------------------------------------------------

    def _clock(self, plan: Plan, members: list[Member], now: float) -> Clock:
        if plan.phase != "forming":
            self._forming, self._enough_since = None, None
            lost, joined = (
                None if since is None else now - since
                for since in (self._lost_since, self._joined_since)
            )
            return Clock(
                lost=lost,
                joined=joined,
                last_call=self._timing.last_call,
                spare_timeout=self._timing.spare_timeout,
            )
        if self._forming is None or self._forming[0] != plan.round:
            self._forming, self._enough_since = (plan.round, now), None
        ready = [
            m
            for m in members
            if m.state == "waiting" and m.node not in self._silent and m.node not in plan.refused
        ]
        enough = len(ready) >= self._membership.job.min_nodes
        self._enough_since = _since(enough, self._enough_since, now)
        return Clock(
            forming=now - self._forming[1],
            enough=None if self._enough_since is None else now - self._enough_since,
            last_call=self._timing.last_call,
            join_timeout=self._timing.join_timeout,
        )

    def _deadlines(self) -> list[float]:
        deadlines = []
        if self._forming is not None:
            deadlines.append(self._forming[1] + self._timing.join_timeout)
        if self._enough_since is not None:
            deadlines.append(self._enough_since + self._timing.last_call)
        if self._lost_since is not None:
            deadlines.append(self._lost_since + self._timing.spare_timeout)
        if self._joined_since is not None and not self._called:
            deadlines.append(self._joined_since + self._timing.last_call)
        return deadlines

    def _timer_due(self, now: float) -> bool:
        return any(now >= d for d in self._deadlines())

    def next_timer(self, now: float) -> float | None:
        """Seconds until a timer is due, None when none runs."""
        deadlines = self._deadlines()
        return max(0.0, min(deadlines) - now) if deadlines else None
