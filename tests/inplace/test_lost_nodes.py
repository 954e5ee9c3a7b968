"""The controller's books where whole nodes are lost: in any phase of a recovery from another loss,
with late words, leaders that die, and spares that take the places and are lost themselves."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import event, given, settings
from hypothesis import strategies as st

from flashrun.control import commands as codec
from flashrun.control.commands import Command, Reseat, RestartAll, Spawn
from flashrun.rendezvous.table import RankTable, Seat
from tests.inplace.test_ledger import KEYS, SharedWorld


class LosingWorld(SharedWorld):
    """Nodes are lost with their workers, without a word.

    Attributes:
        plan: the table with all places that spares have taken.
        lost: nodes.
        dead: ranks that no process has, because their node was lost.
        tables: what each node has; of a spare, once it has its place.
        here: nodes that were there from the beginning, or have said that they have joined.
    """

    def __init__(self, boundaries: list[int], seed: int) -> None:
        self.lost: set[str] = set()
        self.dead: set[int] = set()
        self.here: set[str] = set()
        self.tables: dict[str, RankTable] = {}
        self.told: dict[str, int] = {}
        self.rung: set[str] = set()
        self.leader = "h0"
        self.prompt = True
        super().__init__(boundaries, seed)
        self.plan = self.table
        self.here = set(self.nodes)
        self.tables = dict.fromkeys(self.nodes, self.table)
        self.told = dict.fromkeys(self.nodes, 0)

    def living(self) -> list[str]:
        return sorted(self.here - self.lost)

    def elect(self) -> None:
        if self.here:
            self.leader = self.draw.choice(self.living())
            self.table = self.tables[self.leader]
        self.rung = set()
        super().elect()

    # --- what may happen

    def lose(self, rank: int) -> None:
        node = self.hosts[rank]
        if node in self.lost or len(self.here - self.lost - {node}) == 0:
            return
        self.lost.add(node)
        for mine in [r for r, host in enumerate(self.hosts) if host == node]:
            self.dead.add(mine)
            self.wire[mine] = []
        if self.leader == node:
            self.elect()

    def seat(self) -> bool:
        """A spare is given the place of a lost node."""
        for place in self.plan.nodes:
            if place.node in self.lost:
                name = f"s{self.plan.joins}"
                seat = Seat(name, place.slots, "default", name)
                self.plan = self.plan.with_instead(place.node, seat)
                for rank in place.ranks:
                    self.hosts[rank] = name
                self.nodes.append(name)
                self.tables[name] = self.plan
                self.told[name] = self.plan.joins
                return True
        return False

    def join(self) -> bool:
        """A spare takes the next step into its place (`RecoveryPost._join`)."""
        for name in self.nodes:
            if name in self.lost or name in self.here:
                continue
            if name not in self.read:
                head = self.store.values.get(KEYS.head)
                self.read[name] = 0 if head is None else int(self.store.value(KEYS.head)["last"])
            else:
                self.here.add(name)
                table = self.tables[name].to_dict()
                self.enter(name, {"table": table, "joined": f"life of {name}", "unable": ""})
            return True
        return False

    def tell(self) -> bool:
        """A node has seen the plan."""
        for name in self.living():
            if self.told[name] < self.plan.joins:
                self.told[name] = self.plan.joins
                self.enter(name, {"table": self.plan.to_dict()})
                return True
        return False

    def enter(self, node: str, seen: dict[str, Any]) -> None:
        rank = self.hosts.index(node)
        self.append(rank, seen)

    def kill(self, rank: int) -> None:
        if rank not in self.dead:
            super().kill(rank)

    def fail(self, rank: int) -> None:
        if rank not in self.dead:
            g = self.workers[rank].pending
            self.say(rank, {"op": "failed", "generation": g, "error": "x", "phase": "y"})

    def deliver(self, rank: int) -> bool:
        return rank not in self.dead and super().deliver(rank)

    def act(self, rank: int) -> bool:
        if rank in self.dead:
            return False
        if super().act(rank):
            return True
        w = self.workers[rank]
        word = "suspect", w.generation
        if not self.dead or w.pending != w.generation or word in w.said or not w.state:
            return False
        w.said.add(word)
        self.say(rank, {"op": "suspect", "generation": w.generation, "error": "reset by peer"})
        return True

    # --- the controller, and who obeys

    def lead(self) -> None:
        if not self.prompt and self.draw.random() < 0.3:
            return  # words come late
        super().lead()
        _, missed = self.ledger.missed()
        for place in self.ledger.table.nodes:
            if place.node in self.lost - self.rung and missed.intersection(place.ranks):
                self.rung.add(place.node)
                self.ledger.node_lost(place.node, "refused", self.clock + self.now)
                self.settle_books()
                self.follow()

    def follow(self) -> None:
        for node in self.living():
            mine = [rank for rank, host in enumerate(self.hosts) if host == node]
            if not mine:
                continue
            for key in sorted(self.store.under(KEYS.out)):
                if KEYS.number_of(key) > self.read[node]:
                    assert KEYS.number_of(key) == self.read[node] + 1, "one is missing"
                    self.read[node] = KEYS.number_of(key)
                    items = json.loads(json.dumps(self.store.value(key)["commands"]))
                    for command in codec.from_json(items):
                        if isinstance(command, Reseat):
                            self.take_table(node, RankTable.from_dict(command.table))
                    given = [c for c in codec.from_json(items)
                             if codec.concern(c, range(mine[0], mine[-1] + 1))]  # fmt: skip
                    self.carry_out(given)

    def take_table(self, node: str, table: RankTable) -> None:
        if table.joins > self.tables[node].joins and table.of(node) is not None:
            self.tables[node] = table

    def carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Spawn):
                self.dead.discard(command.rank)
        super().carry_out(commands)

    def settle(self, order: list[int]) -> None:
        """Spares come for all, and nothing more goes wrong."""
        self.prompt = True
        while self.end is None:
            super().settle(order)
            self.lead()
            if not (self.seat() or self.join() or self.tell()):
                return


ACTIONS = ["act", "act", "act", "deliver", "deliver", "deliver", "kill", "fail", "time", "lose",
           "seat", "join", "join", "tell"]  # fmt: skip


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[int], list[tuple[str, int]]]:
    size = draw(st.sampled_from([4, 6]))
    base = draw(st.integers(1, 4))
    boundaries = [base + draw(st.integers(0, 1)) for _ in range(size)]
    steps = st.tuples(st.sampled_from(ACTIONS), st.integers(0, size - 1))
    return boundaries, draw(st.lists(steps, max_size=80))


@settings(max_examples=150, deadline=None)
@given(histories(), st.lists(st.integers(0, 3), max_size=5), st.integers(0, 1 << 30))
def test_any_loss_of_nodes_ends_well(
    history: tuple[list[int], list[tuple[str, int]]], order: list[int], seed: int
) -> None:
    """Either all ranks are live at one boundary, each in a process of a node that is there, or
    nobody is left that has the state."""
    boundaries, steps = history
    world = LosingWorld(boundaries, seed)
    world.prompt = False
    world.lose(0)
    for action, rank in steps:
        if world.end is not None:
            break
        world.now += 0.01
        if action in ("seat", "join", "tell"):
            getattr(world, action)()
        elif action == "time":
            world.pass_time(0.01)
        else:
            getattr(world, action)(rank)
    world.settle(order)
    event(f"{world.plan.joins} places taken, {'in place' if world.end is None else 'restart'}")
    if world.end is not None:
        assert isinstance(world.end, RestartAll)
        assert "no survivor holds the state" in world.end.reason
        return
    assert not world.dead and not world.lost.intersection(world.hosts)
    assert world.live(), (world.machine.phase, world.machine.awaited())
    assert len({w.boundary for w in world.workers.values()}) == 1
    assert {world.tables[node] for node in world.living()} == {world.plan}
