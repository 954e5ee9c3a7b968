"""What a running job is doing, read from its control plane for people and programs. Reads only."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flashrun.control import blobs
from flashrun.control.cordon import CordonBook, Cordons
from flashrun.control.ledger import Keys, keys_of
from flashrun.control.plan_book import PREFIX, PlanBook
from flashrun.control.records import (
    Job,
    Member,
    Plan,
    job_from_json,
    member_from_json,
)
from flashrun.control.silence import SilenceBook
from flashrun.rendezvous.kv import ControlStore, KeyValue

GONE = ("left", "lost", "silent")
"""States of nodes that can't be given ranks."""


@dataclass(frozen=True)
class NodeView:
    """One node. ``ranks`` is empty for one that has none in this round. ``name`` is its number,
    or ``s`` with that of its arrival where it waits for one, "" where it is gone. ``silent_s``:
    for so many seconds no heartbeat has come."""

    group_rank: int | None
    addr: str
    ranks: tuple[int, ...]
    state: str
    host: bool
    cordoned: str = ""  # why
    name: str = ""
    silent_s: float | None = None


@dataclass(frozen=True)
class Overview:
    """A job. ``recovery``: generation and phase of the recovery in place, None without one."""

    run_id: str
    phase: str
    round: int
    restart_count: int
    max_restarts: int
    missing: str
    nodes: tuple[NodeView, ...]
    recovery: dict[str, Any] | None
    policy: str = "elastic"
    min_nodes: int = 1

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def read_overview(kv: KeyValue, recovery: Callable[[], ControlStore]) -> Overview | None:
    """What is known of the job at a store; None: there is none.

    Args:
        recovery: opens the store in which the recovery in place is; closed again.
    """
    raw, missing, count = kv.get_many(
        [f"{PREFIX}{name}" for name in ("job", "missing", "count")]
    )
    if raw is None:
        return None
    orders = range(1, int(count or b"0") + 1)
    records = kv.get_many([f"{PREFIX}node/{i}" for i in orders])
    lost = kv.get_many([f"{PREFIX}lost/{i}" for i in orders])
    members = [
        (member_from_json(record), why is not None)
        for record, why in zip(records, lost, strict=True)
        if record is not None
    ]
    silent = SilenceBook(kv, PREFIX).read([member.order for member, _ in members])
    plan = PlanBook(kv, PREFIX).read()
    cordons = CordonBook(kv, PREFIX).read()
    state = None
    if plan.table is not None and plan.table.group_world_size > 1:
        with recovery() as store:
            state = _recovery(store, keys_of(plan.table))
    waiting = json.loads(missing or b'""')
    return overview_of(job_from_json(raw), plan, members, waiting, state, cordons, silent)


def _recovery(store: ControlStore, keys: Keys) -> dict[str, Any] | None:
    head = store.get(keys.head)
    if head is None:
        return None
    try:
        machine = blobs.unpacked(keys.prefix, head, store)["director"]["machine"]
    except blobs.Gone:  # it moves on at this very moment
        return None
    return {name: machine[name] for name in ("generation", "phase", "dead", "restart_only")}


def overview_of(
    job: Job,
    plan: Plan,
    members: Sequence[tuple[Member, bool]],
    missing: str,
    recovery: dict[str, Any] | None,
    cordons: Cordons | None = None,
    silent: Mapping[int, float] | None = None,
) -> Overview:
    """From the records; pure.

    Args:
        members: each with whether it is known to be lost.
        silent: order of a node -> for how many seconds no heartbeat of it has come.
    """
    nodes = []
    for member, lost in members:
        place = None if plan.table is None else plan.table.of(member.node)
        state: str = member.state
        if lost:
            state = "lost"
        elif state == "waiting" and plan.phase == "running" and place is None:
            state = "spare"
        elif state in ("running", "failed") and place is None:
            state = "lost"  # another has its place
        still = (silent or {}).get(member.order) if state not in GONE else None
        if still is not None:
            state = "silent"
        ranks = () if place is None else place.ranks
        group_rank = None if place is None else place.group_rank
        cordon = (cordons or {}).get(member.addr)
        why = "" if cordon is None else cordon.reason
        waits = "" if state in ("left", "lost") else f"s{member.order}"
        name = waits if group_rank is None else str(group_rank)
        nodes.append(
            NodeView(group_rank, member.addr, tuple(ranks), state, member.host, why, name, still)
        )
    nodes.sort(key=lambda n: (n.group_rank is None, n.group_rank))
    return Overview(
        job.run_id, plan.phase, plan.round, plan.restart_count, job.max_restarts, missing,
        tuple(nodes), recovery, job.policy, job.min_nodes,
    )  # fmt: skip


def status_lines(view: Overview) -> list[str]:
    """For people."""
    active = [n for n in view.nodes if n.ranks]
    ranks = sum(len(n.ranks) for n in active)
    lines = [
        f"job '{view.run_id}': {view.phase}, {len(active)} node(s), {ranks} ranks, round"
        f" {view.round}, restart {view.restart_count} of at most {view.max_restarts}"
    ]
    if view.missing:
        lines.append(view.missing)
    if view.recovery is not None:
        dead = ", ".join(f"{rank} ({why})" for rank, why in view.recovery["dead"].items())
        lines.append(
            f"recovery: generation {view.recovery['generation']}, {view.recovery['phase']}"
            + (f", lost: {dead}" if dead else "")
        )
        if view.recovery["restart_only"]:
            lines.append(f"recovery: restart only: {view.recovery['restart_only']}")
    return lines


def node_lines(view: Overview) -> list[str]:
    """A table for people."""
    rows = [("node", "address", "ranks", "state", "")]
    for node in view.nodes:
        span = f"{node.ranks[0]}-{node.ranks[-1]}" if node.ranks else "-"
        notes = ["hosts the store"] if node.host else []
        notes += [f"no heartbeat for {node.silent_s:.0f} s"] if node.silent_s is not None else []
        notes += [f"cordoned: {node.cordoned}"] if node.cordoned else []
        rows.append((node.name or "-", node.addr, span, node.state, ", ".join(notes)))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return [
        "  ".join([*(text.ljust(w) for text, w in zip(row, widths, strict=False)), row[4]]).rstrip()
        for row in rows
    ]
