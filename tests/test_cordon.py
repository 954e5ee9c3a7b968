"""Nodes that get no ranks: who is kept out, and how it comes to that."""

from __future__ import annotations

import json

import pytest

from flashrun.control.cordon import Cordon, CordonBook, Cordons, kept_out, too_many
from flashrun.control.membership_plan import Clock, decide
from flashrun.control.overview import node_lines, overview_of
from flashrun.control.records import Plan
from flashrun.rendezvous.kv import MemoryKeyValue
from tests.test_membership_plan import job, member

HAND, SELF = Cordon("by hand", by_hand=True), Cordon("3 faults", by_hand=False)


@pytest.mark.parametrize(
    ("policy", "nodes", "cordons", "out"),
    [
        ("elastic", "2:2", {}, ""),
        ("elastic", "2:2", {"b": SELF}, "b"),
        ("elastic", "2:2", {"b": HAND}, "b"),
        ("elastic", "3:3", {"b": SELF}, ""),  # there are too few others
        ("elastic", "3:3", {"b": HAND}, "b"),
        ("elastic", "2:2", {"a": HAND, "b": SELF}, "a"),
        ("static", "3:3", {"b": HAND}, ""),
    ],
)
def test_who_is_kept_out(policy: str, nodes: str, cordons: Cordons, out: str) -> None:
    members = [member(name, i) for i, name in enumerate("abc")]
    assert kept_out(job(policy, nodes), members, cordons) == frozenset(out)


def test_a_spare_takes_the_place_and_the_line_names_who_is_kept_out() -> None:
    members = [member(name, i) for i, name in enumerate("abc")]
    terms, out = job(nodes="2:2"), frozenset("a")
    found = decide(terms, members, Plan(), frozenset(), Clock(), "h", 1, out=out)
    assert found.plan is not None and found.plan.table is not None
    assert [n.node for n in found.plan.table.nodes] == ["b", "c"]
    found = decide(terms, members[:2], Plan(), frozenset(), Clock(), "h", 1, out=out)
    assert found.plan is None
    assert "1 of at least 2 nodes are here (cordoned: a; flashrun uncordon NODE" in found.waiting


def test_a_cordoned_node_that_waits_is_no_reason_for_a_restart() -> None:
    members = [member("a", 1), member("b", 2)]
    terms = job(nodes="1:2", grow="restart")
    first = decide(terms, members[:1], Plan(), frozenset(), Clock(enough=99), "h", 1)
    assert first.plan is not None
    members[0] = member("a", 1, state="running", round=0)
    for out, phase in ((frozenset("b"), None), (frozenset(""), "stopping")):
        then = decide(
            terms, members, first.plan, frozenset(), Clock(), "h", 1, out=out
        ).plan
        assert (then and then.phase) == phase


def test_faults_within_the_window_count() -> None:
    assert not too_many([1, 2], 3, 3, 10)
    assert too_many([1, 2, 3], 3, 3, 10)
    assert not too_many([1, 12, 13], 13, 3, 10)
    assert not too_many([1, 2, 3], 3, 0, 10)


def test_the_book() -> None:
    kv = MemoryKeyValue()
    book = CordonBook(kv, "p/")
    assert [book.note_fault("x", f"fault {i}", 3, 600.0) for i in range(2)] == [None, None]
    assert book.note_fault("y", "another node's", 3, 600.0) is None
    reason = book.note_fault("x", "rank 1 ended by SIGSEGV", 3, 600.0)
    assert reason == "3 faults within 600 s, the last: rank 1 ended by SIGSEGV"
    assert book.read() == {"x": Cordon(reason, by_hand=False)}
    assert book.note_fault("x", "again", 3, 600.0) is None, "it is said once"
    book.set("z", HAND)
    book.set("x", None)
    assert book.read() == {"z": HAND}
    assert json.loads(kv.get("p/faults/x") or b"") == [], "it begins anew"
    assert kv.get("p/revision") is not None, "the others are told"


def test_it_is_shown() -> None:
    view = overview_of(job(), Plan(), [(member("a", 1), False)], "", None, {"a": HAND})
    assert node_lines(view)[1] == "s1    a        -      waiting  cordoned: by hand"
