"""Growth: with ``--grow=restart`` nodes that come later make one restart as more; by default they
are spares. The pure decisions, coordinators on a real store, and real agents."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashrun.control.events import Finish, Start, Stop
from flashrun.control.membership_plan import Clock, Decision, decide, react
from flashrun.control.records import Job, Member, Plan
from tests import etcd
from tests.test_coordinator import FAST, Agent, World, membership, world
from tests.test_coordinator import job as coordinated
from tests.test_lost_node import lose
from tests.test_membership_plan import FAIL, job, member, new_plan, started
from tests.test_recovery import TRAIN
from tests.test_recovery_nodes import Start as Begin
from tests.test_recovery_nodes import results, start, undisturbed

__all__ = ["start", "undisturbed", "world"]  # fixtures

NOW = Clock(joined=30.0)


def grown(nodes: str = "1:3", running: int = 2, **changes: Any) -> tuple[Job, list[Member], Plan]:
    terms = job(nodes=nodes, **{"grow": "restart", **changes})
    names = [member(f"n{i}", i + 1, host=i == 0) for i in range(running)]
    plan, members = started(terms, names)
    return terms, members, plan


def ask(
    terms: Job, members: list[Member], plan: Plan, clock: Clock = NOW, quiet: str = "",
    out: str = "",
) -> Decision:  # fmt: skip
    kept_out = frozenset(out.split())
    return decide(terms, members, plan, frozenset(), clock, "h", 1, out=kept_out, quiet=quiet)


@pytest.mark.parametrize(
    ("changes", "late", "clock", "grows"),
    [
        ({}, {}, Clock(joined=0.0), True),  # full: nobody else is waited for
        ({"grow": "spare"}, {}, NOW, False),
        ({"nodes": "1:4"}, {}, Clock(), False),  # the last call begins
        ({"nodes": "1:4"}, {}, Clock(joined=29.9), False),
        ({"nodes": "1:4"}, {}, NOW, True),
        ({"nodes": "2:2"}, {}, NOW, False),
        ({}, {"slots": 1}, NOW, False),
        ({}, {"slots": 3}, NOW, True),
        ({}, {"slots": 1, "role": "reader"}, NOW, False),
        ({}, {"state": "left"}, NOW, False),
        ({"recovery": "in-place"}, {}, NOW, False),  # nobody has said that nothing is recovered
    ],
)
def test_when_a_job_grows(
    changes: dict[str, Any], late: dict[str, Any], clock: Clock, grows: bool
) -> None:
    terms, members, plan = grown(**changes)
    found = ask(terms, [*members, member("late", 9, **late)], plan, clock)
    assert (found.plan is not None) == grows, found


def test_who_has_no_place_to_grow_into() -> None:
    terms, members, plan = grown()
    late = member("late", 9)
    assert ask(terms, [*members, late], plan, out="late").plan is None, "cordoned"
    ended = [replace(members[0], state="succeeded"), members[1]]
    assert ask(terms, [*ended, late], plan).plan is None, "a part has ended"
    refused = replace(plan, refused={"late": "why"})
    assert ask(terms, [*members, late], refused).plan is None


def test_one_restart_for_all_that_come_with_what_it_costs() -> None:
    terms, members, plan = grown("1:4", running=1)
    more = [member("x", 7), member("y", 8, slots=4)]
    waits = ask(terms, [*members, *more], plan, Clock(joined=1.0))
    assert waits.plan is None and waits.joining
    assert "x, y will join job 'r', which runs on 1 nodes; last call for up to 4" in waits.waiting
    stopping = new_plan(ask(terms, [*members, *more], plan))
    assert (stopping.phase, stopping.restart, stopping.counts) == ("stopping", True, False)
    assert stopping.growth == {"nodes": ["x", "y"], "ranks": 2, "more_ranks": 6}
    assert stopping.reason == (
        "growth: 2 more node(s) (x, y); all 2 workers are stopped and start again as 8, from the"
        " script's own last checkpoint (--grow=restart)"
    )
    stopped = [replace(members[0], state="stopped"), *more]
    forming = new_plan(ask(terms, stopped, stopping))
    assert (forming.phase, forming.restart_count, forming.growth) == ("forming", 0, {})
    back = [replace(members[0], state="waiting"), *more]
    again = new_plan(ask(terms, back, forming, Clock(enough=0.0)))  # without another last call
    assert again.table is not None and again.expected == ()
    assert [n.node for n in again.table.nodes] == ["n0", "x", "y"]
    assert (again.table.world_size, again.table.restart_count) == (8, 0)


def test_who_is_said_to_join_gets_the_place() -> None:
    """Not one that came before and has too few slots, and not a spare before who ran."""
    terms, members, plan = grown()
    small, late = member("small", 0, slots=1), member("late", 9)
    stopping = new_plan(ask(terms, [*members, small, late], plan))
    assert stopping.growth["nodes"] == ["late"]
    waiting = [replace(m, state="waiting") for m in members]
    stopped = [replace(m, state="stopped") for m in members]
    forming = new_plan(ask(terms, [*stopped, small, late], stopping))
    again = new_plan(ask(terms, [*waiting, small, late], forming))
    assert again.table is not None
    assert [n.node for n in again.table.nodes] == ["n0", "n1", "late"]


def test_never_while_a_recovery_is_under_way() -> None:
    terms, members, plan = grown(recovery="in-place")
    late = member("late", 9)
    for quiet in ("", "busy", "0.1", "1.0"):  # … or of another table
        found = ask(terms, [*members, late], plan, quiet=quiet)
        assert found.plan is None and found.joining
        assert "once no recovery is under way" in found.waiting
    assert new_plan(ask(terms, [*members, late], plan, quiet="0.0")).growth


def test_a_lost_node_is_replaced_rather_than_grown_by() -> None:
    terms, members, plan = grown(recovery="in-place")
    late = member("late", 9)
    found = decide(terms, [*members, late], plan, frozenset({"n1"}), NOW, "h", 1, quiet="0.0")
    assert new_plan(found).phase == "running" and not new_plan(found).growth


def test_a_failure_comes_before_growth_and_counts() -> None:
    terms, members, plan = grown()
    failed = [replace(members[0], state="failed", failures=(FAIL,)), members[1]]
    stopping = new_plan(ask(terms, [*failed, member("late", 9)], plan))
    assert stopping.counts and not stopping.growth


@pytest.mark.parametrize("state", ["stopped", "succeeded"])
def test_a_node_that_comes_back_after_its_round_waits_for_a_place(state: Any) -> None:
    """Its round was given up, and the job has begun another without it."""
    _, members, plan = grown()
    table = plan.table
    assert table is not None
    smaller = replace(plan, round=2, table=replace(table, round=2, nodes=table.nodes[:1]))
    back = replace(members[1], state="running", round=0)
    assert react(smaller, back, -1).kind == "stop"
    assert react(smaller, replace(back, state=state), 0).kind == "rejoin"
    assert react(smaller, replace(back, state="waiting"), 0).kind == "none"


# --- coordinators -------------------------------------------------------------------------------


def stop_all(agents: list[Agent], round_: int) -> list[Stop]:
    stops = [agent.get(Stop) for agent in agents]
    for agent in agents:
        agent.coordinator.report_stopped(round_)
    return stops


def test_two_that_come_make_one_restart_that_does_not_count(world: World) -> None:
    terms = membership(coordinated(nodes="1:5", grow="restart"))
    one, two = world.agent(terms, "n0"), world.agent(terms, "n1")
    assert one.get(Start).table.group_world_size == 2
    assert two.get(Start).table.group_world_size == 2
    three, four = world.agent(terms, "n2"), world.agent(terms, "n3")
    (growth, _) = stop_all([one, two], 0)
    assert growth.growth == {"nodes": ["127.0.0.1"] * 2, "ranks": 4, "more_ranks": 4}
    tables = [a.get(Start).table for a in (one, two, three, four)]
    assert {(t.round, t.restart_count, t.group_world_size) for t in tables} == {(1, 0, 4)}
    for agent in (one, two, three, four):
        agent.coordinator.report_succeeded(1)
    assert all(a.get(Finish).success for a in (one, two, three, four))


def test_by_default_who_comes_later_is_a_spare(world: World) -> None:
    terms = membership(coordinated(nodes="1:3"), timing=replace(FAST, last_call=0.1))
    one = world.agent(terms, "n0")
    one.get(Start)
    two = world.agent(terms, "n1")
    two.get_waiting("this node waits for a place")
    one.coordinator.report_succeeded(0)
    assert all(a.get(Finish).success for a in (one, two))


def test_growth_waits_for_the_end_of_a_recovery(world: World) -> None:
    terms = membership(
        coordinated(nodes="1:2", grow="restart", recovery="in-place"),
        timing=replace(FAST, last_call=0.1),
    )
    one = world.agent(terms, "n0")
    one.get(Start)
    one.coordinator.report_quiet(0, None)
    two = world.agent(terms, "n1")
    two.get_waiting("once no recovery is under way")
    one.coordinator.report_quiet(0, 0)
    (growth,) = stop_all([one], 0)
    assert growth.growth["more_ranks"] == 2
    assert {a.get(Start).table.group_world_size for a in (one, two)} == {2}


# --- real agents --------------------------------------------------------------------------------

# The first rounds wait, and go on only when the test says so.
HELD = TRAIN.replace(
    'tell("step", step=step)',
    'tell("step", step=step, world=dist.get_world_size())\n'
    '        if step == 20 and RANK == 0 and dist.get_world_size() < 4: await_release("go")',
)


def check_growth(nodes: Any, expected: Any, events: Path, growths: int) -> None:
    assert results(nodes.out, 4) == expected(4), nodes.describe()
    told = [json.loads(line) for line in events.read_text().splitlines()]
    grown_by = [e for e in told if e["event"] == "growth"]
    assert len(grown_by) == growths
    assert all((e["ranks"], e["more_ranks"]) == (2, 2) for e in grown_by)
    attempts = {e["attempt"] for j in nodes.jobs for e in j.told("step", world=4)}
    assert attempts == {0}, "growth is no restart that counts"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[etcd.Cluster]:
    etcd.need()
    with etcd.Cluster(tmp_path / "etcd") as found:
        yield found


def grow(begin: Begin, expected: Any, folder: Path, **options: Any) -> None:
    """One node, a recovery of a worker, then a second node, which the job grows by."""
    events = folder / "events"
    flags = ("--grow=restart", f"--events={events}")
    with begin(2, *flags, least=1, late=1, body=HELD, fifos=("go",), **options) as nodes:
        nodes.await_step(20, 0)
        nodes.add()
        for job_ in nodes.jobs:
            job_.wait(45)
            assert job_.ended() == 0, nodes.describe()
    check_growth(nodes, expected, events, 1)
    line = "all 2 workers are stopped and start again as 4, from the script's own last checkpoint"
    assert line in nodes.jobs[0].err


def test_a_node_that_comes_later(start: Begin, undisturbed: Any, tmp_path: Path) -> None:
    grow(start, undisturbed, tmp_path)


@pytest.mark.slow
def test_a_node_that_comes_later_in_etcd(
    start: Begin, undisturbed: Any, tmp_path: Path, cluster: etcd.Cluster
) -> None:
    where = ",".join(cluster.config().endpoints)
    grow(start, undisturbed, tmp_path, backend="flash-etcd", endpoint=where)


@pytest.mark.slow
def test_a_job_that_shrank_grows_again(
    start: Begin, undisturbed: Any, tmp_path: Path
) -> None:
    """A node is lost, no spare comes, all restart as fewer; then a node comes."""
    body = HELD.replace("dist.get_world_size() < 4", "(dist.get_world_size() < 4 or ATTEMPT == 0)")
    events = tmp_path / "events"
    flags = ("--grow=restart", f"--events={events}", "--max-restarts=1", "--spare-timeout=0.5")
    with start(2, *flags, least=1, body=body, fifos=("go",)) as nodes:
        nodes.await_step(20, 0)
        lost = nodes.of(3)
        lose(lost)
        left = nodes.of(0)
        left.release("go")
        left.await_told("step", step=20, world=2, timeout=120)
        nodes.add()
        for job_ in nodes.jobs:
            if job_ is not lost:
                job_.wait(45)
                assert job_.ended() == 0, nodes.describe()
    assert results(nodes.out, 4) == undisturbed(4), nodes.describe()
    assert "restart 1 of at most 1" in left.err and "growth: 1 more node(s)" in left.err
    assert "restart 2 of" not in left.err
