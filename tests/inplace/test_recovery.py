"""Whole jobs on three gloo ranks: whatever is killed, the results are the undisturbed run's."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from functools import cache

import pytest
import torch

from flashrun.control.recovery import Limits
from flashrun.worker.runtime import Runtime
from tests.inplace.harness import Fault, Job, Outcome, same

pytestmark = pytest.mark.slow  # minutes; `scripts/test -m slow` runs them

torch.set_num_threads(1)  # before the forks: OpenMP does not survive them

IN_PLACE = [
    "plain", "functional", "accumulate", "objects", "norm", "average", "scaled", "gan", "hook",
    "static", "unused",
]  # fmt: skip
STEPS = "14"


@cache
def undisturbed(kind: str) -> Outcome:
    outcome = Job("zoo.py", 3, (kind, STEPS)).run()
    assert outcome.end == "done", outcome.output
    return outcome


@cache
def collectives(kind: str) -> int:
    """How many collectives rank 0 issues: the moments at which a worker can be killed."""
    counts: list[int] = []
    read, write = os.pipe()

    def count(rank: int, incarnation: int) -> None:
        issue = Runtime.issue
        if rank == 0:

            def counted(*args):  # type: ignore[no-untyped-def]
                os.write(write, b".")
                return issue(*args)

            Runtime.issue = counted  # type: ignore[method-assign]

    # descriptors above those that a worker closes
    os.dup2(write, 300)
    os.close(write)
    write = 300
    outcome = Job("zoo.py", 3, (kind, STEPS), in_child=count).run()
    assert outcome.end == "done", outcome.output
    os.close(write)
    counts.append(len(os.read(read, 1 << 16)))
    os.close(read)
    return counts[0]


def at_collective(deaths: dict[tuple[int, int], int]) -> Callable[[int, int], None]:
    """(rank, incarnation) -> the number of the collective at whose issue it kills itself."""

    def prepare(rank: int, incarnation: int) -> None:
        fatal = deaths.get((rank, incarnation))
        if fatal is None:
            return
        issue = Runtime.issue
        number = 0
        pid = os.getpid()  # asked before the replay logs such answers

        def issued(*args):  # type: ignore[no-untyped-def]
            nonlocal number
            number += 1
            if number == fatal:
                os.kill(pid, signal.SIGKILL)
            return issue(*args)

        Runtime.issue = issued  # type: ignore[method-assign]

    return prepare


def check(kind: str, outcome: Outcome) -> None:
    assert outcome.end == "done", (outcome.reason, outcome.lines, outcome.output)
    differences = same(undisturbed(kind).results, outcome.results)
    assert not differences, (differences, outcome.lines)


@pytest.mark.parametrize("kind", IN_PLACE)
def test_a_killed_rank_leaves_no_trace(kind: str) -> None:
    seed = random.Random(f"first {kind}").randrange(1 << 30)
    rng = random.Random(seed)
    total = collectives(kind)
    for _ in range(2):
        rank, moment = rng.randrange(3), rng.randrange(total // 3, total)
        print(f"{kind}: rank {rank} at collective {moment} of {total} (seed {seed})")
        job = Job("zoo.py", 3, (kind, STEPS), in_child=at_collective({(rank, 0): moment}))
        outcome = job.run()
        if kind == "objects" and outcome.end == "restart":
            # Two ranks need the dead one in a group of theirs, which the third is past already.
            assert "nobody has the result of" in outcome.reason or "log ends" in outcome.reason
            continue
        check(kind, outcome)
        survivors = [r for r in range(3) if outcome.incarnations[r] == 0]
        assert all(len(outcome.pids[r]) == 1 for r in survivors)


@pytest.mark.parametrize("kind", ["accumulate", "objects"])
@pytest.mark.parametrize("ranks", [(0, 1), (0, 2), (1, 2)])
def test_all_but_one(kind: str, ranks: tuple[int, int]) -> None:
    moment = collectives(kind) // 2
    deaths = {(ranks[0], 0): moment, (ranks[1], 0): moment}
    check(kind, Job("zoo.py", 3, (kind, STEPS), in_child=at_collective(deaths)).run())


@pytest.mark.parametrize("kind", ["accumulate", "objects"])
@pytest.mark.parametrize("moment", [1, 2, 3, 4])
def test_before_the_first_step(kind: str, moment: int) -> None:
    check(kind, Job("zoo.py", 3, (kind, STEPS), in_child=at_collective({(1, 0): moment})).run())


def test_in_the_last_step_and_after_some_have_finished() -> None:
    total = collectives("accumulate")
    for moment in (total, total - 1, total - 2):
        job = Job("zoo.py", 3, ("accumulate", STEPS), in_child=at_collective({(1, 0): moment}))
        check("accumulate", job.run())

    def one_finished(job: Job) -> bool:
        return job.machine.ranks[0].finished and not job.machine.ranks[2].finished

    faults = [Fault([2], when=one_finished)]
    check("accumulate", Job("zoo.py", 3, ("accumulate", STEPS), faults=faults).run())


def test_replicas_that_differ_restart_with_the_reason() -> None:
    moment = 15
    job = Job("zoo.py", 3, ("local", STEPS), in_child=at_collective({(1, 0): 9}))
    outcome = job.run()
    assert outcome.end == "restart" and "differs between ranks" in outcome.reason
    job = Job("zoo.py", 3, ("lonely", STEPS), in_child=at_collective({(0, 0): moment}))
    outcome = job.run()
    assert outcome.end == "restart" and "Sequential#1" in outcome.reason
    job = Job("zoo.py", 3, ("lonely", STEPS), in_child=at_collective({(1, 0): moment}))
    check("lonely", job.run())  # the others have all that was lost


def test_a_rank_that_keeps_dying_ends_the_job() -> None:
    deaths = {(1, incarnation): 20 if not incarnation else 1 for incarnation in range(5)}
    job = Job(
        "zoo.py",
        3,
        ("plain", STEPS),
        limits=Limits(max_retries=2),
        in_child=at_collective(deaths),
    )
    outcome = job.run()
    assert outcome.end == "fail", outcome.lines
    assert "2 times in a row" in outcome.reason
