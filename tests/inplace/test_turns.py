"""Several optimizers in turn, with a graph that lives on over a step: wherever a worker dies."""

from __future__ import annotations

import os
import signal
from functools import cache
from typing import Any

import pytest
import torch

from flashrun.worker.runtime import Runtime
from tests.inplace.harness import Job, Outcome, same
from tests.inplace.test_trouble import Prepare, dies_in_interval

torch.set_num_threads(1)  # before the forks: OpenMP does not survive them

ROUNDS = "7"


def dies_before_boundary(who: int, b: int) -> tuple[Prepare, list[int]]:
    """Rank `who` kills itself after its part of the step that leads to `b`, once the others are
    there; also gives descriptors to close."""
    read, write = os.pipe()
    for fd, high in ((read, 300), (write, 301)):  # above those that a worker closes
        os.dup2(fd, high)
        os.close(fd)

    def prepare(rank: int, incarnation: int) -> None:
        at, pid = Runtime.at_boundary, os.getpid()

        def boundary(runtime):  # type: ignore[no-untyped-def]
            dies = (rank, incarnation, runtime.boundary + 1) == (who, 0, b)
            if dies:
                for _ in range(runtime.world_size - 1):
                    os.read(300, 1)
                os.kill(pid, signal.SIGKILL)
            at(runtime)
            if runtime.boundary == b and not incarnation:
                os.write(301, b".")

        Runtime.at_boundary = boundary  # type: ignore[method-assign]

    return prepare, [300, 301]


@cache
def undisturbed(way: str) -> Outcome:
    outcome = Job("turns.py", 3, (way, ROUNDS)).run()
    assert outcome.end == "done", outcome.output
    return outcome


WAYS = [
    "fake", "plain", "norms", "helper", "recomputed", "reused", "several", "shared", "viewed",
    "module", "autocast", "frozen", "penalty", "unsynced",
]  # fmt: skip
# In what can't be had, where the graph crosses the boundary of the join: the reason.
FLOWS = "a gradient flows into a graph from before the step"
REFUSED = {
    "outside": FLOWS, "loss_first": FLOWS, "changed": FLOWS, "spectral": FLOWS,
    "collective": "computing it again takes collectives",
    "mixed": "to one model by outputs from before an optimizer's step and by others",
    "asked": "gradients are asked for that lead through an output from before",
}  # fmt: skip
OF_CRITIC, OF_GENERATOR = 9, 8  # boundaries; the graph lives on over those of the critic's step
QUICK = {("fake", OF_CRITIC, True), ("fake", OF_GENERATOR, True), ("fake", OF_CRITIC, False)}


def struck(
    script: str, ranks: int, arguments: tuple[str, ...], b: int, late: bool, **more: Any
) -> Outcome:
    """Rank 1 dies at boundary `b`: after it, or (late) before it and after its part of it.

    Args:
        more: as for `Job`.
    """
    if not late:
        return Job(script, ranks, arguments, in_child=dies_in_interval(1, b), **more).run()
    prepare, descriptors = dies_before_boundary(1, b)
    try:
        return Job(script, ranks, arguments, in_child=prepare, **more).run()
    finally:
        for fd in descriptors:
            os.close(fd)


@pytest.mark.parametrize(
    ("way", "b", "late"),
    [
        pytest.param(
            way, b, late, marks=[] if (way, b, late) in QUICK else pytest.mark.slow
        )
        for way in WAYS
        for b in ((8, 9, 10, 11) if way == "reused" else (OF_GENERATOR, OF_CRITIC))
        for late in (False, True)
    ],
)
def test_a_worker_lost_at_a_turn(way: str, b: int, late: bool) -> None:
    outcome = struck("turns.py", 3, (way, ROUNDS), b, late)
    assert outcome.end == "done", (outcome.reason, outcome.lines, outcome.output)
    assert outcome.incarnations == [0, 1, 0]
    assert any(f"boundary {b}" in line for line in outcome.lines), outcome.lines
    assert not same(undisturbed(way).results, outcome.results), outcome.lines


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("way", REFUSED)
def test_what_can_not_be_computed_again_restarts_all(way: str, late: bool) -> None:
    outcome = struck("turns.py", 3, (way, ROUNDS), OF_CRITIC, late)
    assert outcome.end == "restart" and REFUSED[way] in outcome.reason, outcome


@pytest.mark.slow
@pytest.mark.parametrize("way", ["outside", "loss_first", "changed", "spectral", "collective"])
def test_its_values_do_not_matter_in_a_step_that_is_completed(way: str) -> None:
    for late in (False, True):
        outcome = struck("turns.py", 3, (way, ROUNDS), OF_GENERATOR, late)
        assert outcome.end == "done", (outcome.reason, outcome.lines, outcome.output)
        assert not same(undisturbed(way).results, outcome.results), outcome.lines
