"""The recovery machine alone: a table of decisions, and an exploration with simulated workers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from flashrun.control.commands import (
    Command,
    Done,
    Fail,
    Kill,
    Log,
    RestartAll,
    ScriptFailure,
    Send,
    Spawn,
)
from flashrun.control.recovery import CLEAN, FAULT, SCRIPT, Limits, RecoveryMachine


@dataclass
class Worker:
    """A simulated worker: follows the protocol of `flashrun.worker.runtime`, one action at a
    time."""

    rank: int
    incarnation: int
    boundary: int
    generation: int
    state: bool
    pending: int = 0
    target: int | None = None
    lagging: bool = False
    told: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    said: set[tuple[str, int]] = field(default_factory=set)
    greeted: bool = False
    content: str = ""  # hash of its state, where it is not as it should be


class World:
    """Workers, a machine, and messages under way in either direction."""

    def __init__(self, boundaries: list[int], limits: Limits) -> None:
        self.machine = RecoveryMachine(len(boundaries), limits)
        self.machine.proved = True
        self.workers = {r: Worker(r, 0, b, 0, True) for r, b in enumerate(boundaries)}
        self.wire: dict[int, list[dict[str, Any]]] = {r: [] for r in self.workers}
        self.now = 0.0
        self.end: Command | None = None
        self.lines: list[str] = []
        for rank in self.workers:
            self.say(rank, self.hello(self.workers[rank]))

    @staticmethod
    def hello(w: Worker) -> dict[str, Any]:
        w.greeted = True
        return {"op": "hello", "port": 1000 + w.rank, "generation": w.generation}

    def say(self, rank: int, message: dict[str, Any]) -> None:
        w = self.workers[rank]
        text = json.loads(json.dumps(message))
        self.obey(self.machine.message(rank, w.incarnation, text, self.now))

    def obey(self, commands: list[Command]) -> None:
        # a machine that is carried over the agent's death at every point goes on the same
        self.machine = RecoveryMachine.load(json.loads(json.dumps(self.machine.dump())))
        self.carry_out(commands)

    def carry_out(self, commands: list[Command]) -> None:
        for c in commands:
            match c:
                case Send(rank, message):
                    self.wire[rank].append(json.loads(json.dumps(message)))
                case Spawn(rank, incarnation, generation):
                    self.wire[rank] = []
                    self.workers[rank] = Worker(
                        rank, incarnation, 0, generation - 1, False, pending=generation
                    )
                case Kill(rank, incarnation):
                    assert self.workers[rank].incarnation == incarnation
                case RestartAll() | ScriptFailure() | Fail() | Done():
                    self.end = c
                case Log(line, _):
                    self.lines += [line] if line else []

    def kill(self, rank: int) -> None:
        w = self.workers[rank]
        self.obey(self.machine.exited(rank, w.incarnation, FAULT, "SIGKILL", self.now))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.obey(self.machine.tick(self.now))

    def deliver(self, rank: int) -> bool:
        if not self.wire[rank]:
            return False
        w = self.workers[rank]
        message = self.wire[rank].pop(0)
        generation = message.get("generation", 0)
        if message["op"] == "abort":
            w.pending = max(w.pending, generation)
        else:
            w.told[message["op"], generation] = message
            if message["op"] == "plan" and not w.state and not w.lagging:
                w.pending = max(w.pending, generation)
                w.target = message["target"]
        return True

    def act(self, rank: int) -> bool:
        """One step of what the worker does; False: nothing to do."""
        w = self.workers[rank]
        if not w.greeted:
            self.say(rank, self.hello(w))
            return True
        g = w.pending
        if g == w.generation:
            return False
        if not w.state and not w.lagging:  # catching up
            if w.target is None:
                return False
            if w.boundary < w.target:
                w.boundary += 1
                return True
            assert w.boundary == w.target or ("held", g) in w.said
        if w.lagging:
            w.lagging = False
            w.boundary += 1
            w.target = w.boundary
            return True
        if ("held", g) not in w.said:
            w.said.add(("held", g))
            groups = {"0": {"ranks": sorted(self.workers), "base": w.boundary, "issued": 0,
                            "done": w.boundary, "serves": [], "lost": -1}}  # fmt: skip
            self.say(rank, {
                "op": "held", "generation": g, "boundary": w.boundary, "state": w.state,
                "finished": False, "groups": groups,
                "taken": [] if w.state else [n for n in self.machine.plan["own"] if n != "w"],
                "kept": ["w", "x"],
                "check": {"groups": {"0": w.boundary}, "site": "x", "buckets": [], "state": "y"},
            })  # fmt: skip
            return True
        plan = w.told.get(("plan", g))
        if plan is None:
            return False
        if w.state and w.boundary < plan["target"]:
            w.lagging, w.state = True, False
            w.said.discard(("held", g))
            return True
        if w.state and plan["compare"] and ("digest", g) not in w.said:
            w.said.add(("digest", g))
            tensors = {"a": w.content or f"as at {w.boundary}"}
            self.say(rank, {"op": "digest", "generation": g, "tensors": tensors})
            return True
        rebuild = w.told.get(("rebuild", g))
        if rebuild is None:
            return False
        if ("built", g) not in w.said:
            w.said.add(("built", g))
            if not w.state:
                donors = rebuild["donors"]
                assert donors, "state from nobody"
                assert all(self.workers[int(d)].boundary == w.boundary for d in donors)
            w.state = True
            self.say(rank, {"op": "built", "generation": g})
            return True
        if ("go", g) in w.told:
            w.generation = g
            self.say(rank, {"op": "live", "generation": g})
            return True
        return False

    def settle(self, order: list[int]) -> None:
        """Let everything happen that can happen."""
        for at in range(10_000):
            if self.end is not None:
                return
            ranks = sorted(self.workers)
            shift = order[at % len(order)] if order else 0
            ranks = ranks[shift % len(ranks) :] + ranks[: shift % len(ranks)]
            if not any(self.deliver(r) or self.act(r) for r in ranks):
                return
        raise AssertionError("it goes on for ever")

    def live(self) -> bool:
        return self.machine.phase == "live" and all(
            w.generation == self.machine.generation and w.state for w in self.workers.values()
        )


def test_one_rank_is_replaced() -> None:
    world = World([5, 5, 5], Limits())
    world.kill(1)
    world.settle([])
    assert world.live()
    assert [w.incarnation for w in world.workers.values()] == [0, 1, 0]
    assert {w.boundary for w in world.workers.values()} == {5}


def test_what_is_said_of_a_recovery() -> None:
    """With a line of each agent's for each end (not here): three to six for one or two ranks."""
    world = World([5] * 6, Limits())
    world.kill(1)
    world.kill(4)
    world.settle([])
    assert world.lines == [
        "recovery: rank 1 lost (SIGKILL); replacing it in place",
        "recovery: rank 4 lost (SIGKILL); replacing it in place",
        "recovery: generation 2, lost: 1 (SIGKILL), 4 (SIGKILL), boundary 5",
        "recovery: done in 0 ms (hold 0 ms, catch-up 0 ms, rebuild and state 0 ms), no step lost",
    ]
    world.lines.clear()
    world.obey(world.machine.lost({2: "its node", 3: "its node", 4: "its agent"}, world.now))
    world.settle([])
    assert world.live() and len(world.lines) == 3
    assert world.lines[0] == (
        "recovery: ranks 2, 3 lost (its node); rank 4 lost (its agent); replacing them in place"
    )


def test_a_laggard_comes_to_the_target() -> None:
    world = World([5, 4, 5], Limits())
    world.kill(2)
    world.settle([])
    assert world.live()
    assert {w.boundary for w in world.workers.values()} == {5}


def test_two_boundaries_apart_is_not_one_job() -> None:
    world = World([5, 3, 5], Limits())
    world.kill(2)
    world.settle([])
    assert isinstance(world.end, RestartAll) and "more than one apart" in world.end.reason


def test_unproved_replicas_are_not_trusted() -> None:
    world = World([1, 1], Limits())
    world.machine.proved = False
    world.kill(0)
    world.settle([])
    assert isinstance(world.end, RestartAll) and "proved" in world.end.reason


def test_before_the_first_step_nothing_needs_proof() -> None:
    world = World([0, 0], Limits())
    world.machine.proved = False
    world.kill(0)
    world.settle([])
    assert world.live()


def test_retries_end() -> None:
    world = World([5, 5], Limits(max_retries=3))
    for _ in range(3):
        world.kill(1)
    assert world.end is None
    world.kill(1)
    assert isinstance(world.end, Fail)


def test_progress_gives_new_retries() -> None:
    world = World([5, 5], Limits(max_retries=2))
    for _ in range(6):
        world.kill(1)
        world.settle([])
        assert world.live()
        for w in world.workers.values():
            w.boundary += 1
    assert world.end is None


def test_without_progress_there_is_an_end() -> None:
    world = World([5, 5], Limits(max_retries=2))
    for _ in range(10):
        world.kill(1)
        world.settle([])
        if world.end is not None:
            break
    assert isinstance(world.end, Fail)


def test_a_script_error_is_the_scripts() -> None:
    machine = RecoveryMachine(2)
    assert machine.exited(1, 0, SCRIPT, "exit 1", 0.0) == [ScriptFailure(1)]


def test_all_ended() -> None:
    machine = RecoveryMachine(2)
    assert machine.message(0, 0, {"op": "finished", "boundary": 3}, 0.0) == []
    commands = machine.message(1, 0, {"op": "finished", "boundary": 3}, 0.0)
    assert commands == [Send(0, {"op": "exit"}), Send(1, {"op": "exit"})]
    assert machine.exited(0, 0, CLEAN, "", 0.0) == []
    assert machine.exited(1, 0, CLEAN, "", 0.0) == [Done()]


def test_who_ends_without_a_word_is_not_waited_for() -> None:
    """A script that ends its process by itself, with status 0 (os._exit)."""
    machine = RecoveryMachine(2)
    assert machine.message(0, 0, {"op": "finished", "boundary": 3}, 0.0) == []
    assert machine.exited(1, 0, CLEAN, "", 0.0) == [Send(0, {"op": "exit"})]
    assert machine.exited(0, 0, CLEAN, "", 0.0) == [Done()]


def test_a_flap_does_not_wait_for_who_has_ended() -> None:
    machine = RecoveryMachine(2)
    assert machine.exited(1, 0, CLEAN, "", 0.0) == []
    machine.message(0, 0, {"op": "suspect", "generation": 0, "error": "reset"}, 0.0)
    (_, restart) = machine.tick(1.0)
    assert isinstance(restart, RestartAll)
    assert restart.reason.startswith("rank(s) [1] have ended and can't take part (a collective")


def test_suspicion_waits_for_the_exit_that_explains_it() -> None:
    world = World([5, 5], Limits(grace=0.5))
    world.say(0, {"op": "suspect", "generation": 0, "error": "reset"})
    assert world.machine.phase == "live" and world.machine.wake_at() == 0.5
    world.kill(1)
    assert world.machine.generation == 1 and world.machine.suspected is None


def test_a_flap_needs_no_replacement() -> None:
    world = World([5, 5], Limits(grace=0.5))
    world.say(0, {"op": "suspect", "generation": 0, "error": "reset"})
    world.now = 0.6
    world.obey(world.machine.tick(world.now))
    world.settle([])
    assert world.live() and [w.incarnation for w in world.workers.values()] == [0, 0]


def test_what_fails_after_the_go_is_tried_again_as_well() -> None:
    world = World([5, 5, 5], Limits())
    world.kill(1)
    world.settle([])
    world.say(2, {"op": "failed", "generation": 1, "error": "OSError: no more files"})
    assert world.machine.phase == "hold" and world.machine.generation == 2
    world.settle([])
    assert world.live() and [w.incarnation for w in world.workers.values()] == [0, 1, 0]


def test_generations_that_fail_alike_have_an_end() -> None:
    """Also when it takes a replacement each time, and whoever says it."""
    world = World([5, 5, 5], Limits(flaps=3))
    world.kill(1)
    for generation in range(1, 10):
        error = f"TimeoutError: waited 10 s for the bootstrap key {generation}/gloo/0/1"
        world.say(generation % 3, {"op": "failed", "generation": generation, "error": error})
        if world.end is not None:
            break
    assert isinstance(world.end, RestartAll) and generation == 4
    assert "4 attempts in a row failed; last: rank 1: TimeoutError: waited" in world.end.reason


def test_survivors_that_differ_are_no_donors() -> None:
    world = World([5, 5, 5], Limits())
    world.workers[2].content = "another"
    world.kill(1)
    world.settle([])
    assert isinstance(world.end, RestartAll)
    assert "a differs between ranks 0, 2 at boundary 5" in world.end.reason


def test_one_survivor_has_nobody_to_be_compared_with() -> None:
    world = World([5, 5], Limits())
    world.workers[0].content = "another"
    world.kill(1)
    world.settle([])
    assert world.live()


def confirms(machine: RecoveryMachine, contents: list[str]) -> list[Command]:
    """What is said once all ranks have shown their state at a boundary after a recovery."""
    commands: list[Command] = []
    machine.proved = True
    for who in machine.ranks:
        who.formed = True
    for rank, content in enumerate(contents):
        assert not commands
        message = {"op": "replicas", "boundary": 6, "tensors": {"a": content}, "bytes": 1,
                   "buffers": [], "confirm": True}  # fmt: skip
        commands = machine.message(rank, 0, message, 0.0)
    return commands


def test_a_replacement_that_is_not_what_its_peers_are() -> None:
    machine = RecoveryMachine(2)
    assert confirms(machine, ["x", "x"]) == [
        Send(r, {"op": "confirmed", "boundary": 6}) for r in range(2)
    ]
    (_, restart) = confirms(machine, ["x", "y"])
    assert isinstance(restart, RestartAll)
    assert restart.reason.startswith("after a recovery a differs between ranks at boundary 6")


def shown(
    machine: RecoveryMachine, boundary: int, own: list[dict[str, str]], confirm: bool = False
) -> list[Command]:
    """Every rank shows what its script keeps in places of its own; what the last word does."""
    commands: list[Command] = []
    for rank, names in enumerate(own):
        machine.ranks[rank].formed = True
        message = {"op": "replicas", "boundary": boundary, "tensors": {"a": "1"}, "bytes": 1,
                   "buffers": [], "own": names, "confirm": confirm}  # fmt: skip
        commands = machine.message(rank, 0, message, 0.0)
    return commands


def test_what_a_survivor_has_left_out_is_not_taken_for_lost() -> None:
    """A variable that got another tensor since its rank looked last (a metric at the end of an
    epoch); the replacement has found it."""
    machine = RecoveryMachine(2)
    shown(machine, 1, [{"x": "1"}, {"x": "1"}])
    machine.plan = {"own": ["x"]}
    assert not any(isinstance(c, RestartAll) for c in shown(machine, 6, [{}, {"x": "7"}], True))
    assert machine.shared == ["x"]
    (_, restart) = shown(machine, 7, [{"x": "8"}, {"x": "7"}], True)
    assert restart == RestartAll("after a recovery x differs between ranks at boundary 7")


def test_what_was_seen_to_differ_is_never_sent() -> None:
    machine = RecoveryMachine(2)
    (word, _, _) = shown(machine, 1, [{"x": "1", "y": "1", "z": "1"}, {"x": "1", "y": "2"}])
    assert word == Send(0, {"op": "own", "asked": ["x", "y", "z"], "shared": ["x"]})
    (word, _) = shown(machine, 2, [{"x": "2", "y": "5"}, {"x": "2", "y": "5"}])
    assert word == Send(0, {"op": "own", "asked": ["x", "y"], "shared": ["x"]})
    world = World([5, 5, 5], Limits())
    world.machine.shared = ["v", "w", "x"]
    world.kill(1)
    world.settle([])
    # "w" is in the dead rank's file, and "v" is what nobody keeps any more.
    assert world.machine.plan["own"] == ["x"] and world.live()


def test_what_was_sent_and_then_differs_restarts() -> None:
    machine = RecoveryMachine(2)
    machine.plan = {"own": ["x"]}
    (_, restart) = shown(machine, 6, [{"x": "1"}, {"x": "2"}], confirm=True)
    assert isinstance(restart, RestartAll)
    assert "after a recovery x differs between ranks at boundary 6" in restart.reason


def test_who_has_ended_is_not_waited_for() -> None:
    machine = RecoveryMachine(3)
    assert confirms(machine, ["x", "x"]) == []
    commands = machine.message(2, 0, {"op": "finished", "boundary": 5}, 0.0)
    assert Send(0, {"op": "confirmed", "boundary": 6}) in commands


def test_no_group_no_recovery() -> None:
    machine = RecoveryMachine(2)
    line = proof(machine, [{"a": "1"}, {"a": "1"}], [], formed=[1])
    assert line.startswith("recovery: restart only: rank(s) [0] have formed no process group")


def proof(
    machine: RecoveryMachine,
    tensors: list[dict[str, str]],
    buffers: list[str],
    formed: list[int] | None = None,
) -> str:
    lines = []
    for rank in range(len(tensors)) if formed is None else formed:
        machine.message(rank, 0, {"op": "formed"}, 0.0)
    for rank, t in enumerate(tensors):
        message = {"op": "replicas", "boundary": 1, "tensors": t, "bytes": 12e8, "buffers": buffers}
        lines += [c.line for c in machine.message(rank, 0, message, 0.0) if isinstance(c, Log)]
    (line,) = lines
    return line


def test_replicas() -> None:
    machine = RecoveryMachine(2)
    line = proof(machine, [{"a": "1"}, {"a": "1"}], [])
    assert line == "recovery: in place, 2 replicas, 1.2 GB each, no step lost"


def test_differing_parameters_restart() -> None:
    machine = RecoveryMachine(2)
    line = proof(machine, [{"a": "1"}, {"a": "2"}], [])
    assert line.startswith("recovery: restart only: a differs between ranks (model not wrapped")
    commands = machine.exited(0, 0, FAULT, "SIGKILL", 1.0)
    assert isinstance(commands[-1], RestartAll)


def test_differing_buffers_are_kept_by_each_rank() -> None:
    machine = RecoveryMachine(2)
    line = proof(machine, [{"b": "1"}, {"b": "2"}], ["b"])
    assert line.endswith("no step lost")
    assert machine.private == ["b"]


def test_buffers_that_may_be_lost_with_a_node_are_told() -> None:
    machine = RecoveryMachine(2, bases=[0, 1])
    line = proof(machine, [{"b": "1", "c": "1"}, {"b": "2", "c": "2"}], ["b", "c"])
    assert "no step lost; but each rank has its own b (and 1 more), so the loss of a node" in line
    assert "SyncBatchNorm, or buffers broadcast" in line
    assert "SyncBatchNorm" not in proof(RecoveryMachine(2, bases=[0, 1]), [{"b": "1"}] * 2, ["b"])


def test_peerless_state_is_named() -> None:
    machine = RecoveryMachine(3)
    same = {"a": "1"}
    line = proof(machine, [{**same, "EMA#0/w": "2"}, same, same], [])
    assert "only one rank has: EMA#0 on rank 0" in line
    assert not any(isinstance(c, RestartAll) for c in machine.exited(1, 0, FAULT, "SIGKILL", 1.0))
    assert isinstance(machine.exited(0, 0, FAULT, "SIGKILL", 1.0)[-1], RestartAll)


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[int], list[tuple[str, int]]]:
    size = draw(st.integers(2, 4))
    base = draw(st.integers(1, 4))
    boundaries = [base + draw(st.integers(0, 1)) for _ in range(size)]
    action = st.sampled_from(["act", "act", "deliver", "deliver", "kill", "fail", "time"])
    steps = draw(st.lists(st.tuples(action, st.integers(0, size - 1)), max_size=60))
    return boundaries, steps


@settings(max_examples=400, deadline=None)
@given(histories(), st.lists(st.integers(0, 3), max_size=5))
def test_any_fault_in_any_phase_ends_well(
    history: tuple[list[int], list[tuple[str, int]]], order: list[int]
) -> None:
    """After any history of faults, either all are live at one boundary or the machine has
    decided."""
    boundaries, steps = history
    live_through(World(boundaries, Limits(max_retries=100, flaps=100)), steps, order)


def live_through(world: World, steps: list[tuple[str, int]], order: list[int]) -> None:
    """A history of faults, and what has to be true after it."""
    world.kill(0)
    for action, rank in steps:
        if world.end is not None:
            break
        if action == "time":
            world.pass_time(0.01)
            continue
        world.now += 0.01
        if action == "act":
            world.act(rank)
        elif action == "deliver":
            world.deliver(rank)
        elif action == "kill":
            world.kill(rank)
        else:
            g = world.workers[rank].pending
            world.say(rank, {"op": "failed", "generation": g, "error": "x", "phase": "y"})
    world.settle(order)
    if world.end is None:
        assert world.live(), (world.machine.phase, world.machine.awaited())
        assert len({w.boundary for w in world.workers.values()}) == 1
    else:
        assert isinstance(world.end, RestartAll)
        assert "no survivor" in world.end.reason or "differ" not in world.end.reason


def test_a_word_to_go_that_was_lost_is_said_again() -> None:
    """The agent ended between the decision and the words: workers connect to the next one."""
    machine = RecoveryMachine(2, Limits())
    machine.generation = 3
    hello = {"op": "hello", "port": 1, "boundary": 4}
    assert machine.message(0, 0, {**hello, "generation": 3}, 0.0) == []
    word = Send(1, {"op": "go", "generation": 3})
    assert machine.message(1, 0, {**hello, "generation": 2}, 0.0) == [word]


def test_a_replacement_that_is_live_says_so_with_the_next_hello() -> None:
    """It had said so, to an agent that had just been killed. (Its next death counted as a
    replacement's, and what it could not do as well.)"""
    world = World([5, 5], Limits())
    world.kill(1)
    world.settle([])
    machine = world.machine
    machine.ranks[1].spawned = True
    hello = {"op": "hello", "port": 1, "boundary": 5, "generation": 0}
    assert machine.message(1, 1, hello, 0.0) == [Send(1, {"op": "go", "generation": 1})]
    assert machine.ranks[1].spawned
    assert machine.message(1, 1, {**hello, "generation": 1}, 0.0) == []
    assert not machine.ranks[1].spawned
