"""Who runs in which round, and when the job restarts or ends. Pure decisions.

The controller reads all keys as typed records (:mod:`flashrun.control.records`), asks
:func:`decide`, and writes the answer. Every agent reads the plan and asks :func:`react` what that
means for it. Neither looks at a clock, a socket or a store.

A job is in one phase: ``forming`` (nodes gather) → ``running`` (one rank table is live) →
``stopping`` (every node stops that table's workers and says so) → ``forming`` of the next round, or
``finished``. A round's table is published only when no live node still runs the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from flashrun.control import growth
from flashrun.control.failures import is_futile, merge_failures
from flashrun.control.records import Failure, Job, Member, Plan
from flashrun.rendezvous.table import NodeRanks, RankTable, assign_ranks


@dataclass(frozen=True)
class Clock:
    """The controller's own timers, in seconds since …; None: not running."""

    forming: float = 0.0  # … this phase of gathering began
    enough: float | None = None  # … min_nodes were there
    lost: float | None = None  # … a node is lost whose place no spare has taken
    joined: float | None = None  # … a node waits by which the job is to grow
    last_call: float = 30.0
    join_timeout: float = 600.0
    spare_timeout: float = 30.0


@dataclass(frozen=True)
class Decision:
    """A new plan to write (None: nothing changes), and what is being waited for."""

    plan: Plan | None = None
    waiting: str = ""
    clear_worker_keys: bool = False  # before the plan is written
    spare: bool = False  # it is a spare that is waited for
    joining: bool = False  # nodes wait by which the job is to grow


def living(members: Sequence[Member], silent: frozenset[str]) -> list[Member]:
    """The nodes that are part of the job now."""
    return [m for m in members if m.node not in silent and m.state != "left"]


def decide(
    job: Job,
    members: Sequence[Member],
    plan: Plan,
    silent: frozenset[str],
    clock: Clock,
    master_addr: str,
    master_port: int,
    knocking: int = 0,
    token: str = "",
    out: frozenset[str] = frozenset(),
    quiet: str = "",
) -> Decision:
    """The controller's next decision.

    Args:
        members: every node's record.
        silent: nodes whose heartbeat has stopped for longer than the detection timeout.
        master_addr, master_port: what the workers are told when they share the agents' store.
        token: a fresh secret, for a table that is made now.
        knocking: nodes that another backend's rendezvous holds back until its next round.
        out: nodes that get no place (:mod:`flashrun.control.cordon`).
        quiet: what is said of recoveries (:func:`flashrun.control.growth.is_quiet`).
    """
    live = living(members, silent)
    if plan.phase == "forming":
        return _form(job, live, plan, clock, master_addr, master_port, token, out)
    if plan.phase == "running":
        return _watch(job, members, live, plan, clock, knocking, out, quiet)
    if plan.phase == "stopping":
        return _stopping(members, live, plan)
    return Decision()


# --- forming -----------------------------------------------------------------------------------


def _form(
    job: Job,
    live: list[Member],
    plan: Plan,
    clock: Clock,
    master_addr: str,
    master_port: int,
    token: str,
    out: frozenset[str],
) -> Decision:
    chosen, refused = seating(job, [m for m in live if m.node not in out], plan)
    ready = [m for m in chosen if m.state == "waiting"]
    # A refused node counts here too: no new table while anybody runs an old one.
    busy = [m for m in live if m.state in ("running", "failed")]
    complete = bool(plan.expected) and {m.node for m in ready} >= set(plan.expected) - out
    missing = missing_text(job, ready, busy, clock, last_call=not complete)
    if missing and (cordoned := ", ".join(m.addr for m in live if m.node in out)):
        missing += f" (cordoned: {cordoned}; flashrun uncordon NODE lets one in)"
    if not missing:
        plan = replace(
            plan,
            round=max(plan.round, *(m.base_round for m in ready)),
            restart_count=max(plan.restart_count, *(m.base_restarts for m in ready)),
        )
        table = make_table(job, ready, plan, master_addr, master_port, token)
        published = replace(
            plan,
            serial=plan.serial + 1,
            phase="running",
            table=table,
            reason="",
            failures=(),
            expected=(),
            refused={**plan.refused, **refused},
        )
        return Decision(published)
    if clock.forming >= clock.join_timeout:
        why = (
            f"The nodes of job '{job.run_id}' did not come together within "
            f"{clock.join_timeout:g} s: {missing}. Start the missing nodes with the same "
            "--rdzv-endpoint (or --master-addr) and --nnodes, or give more time "
            "(--rdzv-conf join_timeout=SECONDS; timeout=SECONDS for static)."
        )
        return Decision(_finish(plan, success=False, reason=why))
    if refused:
        widened = replace(plan, serial=plan.serial + 1, refused={**plan.refused, **refused})
        return Decision(widened, missing)
    return Decision(waiting=missing)


def seating(job: Job, live: Sequence[Member], plan: Plan) -> tuple[list[Member], dict[str, str]]:
    """The nodes for the next table in group-rank order, and who is newly refused with the reason.

    static: the node ranks as given; the first to arrive has the place, another one is refused.
    elastic: the node that hosts the store first (MASTER_ADDR is its address), then by arrival;
    surplus nodes wait, as with torchrun. Those that have a place are in the order of their node
    ranks, where each has one of its own.
    """
    table = plan.table
    by_arrival = sorted(
        (m for m in live if m.node not in plan.refused),
        # Who is in the running table keeps its place, whoever came first, and so does who was in
        # the one before (or is why the job grows).
        key=lambda m: (
            m.node not in plan.expected if table is None else table.of(m.node) is None,
            m.order,
        ),
    )
    if job.policy == "elastic":
        ordered = sorted(by_arrival, key=lambda m: not m.host)
        return by_node_rank(ordered[: job.max_nodes]), {}
    places: dict[int, Member] = {}
    refused: dict[str, str] = {}
    for member in by_arrival:
        rank = member.node_rank
        if rank is None or not 0 <= rank < job.max_nodes:
            refused[member.node] = (
                f"node rank {rank} is not one of 0..{job.max_nodes - 1} (--node-rank, --nnodes)"
            )
        elif rank in places:
            refused[member.node] = (
                f"this endpoint already serves job '{job.run_id}', and node rank {rank} of it "
                f"belongs to the node at {places[rank].addr}. Give each node its own --node-rank; "
                "a second job needs an endpoint of its own (--master-port)"
            )
        else:
            places[rank] = member
    return [places[rank] for rank in sorted(places)], refused


def by_node_rank(chosen: list[Member]) -> list[Member]:
    """In the order of ``--node-rank``, if it was given: without, each has the same, torch's 0."""
    ranks = [m.node_rank for m in chosen if m.node_rank is not None]
    if len(set(ranks)) < len(chosen):
        return chosen
    return [member for _, member in sorted(zip(ranks, chosen, strict=True), key=lambda x: x[0])]


def missing_text(
    job: Job, ready: Sequence[Member], busy: Sequence[Member], clock: Clock, last_call: bool
) -> str:
    """What is waited for before a table can be published; empty when nothing is.

    ``last_call``: whether further nodes are given time to come once there are enough. A restart
    in which every node of the round before is back at once needs none.
    """
    if busy:
        names = ", ".join(m.addr for m in busy)
        return f"waiting for {names} to stop the workers of the round before"
    count = len(ready)
    if job.policy == "static":
        if count == job.max_nodes:
            return ""
        here = {m.node_rank for m in ready}
        gone = ", ".join(str(r) for r in range(job.max_nodes) if r not in here)
        return f"{count} of {job.max_nodes} nodes are here, node rank {gone} missing"
    if count >= job.max_nodes:
        return ""
    if count < job.min_nodes:
        return f"{count} of at least {job.min_nodes} nodes are here"
    if not last_call or (clock.enough is not None and clock.enough >= clock.last_call):
        return ""
    return (
        f"enough nodes to start are here ({count}, at least {job.min_nodes}); "
        f"last call for up to {job.max_nodes} ends after {clock.last_call:g} s"
    )


def make_table(
    job: Job,
    chosen: Sequence[Member],
    plan: Plan,
    master_addr: str,
    master_port: int,
    token: str = "",
) -> RankTable:
    """The table of ``plan.round`` for ``chosen``, who are in group-rank order."""
    # Agents that meet in etcd (no port) have a store for the workers each.
    shared = job.use_agent_store and master_port > 0
    each = job.use_agent_store and not shared and job.policy == "elastic"
    nodes = assign_ranks([m.seat if each else replace(m.seat, store=0) for m in chosen])
    return RankTable(
        round=plan.round,
        restart_count=plan.restart_count,
        max_restarts=job.max_restarts,
        run_id=job.run_id,
        world_size=sum(n.slots for n in nodes),
        master_addr=master_addr if shared or job.policy == "static" else chosen[0].addr,
        master_port=master_port if shared else chosen[0].port,
        use_agent_store=job.use_agent_store,
        nodes=nodes,
        token=token,
    )


# --- running -----------------------------------------------------------------------------------


def _watch(
    job: Job,
    members: Sequence[Member],
    live: Sequence[Member],
    plan: Plan,
    clock: Clock,
    knocking: int,
    out: frozenset[str],
    quiet: str,
) -> Decision:
    assert plan.table is not None
    records = {m.node: m for m in members}
    here = {m.node for m in live}
    succeeded: set[str] = set()
    lost: list[NodeRanks] = []
    failures: list[Failure] = []
    reasons: list[str] = []
    for place in plan.table.nodes:
        member = records.get(place.node)
        current = member is not None and member.round == plan.round
        if member is not None and current and member.state == "succeeded":
            succeeded.add(place.node)
        elif member is not None and current and member.state == "failed":
            failures.extend(member.failures)
            reasons.append(member.reason or f"workers of the node at {place.addr} failed")
        elif member is not None and current and member.state == "stopped":
            reasons.append(f"the node at {place.addr} stopped its workers by itself")
        elif place.node not in here:
            if member is not None and member.state == "left":
                reasons.append(f"{_named(place)} left: {member.reason}")
            else:
                lost.append(place)
    why_not = (why_no_spare(job.policy, job.backend, plan.table, place) for place in lost)
    nowhere = [why for why in why_not if why]
    if lost and not (reasons or succeeded or nowhere) and _in_place(job):
        free = [m for m in live if m.node not in out]
        replaced = _replace(free, plan.table, lost)
        if replaced is not None:
            return Decision(replace(plan, serial=plan.serial + 1, table=replaced))
        if (clock.lost or 0.0) < clock.spare_timeout:
            names = ", ".join(place.addr for place in lost)
            return Decision(
                waiting=f"waiting for {len(lost)} spare node(s) to take the place of {names}, for"
                f" up to {clock.spare_timeout:g} s (--spare-timeout)",
                spare=True,
            )
        waited = f", and no spare came within {clock.spare_timeout:g} s (--spares, --spare-timeout)"
        reasons += [f"{_named(place)} was lost{waited}" for place in lost]
    elif lost:
        why = f"; {nowhere[0]}" if nowhere and job.policy == "elastic" else ""
        reasons += [f"{_named(place)} was lost: no heartbeat{why}" for place in lost]
    if reasons:
        # Where recovery in place was given up, every node says the same.
        reason = "; ".join(dict.fromkeys(reasons))
        return Decision(_stop(job, plan, reason, counts=True, failures=failures))
    if len(succeeded) == len(plan.table.nodes):
        return Decision(_finish(plan, success=True, reason="all workers succeeded"))
    if knocking and not succeeded:
        return Decision(_stop(job, plan, f"membership changes: {knocking} wait", counts=False))
    if job.policy == "static":
        return _refuse_late(job, live, plan)
    # A job of which a part has ended already is not restarted for the sake of growth.
    return Decision() if succeeded else _grow(job, live, plan, clock, out, quiet)


def _grow(
    job: Job,
    live: Sequence[Member],
    plan: Plan,
    clock: Clock,
    out: frozenset[str],
    quiet: str,
) -> Decision:
    """Restart for the sake of more nodes, once all have come that come in a short time."""
    table = plan.table
    more = growth.joiners(job, live, plan, out)
    if table is None or not more:
        return Decision()
    if not growth.is_quiet(job, table, quiet):
        return Decision(waiting=growth.deferred_text(job, more), joining=True)
    full = len(table.nodes) + len(more) == job.max_nodes
    if not full and (clock.joined is None or clock.joined < clock.last_call):
        text = growth.waiting_text(job, table, more, clock.last_call)
        return Decision(waiting=text, joining=True)
    facts = growth.growth_facts(table, more)
    stopping = _stop(job, plan, growth.growth_text(facts), counts=False)
    expected = tuple(m.node for m in more)
    return Decision(replace(stopping, growth=facts, expected=expected))


def _named(place: NodeRanks) -> str:
    return f"the node at {place.addr} (group rank {place.group_rank})"


def _in_place(job: Job) -> bool:
    """Whether a lost node's ranks may go on elsewhere while the others stay. Where that turns out
    to be impossible, the agents say so and all are restarted."""
    return job.recovery in ("auto", "in-place")


def why_no_spare(policy: str, backend: str, table: RankTable, place: NodeRanks | None) -> str:
    """Why no other node can take a lost one's place while the others stay; "": one can."""
    if policy != "elastic":
        return "nodes have no spares with this --rdzv-backend; use flash"
    lost_store = not table.spread and place is not None and place.group_rank == 0
    if backend == "flash-etcd" and lost_store:
        return "it was the node of rank 0, and MASTER_ADDR, which scripts have read, led to it"
    return ""


def _replace(
    live: Sequence[Member], table: RankTable, lost: Sequence[NodeRanks]
) -> RankTable | None:
    """The table with a spare in the place of each lost node; None: there are not enough spares, or
    nobody is left who has what they would need."""
    if len(lost) == len(table.nodes):
        return None
    spares = sorted(
        (m for m in live if m.state == "waiting" and table.of(m.node) is None),
        key=lambda m: m.order,
    )
    for place in lost:
        fitting = [m for m in spares if m.slots >= place.slots and m.role == place.role]
        if not fitting:
            return None
        spares.remove(fitting[0])
        table = table.with_instead(place.node, fitting[0].seat)
    return table


def _refuse_late(job: Job, live: Sequence[Member], plan: Plan) -> Decision:
    """A static job is full while it runs: whoever comes is refused (his place is taken)."""
    _, refused = seating(job, live, plan)
    if not refused:
        return Decision()
    return Decision(replace(plan, serial=plan.serial + 1, refused={**plan.refused, **refused}))


def _stop(
    job: Job, plan: Plan, reason: str, counts: bool, failures: Sequence[Failure] = ()
) -> Plan:
    restart = not counts or plan.restart_count < job.max_restarts
    if counts and not restart:
        used = f"restart {plan.restart_count} of {job.max_restarts} was the last"
        reason = f"{reason} ({used})" if job.max_restarts else reason
    return replace(
        plan,
        serial=plan.serial + 1,
        phase="stopping",
        restart=restart,
        counts=counts,
        reason=reason,
        failures=tuple(failures),
    )


# --- stopping ----------------------------------------------------------------------------------


def _stopping(members: Sequence[Member], live: Sequence[Member], plan: Plan) -> Decision:
    assert plan.table is not None
    current = {m.node: m for m in members if m.round == plan.round}
    here = {m.node for m in live}
    working = [
        place
        for place in plan.table.nodes
        if place.node in here
        and not (place.node in current and current[place.node].state in ("stopped", "succeeded"))
    ]
    if working:
        names = ", ".join(place.addr for place in working)
        return Decision(waiting=f"waiting for {names} to stop the workers of round {plan.round}")
    failures = merge_failures(
        plan.failures,
        [f for p in plan.table.nodes if p.node in current for f in current[p.node].failures],
    )
    if not plan.restart:
        return Decision(_finish(plan, success=False, reason=plan.reason, failures=failures))
    if plan.counts and is_futile(failures, plan.table.world_size):
        why = (
            "every rank failed with the same error before a process group was formed: "
            "another attempt would fail the same way"
        )
        return Decision(_finish(plan, success=False, reason=why, failures=failures))
    again = replace(
        plan,
        serial=plan.serial + 1,
        phase="forming",
        round=plan.round + 1,
        restart_count=plan.restart_count + int(plan.counts),
        table=None,
        failures=(),
        growth={},
        expected=(*(place.node for place in plan.table.nodes), *plan.expected),
    )
    return Decision(again, clear_worker_keys=True)


def _finish(
    plan: Plan, success: bool, reason: str, failures: Sequence[Failure] | None = None
) -> Plan:
    return replace(
        plan,
        serial=plan.serial + 1,
        phase="finished",
        success=success,
        reason=reason,
        failures=plan.failures if failures is None else tuple(failures),
    )


# --- what the plan means for one node --------------------------------------------------------


@dataclass(frozen=True)
class Reaction:
    """What a node has to do now."""

    kind: Literal["none", "start", "stop", "acknowledge", "rejoin", "finish", "refused"]
    round: int = -1
    reason: str = ""
    at_once: bool = False  # others act as its ranks


def react(plan: Plan, me: Member, stop_sent: int) -> Reaction:
    """What ``plan`` asks of the node with record ``me``.

    Args:
        stop_sent: the last round that this node's agent was told to stop (-1: none).

    A node that still has workers of a round that is over, because it was taken for dead, stops
    them first; only then it waits for a place again.
    """
    if plan.phase == "finished":
        return Reaction("finish", plan.round, plan.reason)
    if me.node in plan.refused:
        return Reaction("refused", plan.round, plan.refused[me.node])
    place = plan.table.of(me.node) if plan.table is not None else None
    has_workers = me.state in ("running", "failed")
    if has_workers and (me.round < plan.round or place is None):
        if stop_sent >= me.round:
            return Reaction("none")
        why = "this node had been given up for lost; its place is taken"
        return Reaction("stop", me.round, why, at_once=True)
    if plan.phase == "running":
        if place is None:  # it was taken for dead; from now on it is a spare
            back = me.state in ("stopped", "succeeded")
            return Reaction("rejoin" if back else "none", plan.round)
        # (A lost node that came back in the same round waits, and may be given a place again.)
        if me.round >= plan.round and me.state != "waiting":
            return Reaction("none")
        return Reaction("start", plan.round)
    if plan.phase == "stopping":
        if place is None:
            return Reaction("none")
        # Never started here, but the controller waits to hear so.
        if me.round < plan.round or me.state == "waiting":
            return Reaction("acknowledge", plan.round)
        if not has_workers or stop_sent >= plan.round:
            return Reaction("none")
        return Reaction("stop", plan.round, plan.reason)
    if me.state in ("stopped", "succeeded"):  # forming: the round it was in is over
        return Reaction("rejoin", plan.round)
    return Reaction("none")
