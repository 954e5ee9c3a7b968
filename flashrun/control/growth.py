"""Growth (``--grow=restart``): nodes that wait while the job is smaller than ``--nnodes`` allows
make all workers restart as more, as under torchrun. Pure.

Several that come in a short time make one restart: the first begins a last call, as at a
rendezvous, while which everybody trains on. None begins while a recovery is under way, whose work
it would throw away.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from flashrun.control.records import Job, Member, Plan
from flashrun.rendezvous.table import RankTable


def joiners(
    job: Job, live: Sequence[Member], plan: Plan, out: Collection[str]
) -> list[Member]:
    """The nodes that the job would grow by now, by arrival.

    One with fewer slots than any node of its role that runs is not worth a restart.

    Args:
        out: nodes that get no place (:mod:`flashrun.control.cordon`).
    """
    table = plan.table
    if job.grow != "restart" or job.policy != "elastic" or table is None:
        return []
    found = [
        m
        for m in live
        if m.state == "waiting"
        and table.of(m.node) is None
        and m.node not in plan.refused
        and m.node not in out
        and m.slots >= _enough(table, m.role)
    ]
    found.sort(key=lambda m: m.order)
    return found[: max(0, job.max_nodes - len(table.nodes))]


def _enough(table: RankTable, role: str) -> int:
    same = [place.slots for place in table.nodes if place.role == role]
    return min(same or [place.slots for place in table.nodes])


def quiet_text(round_: int, joins: int) -> str:
    """How the store says that no recovery is under way in a round in which other nodes have taken
    ``joins`` places."""
    return f"{round_}.{joins}"


def is_quiet(job: Job, table: RankTable, said: str) -> bool:
    """Whether no recovery is under way. Not known is no: somebody says so in each round."""
    return job.recovery not in ("auto", "in-place") or said == quiet_text(table.round, table.joins)


def waiting_text(job: Job, table: RankTable, more: Sequence[Member], last_call: float) -> str:
    """For who waits to join."""
    return (
        f"{_names(more)} will join job '{job.run_id}', which runs on {len(table.nodes)} nodes; last"
        f" call for up to {job.max_nodes} ends after {last_call:g} s (--grow=restart)"
    )


def deferred_text(job: Job, more: Sequence[Member]) -> str:
    """As above, while something is being recovered."""
    return f"{_names(more)} will join job '{job.run_id}' once no recovery is under way"


def growth_facts(table: RankTable, more: Sequence[Member]) -> dict[str, Any]:
    """Fields of the event."""
    return {
        "nodes": [m.addr for m in more],
        "ranks": table.world_size,
        "more_ranks": sum(m.slots for m in more),
    }


def growth_text(facts: dict[str, Any]) -> str:
    """The line, with what it costs."""
    before, more = facts["ranks"], facts["more_ranks"]
    nodes = ", ".join(facts["nodes"])
    return (
        f"growth: {len(facts['nodes'])} more node(s) ({nodes}); all {before} workers are stopped"
        f" and start again as {before + more}, from the script's own last checkpoint"
        " (--grow=restart)"
    )


def _names(nodes: Sequence[Member]) -> str:
    return ", ".join(m.addr for m in nodes)
