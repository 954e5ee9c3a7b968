"""Uneven inputs under Join: who is lost while some shadow the others is replaced by a rank that has
done the same, and where there is none, all are restarted with that reason.

With 3, 3 and 5 batches an epoch has the boundaries 1 to 3 (all train), 4 and 5 (ranks 0 and 1
shadow rank 2), and 6 (all have its model).
"""

from __future__ import annotations

import os
import signal
from functools import cache

import pytest
import torch

from flashrun.worker.replay.api import Mode
from flashrun.worker.runtime import Runtime
from tests.inplace.harness import Job, Outcome, same

torch.set_num_threads(1)  # before the forks: OpenMP does not survive them

Deaths = dict[tuple[int, int], tuple[int, int]]
UNEVEN = "3,3,5"
BROADCAST = 2  # in the last interval of a block, after the count of who trains and whose model


@cache
def undisturbed(kind: str, counts: str) -> Outcome:
    outcome = Job("uneven.py", 3, (kind, counts, "3")).run()
    assert outcome.end == "done", outcome
    return outcome


def run(kind: str, counts: str, deaths: Deaths) -> Outcome:
    """
    Args:
        deaths: (rank, incarnation) -> the interval, and the number of the collective in it at whose
            issue it kills itself.
    """

    def prepare(rank: int, incarnation: int) -> None:
        issue, pid, number = Runtime.issue, os.getpid(), 0
        interval, fatal = deaths.get((rank, incarnation), (-1, 0))

        def issued(runtime, *args):  # type: ignore[no-untyped-def]
            nonlocal number
            if runtime.boundary == interval and runtime.mode is Mode.LIVE:
                if number == fatal:
                    os.kill(pid, signal.SIGKILL)
                number += 1
            return issue(runtime, *args)

        Runtime.issue = issued  # type: ignore[method-assign]

    return Job("uneven.py", 3, (kind, counts, "3"), in_child=prepare).run()


def check(kind: str, counts: str, deaths: Deaths) -> Outcome:
    outcome = run(kind, counts, deaths)
    assert outcome.end == "done", (outcome.reason, outcome.lines, outcome.output)
    assert outcome.incarnations == [sum(r == rank for r, _ in deaths) for rank in range(3)]
    assert not same(undisturbed(kind, counts).results, outcome.results), outcome.lines
    return outcome


def test_lost_ranks_are_replaced_by_their_like() -> None:
    deaths = {
        (0, 0): (2, 0),  # all train
        (1, 0): (4, 1),  # shadows, as rank 0 does
        (0, 1): (5, BROADCAST),
        (2, 0): (7, 1),  # all train again
        (1, 1): (11, 0),
        (0, 2): (17, BROADCAST + 1),
    }
    outcome = check("sgd", UNEVEN, deaths)
    assert len([line for line in outcome.lines if "done in" in line]) == len(deaths)


def test_one_that_trains_is_replaced_by_another_that_does() -> None:
    check("sgd", "3,5,5", {(2, 0): (3, 1), (1, 0): (4, 0), (2, 1): (5, BROADCAST)})


@pytest.mark.parametrize(
    ("kind", "counts", "rank", "interval", "says"),
    [
        ("sgd", UNEVEN, 2, 4, "rank 2 was still training (Join), as no survivor was"),
        ("sgd", "2,3,5", 0, 4, "rank 0 ran out of batches (Join) when no survivor did"),
        ("adam", UNEVEN, 2, 8, "rank 2 has a state of its own since a Join of uneven inputs"),
        ("accumulate", "4,4,8", 0, 3, "they accumulate gradients, or have several optimizers"),
        ("two", UNEVEN, 0, 7, "they accumulate gradients, or have several optimizers"),
        # The replay does not know what the others have said to let its forward raise.
        ("throw", UNEVEN, 2, 4, "raised an exception, but not in the replay"),
        ("sgd", "0,3,3", 1, 4, "in how DDP has put gradients into buckets"),
    ],
    ids=["trains", "joined", "adam", "accumulate", "two", "throw", "empty"],
)
@pytest.mark.slow
def test_what_nobody_has_restarts_all(
    kind: str, counts: str, rank: int, interval: int, says: str
) -> None:
    outcome = run(kind, counts, {(rank, 0): (interval, 1)})
    assert outcome.end == "restart" and says in outcome.reason, (outcome.reason, outcome.lines)
    own = [line for line in outcome.lines if "rank(s) [2] have a state of their own" in line]
    assert len(own) == (kind == "adam"), outcome.lines


@pytest.mark.parametrize(
    ("kind", "counts", "deaths"),
    [
        # Its moments are each line's own, so ranks 0 and 1 stay replicas of each other.
        ("adam", UNEVEN, {(0, 0): (5, 1), (1, 0): (8, 1), (0, 1): (16, 1)}),
        ("norm", UNEVEN, {(1, 0): (5, 2), (0, 0): (8, 1)}),
        ("active", UNEVEN, {(0, 0): (4, 1), (2, 0): (7, 2), (1, 0): (14, 2)}),
        ("throw", UNEVEN, {(0, 0): (2, 1), (2, 0): (3, 0), (1, 0): (6, 2)}),
        # Each of its steps counts where it is taken; at the end of a block all are level again.
        ("two", UNEVEN, {(0, 0): (13, 1), (2, 0): (15, 0)}),
        ("no_sync", "4,4,8", {(0, 0): (7, 1), (2, 0): (8, 2)}),
    ],
    ids=["adam", "norm", "active", "throw", "two", "no_sync"],
)
@pytest.mark.slow
def test_other_scripts(kind: str, counts: str, deaths: Deaths) -> None:
    check(kind, counts, deaths)


@pytest.mark.slow
def test_an_optimizer_that_joins() -> None:
    """ZeRO has collectives in its step: who waits there has a half of it."""
    outcome = run("zero", "4,4,4", {(0, 0): (3, 4)})
    assert outcome.end == "restart", (outcome.reason, outcome.lines)
    assert "within its optimizer's step" in outcome.reason
