"""The plan in the store, and its rank table apart from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from flashrun.control.plan_book import PlanBook
from flashrun.control.records import Plan
from flashrun.rendezvous.kv import MemoryKeyValue, StoreLost
from flashrun.rendezvous.table import RankTable, Seat, assign_ranks

PREFIX = "flashrun/"


class Counted(MemoryKeyValue):
    """Counts what is read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[str] = []

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        self.read += keys
        return super().get_many(keys)

    def tables(self) -> list[str]:
        return self.list_keys(f"{PREFIX}table/")


def running(round_: int) -> Plan:
    nodes = assign_ranks([Seat("a", 2, "r", "10.0.0.1", shard=7), Seat("b", 2, "r", "10.0.0.2")])
    table = RankTable(round_, 0, 3, "j", 4, "10.0.0.1", 1, True, nodes, token=f"t{round_}")
    return Plan(serial=round_, phase="running", round=round_, table=table)


def test_a_node_reads_a_table_once() -> None:
    kv = Counted()
    controller, node = PlanBook(kv, PREFIX), PlanBook(kv, PREFIX)
    assert controller.read() == node.read() == Plan()
    assert controller.write(running(0), "w0")
    for serial in range(5):
        assert node.read() == replace(running(0), serial=serial)
        assert controller.write(replace(controller.read(), serial=serial + 1), f"w{serial + 1}")
    (table,) = kv.tables()
    assert kv.read.count(table) == 1, "by the node, and not by who has written it"


def test_what_is_over_is_removed() -> None:
    kv = Counted()
    book = PlanBook(kv, PREFIX)
    for round_ in range(3):
        book.read()
        assert book.write(running(round_), f"w{round_}")
        assert book.read() == running(round_)
        assert book.write(Plan(serial=10, phase="forming", round=round_ + 1), f"f{round_}")
        assert book.read().table is None
    assert len(kv.tables()) == 1


def test_who_is_second_has_not_written() -> None:
    kv = Counted()
    first, second = PlanBook(kv, PREFIX), PlanBook(kv, PREFIX)
    first.read()
    second.read()
    assert first.write(running(0), "first")
    assert not second.write(running(1), "second")
    assert second.read() == first.read() == running(0)


def test_a_plan_that_is_replaced_while_it_is_read() -> None:
    class Between(Counted):
        def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
            if keys[0].startswith(f"{PREFIX}table/") and not self.read.count(keys[0]):
                book.read()
                self.read += keys  # (the controller knows it)
                assert book.write(running(1), "w1")
            return super().get_many(keys)

    kv = Between()
    book = PlanBook(kv, PREFIX)
    book.read()
    assert book.write(running(0), "w0")
    assert PlanBook(kv, PREFIX).read() == running(1)


def test_a_table_that_is_gone_is_told() -> None:
    kv = Counted()
    book = PlanBook(kv, PREFIX)
    book.read()
    assert book.write(running(0), "w0")
    kv.delete(kv.tables()[0])
    with pytest.raises(StoreLost, match="lost the rank table"):
        PlanBook(kv, PREFIX).read()
