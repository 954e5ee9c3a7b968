"""The controller's books: whoever leads, and wherever a leader is killed, each word of a worker
counts once and each command is given once, in order."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashrun.control import blobs
from flashrun.control import commands as codec
from flashrun.control.commands import (
    Command,
    Done,
    Excuse,
    Fail,
    Kill,
    Log,
    RestartAll,
    ScriptFailure,
    Send,
    Spawn,
)
from flashrun.control.director import Director
from flashrun.control.ledger import Commit, Keys, Ledger
from flashrun.control.recovery import FAULT, Limits, RecoveryMachine
from flashrun.rendezvous.kv import Delete, Put
from flashrun.rendezvous.table import RankTable, Seat, assign_ranks
from tests.inplace.test_machine import World, histories, live_through

KEYS = Keys("recovery/0.x/")
SLOTS = 2


class Memory:
    """What a control store holds, and in which order it came."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def put(self, put: Put) -> None:
        self.values.pop(put.key, None)  # to the end
        self.values[put.key] = put.value

    def carry_out(self, commit: Commit) -> bool:
        for put in commit.first:
            self.put(put)
        if any(self.values.get(key) != value for key, value in commit.expected.items()):
            return False
        for operation in commit.operations:
            if isinstance(operation, Delete):
                del self.values[operation.key]  # what it deletes is there
            else:
                self.put(operation)
        return True

    def under(self, prefix: str) -> list[str]:
        return [key for key in self.values if key.startswith(prefix)]

    def get_many(self, names: list[str]) -> list[bytes | None]:
        return [self.values.get(name) for name in names]

    def value(self, key: str) -> Any:
        return blobs.unpacked(KEYS.prefix, self.values[key], self)  # type: ignore[arg-type]


def table_of(hosts: list[str]) -> RankTable:
    seats = [Seat(host, hosts.count(host), "default", host) for host in dict.fromkeys(hosts)]
    nodes = assign_ranks(seats)
    return RankTable(0, 0, 0, "j", len(hosts), "h0", 1, True, nodes, "0123456789")


class SharedWorld(World):
    """As the world of one agent, but its workers are on nodes, and leaders die."""

    def __init__(self, boundaries: list[int], seed: int, deadly: float = 0.1) -> None:
        self.store = Memory()
        self.draw = random.Random(seed)
        self.deadly = deadly
        limits = Limits(max_retries=1000, flaps=1000)
        self.limits = limits
        self.hosts = [f"h{rank // SLOTS}" for rank in range(len(boundaries))]
        self.table = table_of(self.hosts)
        self.nodes = sorted(set(self.hosts))
        self.read = dict.fromkeys(self.nodes, 0)
        self.number = 0
        self.leaders = 0
        self.elect()
        super().__init__(boundaries, limits)

    @property
    def machine(self) -> RecoveryMachine:
        return self.ledger.director.machine

    @machine.setter
    def machine(self, machine: RecoveryMachine) -> None:
        return

    def elect(self) -> None:
        """The next leader, with a clock of its own."""
        self.leaders += 1
        self.clock = self.draw.uniform(0, 1e6)
        self.ledger = Ledger(KEYS, self.table, self.limits)
        self.machine.proved = True
        for who in self.machine.ranks:
            who.formed = True
        if KEYS.head in self.store.values:
            head = self.store.values[KEYS.head]
            self.ledger.load(head, self.store.value(KEYS.head), self.clock + self.now)
        self.taken: set[str] = set()

    def append(self, rank: int, seen: dict[str, Any]) -> None:
        self.number += 1
        node = self.hosts[rank]
        value = {"node": node, "read": self.read[node], "seen": [seen]}
        blob = blobs.packed(KEYS.prefix, value, self.draw.choice([40, 1 << 20]))
        for part in blob.parts:
            self.store.put(part)
        self.store.put(Put(KEYS.entry(node, "life", self.number), blob.first))
        self.lead()

    def say(self, rank: int, message: dict[str, Any]) -> None:
        incarnation = self.workers[rank].incarnation
        self.append(rank, {"rank": rank, "incarnation": incarnation, "message": message})
        if message["op"] == "hello":
            self.say(rank, {"op": "formed"})

    def kill(self, rank: int) -> None:
        incarnation = self.workers[rank].incarnation
        ended = [FAULT, "SIGKILL"]
        self.append(rank, {"rank": rank, "incarnation": incarnation, "ended": ended})

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.ledger.tick(self.clock + self.now)
        self.settle_books()
        self.follow()

    def lead(self) -> None:
        while news := [key for key in self.store.under(KEYS.inbox) if key not in self.taken]:
            self.taken.add(news[0])
            first = self.store.values[news[0]]
            self.ledger.take(news[0], first, self.store.value(news[0]), self.clock + self.now)
            self.settle_books()
        self.follow()

    def settle_books(self) -> None:
        """What is due becomes durable; but a leader may die before, in between and after."""
        fate = self.draw.random()
        if fate < self.deadly:
            self.elect()
        elif self.ledger.due:
            commit = self.ledger.commit(self.clock + self.now)
            assert self.store.carry_out(commit)
            if fate < 2 * self.deadly:
                self.elect()
            else:
                self.ledger.committed(commit)

    def follow(self) -> None:
        for node in self.nodes:
            mine = [rank for rank, host in enumerate(self.hosts) if host == node]
            ranks = range(mine[0], mine[-1] + 1)
            for key in sorted(self.store.under(KEYS.out)):
                if KEYS.number_of(key) > self.read[node]:
                    assert KEYS.number_of(key) == self.read[node] + 1, "one is missing"
                    self.read[node] = KEYS.number_of(key)
                    items = json.loads(json.dumps(self.store.value(key)["commands"]))
                    given = [c for c in codec.from_json(items) if codec.concern(c, ranks)]
                    self.carry_out(given)

    def deliver(self, rank: int) -> bool:
        self.lead()  # there may be a new leader, which has to look
        return super().deliver(rank)

    def act(self, rank: int) -> bool:
        self.lead()
        return super().act(rank)


@settings(max_examples=300, deadline=None)
@given(histories(), st.lists(st.integers(0, 3), max_size=5), st.integers(0, 1 << 30))
def test_any_fault_ends_well_whoever_leads(
    history: tuple[list[int], list[tuple[str, int]]], order: list[int], seed: int
) -> None:
    boundaries, steps = history
    world = SharedWorld(boundaries, seed)
    live_through(world, steps, order)


def test_nothing_piles_up_in_the_store() -> None:
    world = SharedWorld([5, 5, 5, 5], 3)
    for round_ in range(30):
        world.kill(round_ % 4)
        world.settle([round_])
        assert world.live()
        for w in world.workers.values():
            w.boundary += 1
    assert world.leaders > 30, "leaders do die here"
    assert len(world.store.under(KEYS.out)) < 40
    assert len(world.store.under(KEYS.inbox)) <= 24
    # What dead leaders have left in pieces is the exception.
    assert len(world.store.values) < 120


def test_two_that_believe_to_lead() -> None:
    """The one that comes second has written nothing."""
    world = SharedWorld([5, 5], 0, deadly=0.0)
    old = world.ledger
    world.elect()
    world.kill(1)
    before = dict(world.store.values)
    value = {"node": "h0", "read": 0, "seen": [
        {"rank": 0, "incarnation": 0, "ended": [FAULT, "SIGKILL"]}]}  # fmt: skip
    blob = blobs.packed(KEYS.prefix, value)
    old.take(KEYS.entry("h0", "other", 1), blob.first, value, world.now)
    assert not world.store.carry_out(old.commit(world.now))
    assert world.store.values == before


@pytest.mark.parametrize(
    "command",
    [
        Send(1, {"op": "go", "generation": 2}), Spawn(1, 2, 3), Kill(0, 1), Kill(0, 1, "hung"),
        RestartAll("why"), ScriptFailure(1), Fail(2, "why"), Excuse(0), Done(),
        Log("line", {"event": "x", "n": 1}),
    ],
)  # fmt: skip
def test_a_command_is_the_same_on_the_other_side(command: Command) -> None:
    items = json.loads(json.dumps(codec.to_json([command])))
    assert codec.from_json(items) == [command]


def test_one_message_to_many_is_written_once() -> None:
    sends: list[Command] = [Send(rank, {"op": "go", "generation": 2}) for rank in range(100)]
    (item,) = codec.to_json(sends)
    assert codec.from_json([item]) == sends


@pytest.mark.parametrize(
    ("command", "nodes"),
    [
        (Send(2, {}), [1]), (Spawn(1, 1, 1), [0]), (Kill(3, 0), [1]), (Excuse(0), [0]),
        (Log("line"), [0]), (Log("line", {}, [2]), [0, 1]), (RestartAll("why"), [0, 1]),
        (ScriptFailure(3), [0, 1]), (Fail(3, "why"), [0, 1]), (Done(), [0, 1]),
    ],
)  # fmt: skip
def test_whom_a_command_concerns(command: Command, nodes: list[int]) -> None:
    ranks = [range(2), range(2, 4)]
    assert [n for n in (0, 1) if codec.concern(command, ranks[n])] == nodes


def test_a_value_in_pieces() -> None:
    store = Memory()
    value = {"a": list(range(1000))}
    blob = blobs.packed("p/", value, 100)
    assert len(blob.parts) > 5
    for put in blob.parts:
        store.put(put)
    assert blobs.unpacked("p/", blob.first, store) == value  # type: ignore[arg-type]
    assert blobs.part_keys("p/", blob.first) == [put.key for put in blob.parts]
    del store.values[blob.parts[2].key]
    with pytest.raises(blobs.Gone):
        blobs.unpacked("p/", blob.first, store)  # type: ignore[arg-type]


def test_waits_go_on_by_another_clock() -> None:
    """A leader on another machine: its clock says something else, what is left stays the same."""
    director = Director(["a", "b"], Limits(grace=0.5))
    for rank in range(2):
        director.message(rank, 0, {"op": "formed"}, 1000.0)
    director.message(0, 0, {"op": "suspect", "generation": 0, "error": "reset"}, 1000.0)
    dumped = json.loads(json.dumps(director.dump(1000.2)))
    later = Director.load(dumped, ["a", "b"], 7.0)
    assert later.wake_at() == pytest.approx(7.3)
    assert later.tick(7.2) == []
    assert later.tick(7.31)
    assert later.machine.generation == 1


def test_donors_are_named_with_their_hosts() -> None:
    director = Director(["10.0.0.1", "fe80::1"])
    machine = director.machine
    machine.proved = True
    commands: list[Command] = []
    for rank in range(2):
        director.message(rank, 0, {"op": "formed"}, 0.0)
        director.message(rank, 0, {"op": "hello", "port": 7 + rank, "generation": 0}, 0.0)
    director.message(0, 0, {"op": "suspect", "generation": 0, "error": "reset"}, 0.0)
    director.tick(1.0)
    for rank in range(2):
        held = {"op": "held", "generation": 1, "boundary": 0, "state": True, "finished": False,
                "groups": {}, "check": {"groups": {}, "site": "", "buckets": []}}  # fmt: skip
        commands += director.message(rank, 0, held, 1.0)
    plans = [c.message for c in commands if isinstance(c, Send) and c.message["op"] == "plan"]
    assert plans[0]["donors"] == {"0": "10.0.0.1:7", "1": "[fe80::1]:8"}


def test_a_replacement_is_told_whom_to_ask_on_each_node() -> None:
    director = Director(["a", "a", "b", "b", "c"], bases=[0, 2, 4])
    for rank in range(5):
        director.message(rank, 0, {"op": "formed"}, 0.0)
        hello = {"op": "hello", "port": 10 + rank, "generation": 0}
        assert director.message(rank, 0, hello, 0.0) == []
    director.machine.proved = True

    def told(commands: list[Command]) -> dict[int, dict[str, str]]:
        sends = [c for c in commands if isinstance(c, Send) and c.message["op"] == "others"]
        return {send.rank: send.message["nodes"] for send in sends}

    commands = director.exited(2, 0, FAULT, "SIGKILL", 0.0)
    born = next(i for i, c in enumerate(commands) if isinstance(c, Spawn))
    word = next(i for i, c in enumerate(commands) if isinstance(c, Send) and c.rank == 2)
    assert born < word, "the word is kept for the process that is born"
    assert told(commands) == {2: {"0": "a:10", "3": "b:13", "4": "c:14"}}
    # Of this node nobody is left to be asked, until a replacement is there.
    assert told(director.exited(4, 0, FAULT, "SIGKILL", 0.0)) == {}
    hello = {"op": "hello", "port": 20, "generation": 2}
    found = told(director.message(4, 1, hello, 0.0))
    wanted = {"0": "a:10", "3": "b:13", "4": "c:20"}
    assert found == {2: wanted, 4: wanted}
    assert told(director.message(2, 1, {**hello, "port": 21}, 0.0)) == {}


def test_a_loss_before_all_have_formed_a_group_restarts_all() -> None:
    director = Director(["a", "a"])
    director.message(0, 0, {"op": "formed"}, 0.0)
    (log, restart) = director.exited(0, 0, FAULT, "SIGKILL", 0.0)
    assert isinstance(log, Log) and isinstance(restart, RestartAll)
    assert restart.reason == (
        "rank 0 was lost (SIGKILL) before ranks [1] had formed a process group"
    )
    assert director.exited(1, 0, FAULT, "SIGKILL", 0.0) == []
