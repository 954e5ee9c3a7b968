"""Which table a node has: whoever leads, however joins and words about them cross, in the end every
node has the newest, and never an older one after it."""

from __future__ import annotations

import random

import pytest

from flashrun.control import blobs
from flashrun.control import commands as codec
from flashrun.control.commands import Reseat
from flashrun.control.ledger import Ledger
from flashrun.control.recovery import Limits
from flashrun.rendezvous.kv import Put
from flashrun.rendezvous.table import RankTable, Seat
from tests.inplace.test_ledger import KEYS, Memory, table_of


class Node:
    """One that has a place.

    Attributes:
        table: that it has laid for its workers.
        read: the last batch of commands that it needs no more; None: a spare that has not asked.
        here: it has said that it joins, or was there from the beginning.
        told: joins of the plan that it has had commanded.
    """

    def __init__(self, name: str, table: RankTable, here: bool) -> None:
        self.name = name
        self.table = table
        self.read: int | None = 0 if here else None
        self.here = here
        self.told = table.joins


class Seats:
    """Nodes, what is in the store, and who leads. Every action may come at any time."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.store = Memory()
        self.plan = table_of(["n0", "n1", "n2"])
        self.nodes = {n.node: Node(n.node, self.plan, True) for n in self.plan.nodes}
        self.number = 0
        self.lead(self.nodes["n0"])

    def act(self) -> None:
        node = self.nodes[self.draw.choice(sorted(self.nodes))]
        self.draw.choice([self.seat, self.ask, self.join, self.tell, self.lead, self.follow])(node)

    def seat(self, lost: Node) -> None:
        """A spare takes its place in the plan."""
        if self.plan.joins >= 4 or len(self.nodes) < 2:
            return
        name = f"n{3 + self.plan.joins}"
        self.plan = self.plan.with_instead(lost.name, Seat(name, 1, "default", name))
        del self.nodes[lost.name]
        self.nodes[name] = Node(name, self.plan, False)
        if self.leader is lost:
            self.lead(self.nodes[self.draw.choice(sorted(self.nodes))])

    def ask(self, node: Node) -> None:
        """Which commands are not for it (`RecoveryPost._join`)."""
        if node.read is None:
            head = self.store.values.get(KEYS.head)
            node.read = 0 if head is None else int(self.store.value(KEYS.head)["last"])

    def join(self, node: Node) -> None:
        if node.read is not None and not node.here:
            node.here = True
            word = {"table": node.table.to_dict(), "joined": node.name, "unable": ""}
            self.append(node, word)

    def tell(self, node: Node) -> None:
        """Its coordinator has seen the plan."""
        if node.told < self.plan.joins:
            node.told = self.plan.joins
            if self.plan.joins > node.table.joins:
                self.append(node, {"table": self.plan.to_dict()})

    def append(self, node: Node, seen: object) -> None:
        self.number += 1
        value = {"node": node.name, "read": node.read or 0, "seen": [seen]}
        blob = blobs.packed(KEYS.prefix, value)
        self.store.put(Put(KEYS.entry(node.name, "life", self.number), blob.first))

    def lead(self, node: Node) -> None:
        """It does now, with the table that it has."""
        if not node.here:
            return
        self.leader = node
        self.ledger = Ledger(KEYS, node.table, Limits())
        if KEYS.head in self.store.values:
            head = self.store.values[KEYS.head]
            self.ledger.load(head, self.store.value(KEYS.head), 0.0)
        for who in self.ledger.director.machine.ranks:
            who.formed = True
        self.work()

    def work(self) -> None:
        for key in self.store.under(KEYS.inbox):
            self.ledger.take(key, self.store.values[key], self.store.value(key), 0.0)
        if self.ledger.due:
            commit = self.ledger.commit(0.0)
            assert self.store.carry_out(commit)
            self.ledger.committed(commit)

    def follow(self, node: Node) -> None:
        if not node.here or node.read is None:
            return
        for key in sorted(self.store.under(KEYS.out)):
            if KEYS.number_of(key) > node.read:
                node.read = KEYS.number_of(key)
                for command in codec.from_json(self.store.value(key)["commands"]):
                    if isinstance(command, Reseat):
                        table = RankTable.from_dict(command.table)
                        if table.joins > node.table.joins and table.of(node.name) is not None:
                            node.table = table


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_in_the_end_all_have_the_newest_table(first: int) -> None:
    for seed in range(first, first + 100):
        seats = Seats(seed)
        for _ in range(40):
            seats.act()
        for action in (seats.ask, seats.join, seats.tell):
            for node in list(seats.nodes.values()):
                action(node)
        seats.lead(seats.nodes[seats.draw.choice(sorted(seats.nodes))])
        for node in seats.nodes.values():
            seats.follow(node)
        stale = [n.name for n in seats.nodes.values() if n.table != seats.plan]
        assert not stale, f"seed {seed}: {stale}"
