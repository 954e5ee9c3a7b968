"""The pure decisions: rank assignment, seating, restarts, verdicts; and random histories."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent, WorkerSpec

from flashrun.control.failures import is_futile, merge_failures
from flashrun.control.liveness import Heartbeats
from flashrun.control.membership_plan import (
    Clock,
    Decision,
    decide,
    react,
    seating,
)
from flashrun.control.records import (
    Job,
    Member,
    Plan,
    job_from_json,
    job_to_json,
    member_from_json,
    member_to_json,
    plan_from_json,
    plan_to_json,
)
from flashrun.rendezvous.table import RankTable, Seat, assign_ranks


def job(policy: str = "elastic", nodes: str = "1:2", **changes: Any) -> Job:
    least, most = (int(n) for n in nodes.split(":"))
    fields: dict[str, Any] = {
        "run_id": "r",
        "backend": "c10d",
        "policy": policy,
        "min_nodes": least,
        "max_nodes": most,
        "max_restarts": 3,
        "recovery": "restart",
        "flashrun_version": "1",
        "torch_version": "2",
    }
    return Job(**{**fields, **changes})


def member(name: str, order: int, **changes: Any) -> Member:
    fields: dict[str, Any] = {"node": name, "order": order, "slots": 2, "role": "t", "addr": name}
    return Member(**{**fields, **changes})


def call(
    terms: Job,
    members: list[Member],
    plan: Plan | None = None,
    silent: frozenset[str] = frozenset(),
    clock: Clock | None = None,
) -> Decision:
    return decide(terms, members, plan or Plan(), silent, clock or Clock(), "host", 29500)


def new_plan(decision: Decision) -> Plan:
    assert decision.plan is not None, decision
    return decision.plan


def started(terms: Job, members: list[Member]) -> tuple[Plan, list[Member]]:
    """A published first round, and everybody in it."""
    plan = new_plan(call(terms, members, clock=Clock(enough=1e9)))
    return plan, [replace(m, state="running", round=plan.round) for m in members]


# --- rank table -------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.sampled_from(["trainer", "reader", "ps"]), st.integers(1, 5)),
        min_size=1,
        max_size=6,
    )
)
@settings(max_examples=60, deadline=None)
def test_ranks_are_those_of_torchs_agent(nodes: list[tuple[str, int]]) -> None:
    """Compared with ``SimpleElasticAgent._assign_worker_ranks`` itself."""
    ours = assign_ranks([Seat(f"n{i}", size, role, "") for i, (role, size) in enumerate(nodes)])
    store = HashStore()
    for i, (role, size) in enumerate(nodes):  # rank 0 comes last: it needs the others' keys
        store.set(
            f"torchelastic/role_info/{i}",
            json.dumps({"role": role, "rank": i, "local_world_size": size}),
        )
    for i, (role, size) in enumerate(nodes):
        spec = WorkerSpec(
            role=role,
            local_world_size=size,
            rdzv_handler=None,  # type: ignore[arg-type]
            entrypoint="x",
        )
        assign = SimpleElasticAgent._assign_worker_ranks.__wrapped__
        workers = assign(None, store, i, len(nodes), spec)
        place = ours[i]
        assert [w.global_rank for w in workers] == [place.base_rank + n for n in range(size)]
        assert [w.role_rank for w in workers] == [place.base_role_rank + n for n in range(size)]
        assert {w.role_world_size for w in workers} == {place.role_world_size}
        assert {w.world_size for w in workers} == {sum(n.slots for n in ours)}


def test_records_survive_the_store() -> None:
    terms = job()
    members = [
        member("a", 1, host=True, failures=({"rank": 0, "exitcode": 1},)),
        member("b", 2, node_rank=1),
    ]
    plan, _ = started(terms, members)
    plan = replace(plan, refused={"x": "why"}, failures=({"rank": 1},), expected=("a", "b"))
    assert job_from_json(job_to_json(terms)) == terms
    assert [member_from_json(member_to_json(m)) for m in members] == members
    assert plan.table is not None
    assert plan_from_json(plan_to_json(plan, "t", "w")) == (replace(plan, table=None), "t")
    assert RankTable.from_json(plan.table.to_json()) == plan.table


# --- forming ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "nodes", "present", "clock", "starts", "missing"),
    [
        ("static", "1:1", [0], Clock(), True, ""),
        ("static", "2:2", [0], Clock(), False, "node rank 1 missing"),
        ("static", "3:3", [2], Clock(), False, "node rank 0, 1 missing"),
        ("static", "2:2", [1, 0], Clock(), True, ""),
        ("elastic", "1:1", [None], Clock(), True, ""),
        ("elastic", "2:3", [None], Clock(), False, "1 of at least 2"),
        ("elastic", "1:2", [None], Clock(enough=0), False, "last call"),
        ("elastic", "1:2", [None], Clock(enough=29.9), False, "last call"),
        ("elastic", "1:2", [None], Clock(enough=30), True, ""),
        ("elastic", "1:2", [None, None], Clock(enough=0), True, ""),
        ("elastic", "2:2", [None, None, None], Clock(), True, ""),
        ("elastic", "2:2", [], Clock(), False, "0 of at least 2"),
    ],
)
def test_when_a_round_starts(
    policy: str, nodes: str, present: list[int | None], clock: Clock, starts: bool, missing: str
) -> None:
    members = [member(f"n{i}", i, node_rank=rank) for i, rank in enumerate(present)]
    decision = call(job(policy, nodes), members, clock=clock)
    assert (decision.plan is not None) == starts
    assert missing in decision.waiting
    if policy == "static" and starts:
        assert new_plan(decision).table is not None


def test_join_timeout_ends_with_what_was_missing() -> None:
    plan = new_plan(
        call(job("static", "2:2"), [member("a", 1, node_rank=0)], clock=Clock(forming=600))
    )
    assert (plan.phase, plan.success) == ("finished", False)
    assert "node rank 1 missing" in plan.reason
    assert "join_timeout" in plan.reason


def test_hosting_node_is_first_and_its_address_is_the_masters() -> None:
    members = [member("a", 1), member("b", 2, host=True)]
    plan = new_plan(call(job(nodes="2:2"), members))
    assert plan.table is not None
    assert [n.node for n in plan.table.nodes] == ["b", "a"]
    assert (plan.table.master_addr, plan.table.master_port) == ("host", 29500)
    own = new_plan(
        call(job(nodes="2:2", use_agent_store=False), [replace(m, port=7) for m in members])
    )
    assert own.table is not None
    assert (own.table.master_addr, own.table.master_port) == ("b", 7)


@pytest.mark.parametrize(
    ("given", "order"),
    [
        ((0, 1, 2), "abc"),
        ((2, 0, 1), "bca"),
        ((1, 2, 0), "cab"),  # not the host first
        ((4, 7, 2), "cab"),
        ((0, 0, 0), "bac"),  # torch's default: the host first, then by arrival
        ((1, 0, 0), "bac"),  # not all have given one
        ((1, 1, 2), "bac"),
        ((None, 1, 0), "bac"),
    ],
)
def test_elastic_nodes_are_in_the_order_of_their_node_ranks(
    given: tuple[int | None, ...], order: str
) -> None:
    members = [
        member(name, i, node_rank=rank, host=name == "b")
        for i, (name, rank) in enumerate(zip("abc", given, strict=True))
    ]
    plan = new_plan(call(job(nodes="2:3"), members))
    assert plan.table is not None
    assert "".join(place.node for place in plan.table.nodes) == order
    assert plan.table.master_addr == "host", "wherever rank 0 is"


def test_a_surplus_node_waits_whatever_its_node_rank() -> None:
    """Who came first has a place; who has one keeps it in the next round."""
    members = [member(name, i, node_rank=rank) for i, (name, rank) in
               enumerate([("a", 3), ("b", 2), ("c", 0)])]  # fmt: skip
    plan, running = started(job(nodes="2:2"), members)
    assert plan.table is not None
    assert [place.node for place in plan.table.nodes] == ["b", "a"]
    stopped = [replace(m, state="waiting") for m in running]
    chosen, _ = seating(job(nodes="2:2"), stopped, plan)
    assert [m.node for m in chosen] == ["b", "a"]


def test_static_seats_first_comer_keeps_its_rank() -> None:
    members = [
        member("a", 1, node_rank=0),
        member("b", 3, node_rank=1),
        member("c", 2, node_rank=1),
        member("d", 4, node_rank=5),
        member("e", 5),
    ]
    chosen, refused = seating(job("static", "2:2"), members, Plan())
    assert [m.node for m in chosen] == ["a", "c"]
    assert set(refused) == {"b", "d", "e"}
    assert "'r'" in refused["b"]
    assert "0..1" in refused["d"]


def test_returned_node_does_not_take_the_place_of_its_replacement() -> None:
    terms = job("static", "2:2")
    plan, members = started(
        terms, [member("a", 1, node_rank=0), member("replacement", 3, node_rank=1)]
    )
    old = member("old", 2, node_rank=1, state="running", round=-1)
    after = new_plan(call(terms, [*members, old], plan))
    assert set(after.refused) == {"old"}
    assert react(after, old, -1).kind == "refused"
    assert react(after, members[1], -1).kind == "none"


# --- running, stopping ------------------------------------------------------------------------

FAIL = {"rank": 0, "exitcode": 1, "formed_group": True, "error_digest": "d", "timestamp": 1}


@pytest.mark.parametrize(
    ("states", "silent", "restarts", "phase", "restart", "counts"),
    [
        (["running", "running"], [], 0, None, None, None),
        (["succeeded", "running"], [], 0, None, None, None),
        (["succeeded", "succeeded"], [], 0, "finished", None, None),
        (["succeeded", "succeeded"], ["a"], 0, "finished", None, None),
        (["failed", "running"], [], 0, "stopping", True, True),
        (["failed", "failed"], [], 2, "stopping", True, True),
        (["failed", "running"], [], 3, "stopping", False, True),
        (["succeeded", "failed"], [], 3, "stopping", False, True),
        (["running", "running"], ["b"], 0, "stopping", True, True),
        (["running", "running"], ["b"], 3, "stopping", False, True),
        (["running", "left"], [], 0, "stopping", True, True),
        (["running", "stopped"], [], 0, "stopping", True, True),
    ],
)
def test_running(
    states: list[Any],
    silent: list[str],
    restarts: int,
    phase: str | None,
    restart: bool | None,
    counts: bool | None,
) -> None:
    terms = job(nodes="2:2")
    plan, members = started(terms, [member("a", 1), member("b", 2)])
    plan = replace(plan, restart_count=restarts)
    members = [
        replace(m, state=s, failures=(FAIL,) if s == "failed" else ())
        for m, s in zip(members, states, strict=True)
    ]
    after = call(terms, members, plan, frozenset(silent)).plan
    assert (after.phase if after else None) == phase
    if after is not None and phase == "stopping":
        assert (after.restart, after.counts) == (restart, counts)
    if after is not None and phase == "finished":
        assert after.success


def test_next_round_waits_until_everybody_has_stopped() -> None:
    terms = job(nodes="2:2")
    plan, members = started(terms, [member("a", 1), member("b", 2)])
    failed = [replace(members[0], state="failed", failures=(FAIL,)), members[1]]
    stopping = new_plan(call(terms, failed, plan))
    half = [replace(failed[0], state="stopped"), members[1]]
    waiting = call(terms, half, stopping)
    assert waiting.plan is None
    assert "b" in waiting.waiting
    both = [replace(m, state="stopped") for m in half]
    decision = call(terms, both, stopping)
    again = new_plan(decision)
    assert decision.clear_worker_keys
    assert (again.phase, again.round, again.restart_count) == ("forming", 1, 1)
    # The dead are not waited for.
    assert new_plan(call(terms, half, stopping, frozenset("b"))).phase == "forming"


def test_restart_with_all_nodes_back_needs_no_last_call() -> None:
    terms = job(nodes="1:4")
    forming = Plan(serial=3, round=1, restart_count=1, expected=("a", "b"))
    back = [member("a", 1), member("b", 2)]
    assert new_plan(call(terms, back, forming, clock=Clock(enough=0))).phase == "running"
    assert call(terms, back[:1], forming, clock=Clock(enough=0)).plan is None


def test_verdict_has_the_failures_of_all_nodes() -> None:
    terms = job(nodes="2:2", max_restarts=0)
    plan, members = started(terms, [member("a", 1), member("b", 2)])
    first = replace(members[0], state="failed", failures=({**FAIL, "rank": 1, "timestamp": 5},))
    stopping = new_plan(call(terms, [first, members[1]], plan))
    stopped = [
        replace(first, state="stopped"),
        replace(members[1], state="stopped", failures=({**FAIL, "rank": 2, "timestamp": 4},)),
    ]
    verdict = new_plan(call(terms, stopped, stopping))
    assert (verdict.phase, verdict.success) == ("finished", False)
    assert [f["rank"] for f in verdict.failures] == [2, 1]


@pytest.mark.parametrize(
    ("failures", "world", "futile"),
    [
        ([{}, {"rank": 1}], 2, True),
        ([{}], 1, True),
        ([{}], 2, False),  # the other rank did not fail
        ([{}, {}], 2, False),  # one rank reported twice
        ([{}, {"rank": 1, "error_digest": "other"}], 2, False),
        ([{}, {"rank": 1, "formed_group": True}], 2, False),
        ([{"error_digest": ""}, {"rank": 1, "error_digest": ""}], 2, False),
        ([{"exitcode": -9}, {"rank": 1, "exitcode": -9}], 2, False),  # killed: not the script
        ([{}, {"rank": 1, "exitcode": 2}], 2, True),
    ],
)
def test_when_a_restart_is_futile(failures: list[dict[str, Any]], world: int, futile: bool) -> None:
    base = {"rank": 0, "exitcode": 1, "formed_group": False, "error_digest": "d"}
    assert is_futile([{**base, **f} for f in failures], world) == futile


def test_merged_failures_keep_the_first_report_of_a_rank() -> None:
    merged = merge_failures(
        [{"rank": 1, "timestamp": 2, "pid": 1}],
        [{"rank": 1, "timestamp": 9, "pid": 1}, {"rank": 0, "timestamp": 1}],
    )
    assert [(f["rank"], f["timestamp"]) for f in merged] == [(0, 1), (1, 2)]


def test_heartbeats_look_at_changes_by_their_own_clock() -> None:
    beats = Heartbeats(timeout_s=1.0)
    for look in (100.0, 100.5, 101.0):
        assert beats.observe({"a": b"%d" % look, "b": None}, look) == frozenset()
    assert beats.observe({"a": b"2", "b": None}, 101.5) == {"b"}
    assert beats.observe({"a": b"2", "b": b"1"}, 102.0) == frozenset()
    assert beats.observe({"a": b"2", "b": b"1"}, 102.4) == frozenset()
    assert beats.observe({"a": b"2", "b": b"2"}, 102.6) == {"a"}
    assert beats.observe({"a": b"1", "b": b"2"}, 102.7) == frozenset()


def test_while_the_observer_does_not_look_nobody_is_silent() -> None:
    """The store was away for minutes: whoever beats again after it has lost nothing."""
    beats = Heartbeats(timeout_s=1.0)
    beats.observe({"a": b"1", "b": b"1"}, 100.0)
    beats.observe({"a": b"1", "b": b"1"}, 100.4)
    assert beats.observe({"a": b"1", "b": b"1"}, 400.0) == frozenset()
    assert beats.observe({"a": b"2", "b": b"1"}, 400.1) == frozenset()
    assert beats.observe({"a": b"2", "b": b"1"}, 400.2) == {"b"}


# --- random histories ---------------------------------------------------------------------------


class World:
    """Nodes that follow the plan, in any order, with deaths, returns, late and repeated reports.

    ``running`` is the truth about each node's workers: the round they belong to.
    """

    def __init__(self, terms: Job) -> None:
        self.job = terms
        self.plan = Plan()
        self.members: dict[str, Member] = {}
        self.running: dict[str, int | None] = {}
        self.stop_sent: dict[str, int] = {}
        self.stopping: dict[str, int] = {}
        self.dead: set[str] = set()
        self.cut: set[str] = set()  # silent, with workers that go on
        self.over: set[str] = set()
        self.recovering = False  # in place, in the round that runs
        self.called = True  # a last call for growth is over, and a lost node waited for
        self.forming_for = 0.0

    def alive(self, name: str) -> bool:
        return name in self.members and not {name} & (self.dead | self.over)

    def join(self, name: str, node_rank: int) -> None:
        if name not in self.members:
            self.members[name] = member(
                name, len(self.members) + 1, host=not self.members, node_rank=node_rank
            )
            self.running[name] = None
            self.stop_sent[name] = -1

    def kill(self, name: str) -> None:
        if self.alive(name):
            self.dead.add(name)
            self.running[name] = None

    def write(self, name: str, **fields: Any) -> None:
        self.members[name] = replace(self.members[name], **fields)

    def report(self, name: str, state: str, round_: int, **fields: Any) -> None:
        """With the guards of ``Coordinator._report``."""
        me = self.members[name]
        if round_ < me.round or (
            state != "stopped" and me.round == round_ and me.state in ("stopped", "failed")
        ):
            return
        self.write(name, state=state, round=round_, **fields)

    def end(self, name: str, well: bool) -> None:
        if self.alive(name) and self.running[name] is not None:
            round_ = self.running[name]
            assert round_ is not None
            if well:
                self.running[name] = None
                self.report(name, "succeeded", round_)
            else:
                self.report(name, "failed", round_, failures=(FAIL,))

    def stopped(self, name: str) -> None:
        if self.alive(name) and name in self.stopping:
            round_ = self.stopping.pop(name)
            if self.running[name] == round_:
                self.running[name] = None
            self.report(name, "stopped", round_)

    def repeat(self, name: str) -> None:
        """A late duplicate of the report before."""
        if self.alive(name) and self.members[name].round >= 0:
            self.report(name, "failed", self.members[name].round - 1, failures=(FAIL,))
            if self.members[name].state == "stopped":
                self.report(name, "failed", self.members[name].round, failures=(FAIL,))

    def follow(self, name: str) -> None:
        if not self.alive(name) or name in self.cut:
            return
        todo = react(self.plan, self.members[name], self.stop_sent[name])
        if todo.kind == "start":
            assert self.running[name] is None
            self.running[name] = self.plan.round
            self.write(name, state="running", round=self.plan.round, failures=())
        elif todo.kind == "stop":
            self.stop_sent[name] = self.stopping[name] = todo.round
        elif todo.kind == "acknowledge":
            self.write(name, state="stopped", round=self.plan.round, failures=())
        elif todo.kind == "rejoin":
            self.write(name, state="waiting", failures=())
        elif todo.kind in ("finish", "refused"):
            self.over.add(name)
            self.running[name] = None

    def decide(self, forming: float = 0.0) -> None:
        silent = frozenset(self.dead | self.cut | self.over)
        waited = 1e9 if self.called else 0.0
        clock = Clock(forming=forming, enough=1e9, joined=waited, lost=waited)
        members = list(self.members.values())
        table = self.plan.table
        quiet = "" if table is None or self.recovering else f"{table.round}.{table.joins}"
        after = decide(self.job, members, self.plan, silent, clock, "h", 1, quiet=quiet).plan
        if after is None:
            return
        if after.growth:
            self.check_growth(after, silent)
        assert after.serial > self.plan.serial
        assert after.restart_count <= self.job.max_restarts
        assert self.plan.round <= after.round <= self.plan.round + 1
        if after.phase == "running" and self.plan.phase != "running":
            heard = {n for n in self.members if n not in silent}
            assert all(self.running[n] is None for n in heard), "two rounds live at once"
            assert after.table is not None
            assert {n.node for n in after.table.nodes} <= heard
            assert self.job.min_nodes <= len(after.table.nodes) <= self.job.max_nodes
        if after.phase == self.plan.phase == "running":
            assert table is not None and after.table is not None
            assert [p.ranks for p in after.table.nodes] == [p.ranks for p in table.nodes]
            for place in after.table.nodes:
                assert table.of(place.node) in (None, place), "a survivor has moved"
        if after.phase == "forming" and self.plan.phase == "stopping":
            assert self.plan.table is not None
            seats = {n.node for n in self.plan.table.nodes} - silent
            assert all(self.running[n] is None for n in seats), "keys cleared under workers"
        assert self.plan.phase != "finished", "a verdict is final"
        self.plan = after

    def check_growth(self, after: Plan, silent: frozenset[str]) -> None:
        if self.plan.phase != "running":
            assert after.phase != "running", "said, and not done"
            return
        table = self.plan.table
        assert table is not None and self.job.grow == "restart" and not self.recovering
        assert (after.phase, after.restart, after.counts) == ("stopping", True, False)
        more = [self.members[n] for n in after.expected]
        assert more and all(m.state == "waiting" and m.node not in silent for m in more)
        size = len(table.nodes) + len(more)
        assert size == self.job.max_nodes or (self.called and size < self.job.max_nodes)

    def settle(self) -> int:
        """Everybody does promptly what is asked, workers end well; rounds until all is over."""
        self.dead |= self.cut & {n for n in self.cut if self.running[n] is None}
        self.cut.clear()
        self.recovering, self.called = False, True
        for step in range(200):
            if self.plan.phase == "finished" and all(not self.alive(n) for n in self.members):
                return step
            for name in self.members:
                self.follow(name)
                self.stopped(name)
                self.end(name, well=True)
            self.decide(forming=1e9 if step > 20 else 0.0)
        raise AssertionError(f"does not end: {self.plan} {self.members}")


NAMES = ["n0", "n1", "n2", "n3", "n4"]


def steps_of(world: World) -> list[tuple[str, str]]:
    """What can happen next and would change something, likely things more than once."""
    steps: list[tuple[str, str]] = [("decide", "")] * 3 if world.plan.phase != "finished" else []
    if world.job.grow == "restart" or world.job.recovery == "in-place":
        steps += [("call", "")] + [("recover", "")] * (world.job.recovery == "in-place")
    for name in NAMES:
        if name not in world.members:
            steps.append(("join", name))
        if not world.alive(name):
            continue
        steps.append(("kill", name))
        steps.append(("heal" if name in world.cut else "cut", name))
        if react(world.plan, world.members[name], world.stop_sent[name]).kind != "none":
            steps += [("follow", name)] * 4
        if name in world.stopping:
            steps += [("stopped", name)] * 4
        if world.running[name] is not None:
            steps += [("fail", name), ("succeed", name)]
        if world.members[name].round >= 0:
            steps.append(("repeat", name))
    return steps


def take(world: World, step: str, name: str) -> None:
    if step == "join":
        world.join(name, NAMES.index(name) % world.job.max_nodes)
    elif step == "cut":
        world.cut.add(name)
    elif step == "heal":
        world.cut.discard(name)
    elif step in ("fail", "succeed"):
        world.end(name, well=step == "succeed")
    elif step == "recover":
        world.recovering = not world.recovering
    elif step == "call":
        world.called = not world.called
    elif step == "decide":
        world.decide()
    else:
        getattr(world, step)(name)


@given(
    policy=st.sampled_from(["static", "elastic"]),
    nodes=st.sampled_from(["1:1", "1:2", "2:3", "3:3"]),
    restarts=st.integers(0, 3),
    grow=st.sampled_from(["spare", "restart"]),
    recovery=st.sampled_from(["restart", "in-place"]),
    choices=st.lists(st.integers(0, 1000), max_size=150),
)
@settings(max_examples=500, deadline=None)
def test_any_history_has_one_round_at_a_time_and_an_end(
    policy: str, nodes: str, restarts: int, grow: str, recovery: str, choices: list[int]
) -> None:
    if policy == "static":
        nodes = nodes[-1] + ":" + nodes[-1]
    world = World(job(policy, nodes, max_restarts=restarts, grow=grow, recovery=recovery))
    for choice in choices:
        steps = steps_of(world)
        if steps:
            take(world, *steps[choice % len(steps)])
    world.settle()


def test_long_histories() -> None:
    """As above, from seeds: longer than hypothesis makes them, and some do get far."""
    furthest = 0
    for seed in range(400):
        rng = random.Random(seed)
        policy = rng.choice(["static", "elastic"])
        nodes = "2:2" if policy == "static" else rng.choice(["1:2", "2:3", "1:4"])
        grow = rng.choice(["spare", "restart"])
        recovery = rng.choice(["restart", "in-place"])
        world = World(job(policy, nodes, max_restarts=6, grow=grow, recovery=recovery))
        for _ in range(200):
            steps = steps_of(world)
            if steps:
                # Deaths, cuts and repeats are rare, otherwise nothing is left after a few steps.
                step, name = rng.choice(steps)
                if step not in ("kill", "cut", "repeat", "fail") or rng.random() < 0.2:
                    take(world, step, name)
        furthest = max(furthest, world.plan.round)
        world.settle()
    assert furthest >= 5


# --- a lost node's place ------------------------------------------------------------------------


def lost_one(spares: int, **changes: Any) -> tuple[Job, list[Member], Plan]:
    """Two nodes run, and perhaps some wait; the second one is going to be lost."""
    terms = job(nodes="2:2", **{"recovery": "in-place", **changes})
    plan, running = started(terms, [member("a", 1, host=True), member("b", 2)])
    return terms, running + [member(f"s{i}", 3 + i, alive=7) for i in range(spares)], plan


def test_a_spare_takes_a_lost_nodes_place_in_the_same_round() -> None:
    terms, members, plan = lost_one(1)
    replaced = new_plan(call(terms, members, plan, frozenset({"b"})))
    assert (replaced.phase, replaced.round, replaced.restart_count) == ("running", plan.round, 0)
    table = replaced.table
    assert table is not None and plan.table is not None and table.joins == 1
    place = table.of("s0")
    assert place is not None and table.of("b") is None
    assert (list(place.ranks), place.group_rank, place.alive) == ([2, 3], 1, 7)
    assert place.instead == ("b",) and table.of("a") == plan.table.of("a")
    assert RankTable.from_json(table.to_json()) == table
    assert react(replaced, members[2], -1).kind == "start"
    assert react(replaced, members[0], -1).kind == "none"
    assert react(replaced, members[1], -1).kind == "stop", "should it be alive after all"
    back = replace(members[1], state="stopped")
    assert react(replaced, back, plan.round).kind == "rejoin", "and is a spare from then on"
    again = new_plan(call(terms, [*members[:1], *members[2:], member("t", 9)], replaced,
                          frozenset({"s0"})))  # fmt: skip
    assert again.table is not None
    place = again.table.of("t")
    assert place is not None and place.instead == ("s0", "b")


def test_a_node_that_came_back_takes_a_place_again_in_the_same_round() -> None:
    """It was frozen, its place was taken, and it is the spare when the next one is lost."""
    terms, members, plan = lost_one(1)
    replaced = new_plan(call(terms, members, plan, frozenset({"b"})))
    back = replace(members[1], state="waiting", round=plan.round)
    spare = replace(members[2], state="running", round=plan.round)
    again = new_plan(call(terms, [members[0], back, spare], replaced, frozenset({"s0"})))
    assert again.table is not None and again.table.of("b") is not None
    assert react(again, back, plan.round).kind == "start"
    assert react(again, replace(back, state="running"), plan.round).kind == "none"
    stopping = replace(again, phase="stopping", restart=True)
    assert react(stopping, back, plan.round).kind == "acknowledge", "it has not started yet"
    assert call(terms, [members[0], back, spare], stopping, frozenset({"s0"})).plan is None


def test_a_spare_is_waited_for_and_then_all_are_restarted() -> None:
    terms, members, plan = lost_one(0)
    waiting = call(terms, members, plan, frozenset({"b"}), Clock(lost=29.0))
    assert waiting.plan is None and waiting.spare and "1 spare node" in waiting.waiting
    stopping = new_plan(call(terms, members, plan, frozenset({"b"}), Clock(lost=30.0)))
    assert stopping.phase == "stopping" and "no spare came within 30 s" in stopping.reason
    at_once = new_plan(call(terms, members, plan, frozenset({"b"}), Clock(spare_timeout=0.0)))
    assert at_once.phase == "stopping"


@pytest.mark.parametrize(
    ("changes", "spare"),
    [
        ({"recovery": "restart"}, {}),
        ({}, {"slots": 1}),
        ({}, {"role": "other"}),
    ],
)
def test_who_cannot_take_a_place(changes: dict[str, Any], spare: dict[str, Any]) -> None:
    terms, members, plan = lost_one(1, **changes)
    members[2] = replace(members[2], **spare)
    clock = Clock(lost=60.0)
    assert new_plan(call(terms, members, plan, frozenset({"b"}), clock)).phase == "stopping"


def with_etcd(nodes: int, **changes: Any) -> tuple[Job, list[Member], Plan]:
    """Nodes a, b, …, each with a store for the workers, and two spares."""
    terms = job(nodes=f"{nodes}:{nodes}", backend="flash-etcd", recovery="in-place", **changes)
    names = "abcdefg"[:nodes]
    members = [member(name, i, port=50 + i) for i, name in enumerate(names)]
    # Agents that meet in etcd have no port that is theirs all.
    plan = new_plan(decide(terms, members, Plan(), frozenset(), Clock(enough=1e9), "", 0))
    running = [replace(m, state="running", round=plan.round) for m in members]
    return terms, running + [member(f"s{i}", 9 + i, port=59 + i) for i in range(2)], plan


def stores(table: RankTable) -> list[tuple[str, int, int]]:
    """The homes of the default store's keys."""
    return [(place.node, place.store, place.joined) for place in table.nodes]


def test_with_etcd_a_spare_serves_what_of_the_default_store_was_at_the_lost_node() -> None:
    terms, members, plan = with_etcd(3)
    assert plan.table is not None
    assert plan.table.spread and stores(plan.table) == [("a", 50, 0), ("b", 51, 0), ("c", 52, 0)]
    other = new_plan(call(terms, members, plan, frozenset({"b"}))).table
    assert other is not None and stores(other) == [("a", 50, 0), ("s0", 59, 1), ("c", 52, 0)]
    moved = new_plan(call(terms, members, plan, frozenset({"a"})))
    table = moved.table
    assert table is not None and stores(table) == [("s0", 59, 1), ("b", 51, 0), ("c", 52, 0)]
    assert (table.master_addr, table.master_port) == ("a", 50), "what scripts have read"
    assert RankTable.from_json(table.to_json()) == table
    taken = replace(members[3], state="running", round=plan.round)
    left = [*members[1:3], taken, members[4]]
    again = new_plan(call(terms, left, moved, frozenset({"b"}))).table
    assert again is not None and stores(again) == [("s0", 59, 1), ("s1", 60, 2), ("c", 52, 0)]
    two = new_plan(call(terms, members, plan, frozenset({"a", "b"}))).table
    assert two is not None and stores(two) == [("s0", 59, 1), ("s1", 60, 2), ("c", 52, 0)]


def test_with_etcd_and_a_default_store_that_rank_0_itself_serves() -> None:
    terms, members, plan = with_etcd(2, use_agent_store=False)
    assert plan.table is not None and not plan.table.spread
    stopping = new_plan(call(terms, members, plan, frozenset({"a"})))
    assert stopping.phase == "stopping" and "MASTER_ADDR" in stopping.reason
    assert new_plan(call(terms, members, plan, frozenset({"b"}))).phase == "running"


def test_all_lost_or_too_few_spares() -> None:
    terms, members, plan = lost_one(1)
    both = frozenset({"a", "b"})
    assert call(terms, members, plan, both, Clock(lost=1.0)).spare
    assert new_plan(call(terms, members, plan, both, Clock(lost=31.0))).phase == "stopping"
