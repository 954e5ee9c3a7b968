"""The check before a rank goes live (rule 10): a table of words of ranks that are held."""

from __future__ import annotations

from typing import Any

import pytest

from flashrun.control.held import Rank, donors_of, hopeless, mismatch, out_of_step, told

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
        (1, {"buckets": ["a1", "next"]}, BUCKETS),  # it would rebuild one alone, and hang
        (2, {"buckets": [None, "next"]}, BUCKETS),
        (1, {"buckets": ["next", ""]}, BUCKETS),
        (1, {"buckets": ["a1"]}, BUCKETS),  # another number of modules
        (1, {"state": "ee"}, "no survivor has what rank 1 has at boundary 7"),
        (2, {"state": "ee"}, None),  # what only a survivor has
        (2, {"line": "j", "shadowed": True, "site": "join.py:9"}, None),  # rank 0 is like rank 1
        (1, {"line": "j", "shadowed": True}, "rank 1 ran out of batches (Join) when no"),
        (1, {"line": "j"}, "rank 1 has a state of its own since a Join of uneven inputs"),
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


def test_lines_that_were_found_alike_give_each_other_state() -> None:
    ranks = three(1, {"line": "j"}, {})
    assert not donors_of(ranks, 1) and list(donors_of(ranks, 1, {"j": "", "": ""})) == ["0", "2"]
    assert mismatch(ranks, 7, {"j": "", "": ""}) is None
    for rank in (0, 2):
        assert ranks[rank].held is not None
        ranks[rank].held["check"]["shadowed"] = True
    assert "rank 1 was still training (Join), as no survivor was" in str(mismatch(ranks, 7))


@pytest.mark.parametrize(
    ("shadowed", "behind", "says"),
    [
        (True, {"base": 10, "issued": 14}, None),
        (True, {"base": 12, "issued": 14}, "rank(s) [1] have no more batches (Join)"),
        (True, {"base": 10, "issued": 16}, "rank(s) [1] have no more batches (Join)"),
        (False, {"base": 12, "issued": 14}, None),  # not for this reason
    ],
    ids=["in step", "other numbers", "beyond the boundary", "no Join"],
)
def test_who_shadows_counts_as_the_others(
    shadowed: bool, behind: dict[str, int], says: str | None
) -> None:
    """Rank 1 is at boundary 6, rank 0 at 7, where it has had 15 operations."""
    words = [(7, False, {"base": 15, "issued": 17, "before": 10}), (6, shadowed, behind)]
    ranks = [
        Rank(held={"boundary": at, "check": {"shadowed": joined}, "groups": {"0": group}})
        for at, joined, group in words
    ]
    found = out_of_step(ranks, 7)
    assert found is None if says is None else says in str(found)


HELD, ENDED, COMING = Rank(state=True), Rank(state=True, gone=True), Rank(state=False, spawned=True)


@pytest.mark.parametrize(
    ("ranks", "dead", "restart_only", "peerless", "says"),
    [
        ([HELD, HELD], [1], None, {}, None),
        ([HELD, HELD, HELD], [0, 2], None, {"1": "ema"}, None),
        ([HELD, HELD], [1], "they differ", {}, "they differ"),
        ([HELD, HELD], [1], None, {"1": "ema"}, "only rank 1 had ema"),
        ([HELD, HELD], [0, 1], None, {}, "no survivor holds the state"),
        ([HELD, COMING], [0], None, {}, "no survivor holds the state"),
        ([HELD, HELD, COMING], [0], None, {}, None),
        ([HELD, HELD, ENDED], [0], None, {}, "rank(s) [2] have ended and can't take part"),
    ],
)
def test_a_loss_that_restarts_all_is_known_at_once(
    ranks: list[Rank],
    dead: list[int],
    restart_only: str | None,
    peerless: dict[str, str],
    says: str | None,
) -> None:
    assert hopeless(ranks, dict.fromkeys(dead, "SIGKILL"), restart_only, peerless) == says


@pytest.mark.parametrize(
    ("spawned", "reason", "says"),
    [
        (False, "rank 1: 'item' uses", "rank 1 can't go on exactly: 'item' uses"),
        (True, "rank 1: the log ends", "rank 1 can't be replaced in place: the log ends"),
        (True, "OSError: no space", "rank 1 can't be replaced in place: OSError: no space"),
        (False, "rank 1 waits within its step", "rank 1 waits within its step"),
        (False, "rank 1, held at boundary 3", "rank 1, held at boundary 3"),
        (False, "rank 12 is", "rank 1 can't go on exactly: rank 12 is"),
    ],
)
def test_a_reason_names_its_rank_once(spawned: bool, reason: str, says: str) -> None:
    assert told(1, spawned, reason) == says
