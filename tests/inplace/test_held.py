"""The check before a rank goes live (rule 10): a table of words of ranks that are held."""

from __future__ import annotations

from typing import Any

import pytest

from flashrun.control.held import Rank, donors_of, mismatch

ALL = {"0": [0, 1, 2], "1": [0, 1, 2]}


def held(state: bool, changes: dict[str, Any], groups: dict[str, list[int]]) -> Rank:
    check = {
        "site": "train.py:9", "buckets": ["a1", ""], "state": "f0",
        "groups": dict.fromkeys(groups, 4),
        **changes,
    }  # fmt: skip
    members = {ident: {"ranks": ranks} for ident, ranks in groups.items()}
    return Rank(state=state, port=7, held={"state": state, "check": check, "groups": members})


def three(who: int, changes: dict[str, Any], groups: dict[int, dict[str, list[int]]]) -> list[Rank]:
    """Rank 1 is a replacement; rank `who` says `changes`, and has other groups than `ALL`."""
    return [
        held(rank != 1, changes if rank == who else {}, groups.get(rank, ALL)) for rank in range(3)
    ]


SITE = "in the optimizer call: train.py:12 and train.py:9"
BUCKETS = "in how DDP has put gradients into buckets"


@pytest.mark.parametrize(
    ("who", "changes", "says"),
    [
        (1, {}, None),
        (1, {"site": "train.py:12"}, f"rank 1 and rank 0 differ at boundary 7 {SITE}"),
        (2, {"site": "train.py:12"}, f"rank 2 and rank 0 differ at boundary 7 {SITE}"),
        (1, {"buckets": ["b2", ""]}, f"rank 1 and rank 0 differ at boundary 7 {BUCKETS}"),
        (2, {"buckets": ["b2", ""]}, f"rank 2 and rank 0 differ at boundary 7 {BUCKETS}"),
        (1, {"buckets": ["", ""]}, BUCKETS),  # the others have rebuilt theirs
        (1, {"buckets": ["a1", "a1"]}, BUCKETS),
        (1, {"buckets": ["a1", None]}, BUCKETS),  # rebuilt, but it is not known how
        (1, {"buckets": [None, ""]}, None),
        (0, {"buckets": [None, ""]}, None),
        (1, {"buckets": ["a1"]}, BUCKETS),  # another number of modules
        (1, {"state": "ee"}, "no survivor has what rank 1 has at boundary 7"),
        (2, {"state": "ee"}, None),  # what only a survivor has
        (1, {"groups": {"0": 9, "1": 9}}, None),  # a replacement takes the others' numbers
        (
            2,
            {"groups": {"0": 4, "1": 5}},
            "at boundary 7 group 1 has had 4 operations on rank 0 and 5 on rank 2",
        ),
    ],
)
def test_what_is_compared_at_the_target(
    who: int, changes: dict[str, Any], says: str | None
) -> None:
    found = mismatch(three(who, changes, {}), 7)
    assert found is None if says is None else says in str(found)


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        ({1: {"0": [0, 1, 2]}}, "group 1 is missing on rank 1 at boundary 7"),
        ({0: {"0": [0, 1, 2]}}, "group 1 is missing on rank 0 at boundary 7"),
        # it is no member
        ({0: {**ALL, "2": [0, 2]}, 2: {**ALL, "2": [0, 2]}}, None),
        ({0: {**ALL, "2": [0, 1]}}, "group 2 is missing on rank 1 at boundary 7"),
    ],
)
def test_every_member_has_each_group(
    groups: dict[int, dict[str, list[int]]], says: str | None
) -> None:
    assert mismatch(three(1, {}, groups), 7) == says


def test_who_has_what_a_rank_needs_gives_it() -> None:
    ranks = three(2, {"state": "ee"}, {})
    assert donors_of(ranks, 1) == {"0": 7}
    assert donors_of(three(1, {}, {}), 1) == {"0": 7, "2": 7}
