"""Whole jobs on three gloo ranks: a further fault in each phase of a recovery (rule 11)."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator

import pytest

from flashrun.messages import Message
from flashrun.worker.peers import Peers
from tests.inplace.harness import Fault, Job, Outcome
from tests.inplace.test_recovery import STEPS, at_collective, check, collectives

SECONDS = ("survivor", "replacement")
QUICK = {("hold", "survivor"), ("gather", "replacement"), ("rebuild", "survivor")}
ROWS = [
    pytest.param(phase, second, marks=[] if (phase, second) in QUICK else [pytest.mark.slow])
    for phase in ("hold", "gather", "rebuild")
    for second in SECONDS
]


def recovered(job: Job, again: set[int]) -> Outcome:
    """Run it: rank 1 was lost, then, once, one of these ranks."""
    outcome = job.run()
    check("accumulate", outcome)
    lost = [event["rank"] for event in outcome.events if event.get("event") == "worker-lost"]
    assert lost[0] == 1 and len(lost) == 2 and lost[1] in again, outcome.lines
    assert job.machine.generation >= 2
    for rank, pids in outcome.pids.items():
        if rank not in lost:
            assert len(pids) == 1, outcome.pids
    return outcome


@pytest.mark.parametrize(("phase", "second"), ROWS)
def test_again_during_the_recovery(phase: str, second: str) -> None:
    victim = 2 if second == "survivor" else 1
    moment = collectives("accumulate") // 2

    def now(job: Job) -> bool:
        return job.machine.generation == 1 and job.machine.phase == phase

    job = Job(
        "zoo.py",
        3,
        ("accumulate", STEPS),
        in_child=at_collective({(1, 0): moment}),
        faults=[Fault([victim], when=now)],
    )
    recovered(job, {victim})


def test_a_donor_in_the_middle_of_its_part() -> None:
    """It has sent some bytes of the state, and the receiver waits for more."""
    fatal = at_collective({(1, 0): collectives("accumulate") // 2})

    def prepare(rank: int, incarnation: int) -> None:
        fatal(rank, incarnation)
        if rank == 2 and incarnation == 0:
            Peers._provide = dies_in(Peers._provide)  # type: ignore[method-assign]

    job = Job("zoo.py", 3, ("accumulate", STEPS), in_child=prepare)
    recovered(job, {2})


Provides = Callable[[Peers, Message], tuple[Message, Iterable[memoryview]]]


def dies_in(provide: Provides) -> Provides:
    pid = os.getpid()

    def half(views: Iterable[memoryview]) -> Iterator[memoryview]:
        yield next(iter(views))
        os.kill(pid, signal.SIGKILL)

    def provides(peers: Peers, request: Message) -> tuple[Message, Iterable[memoryview]]:
        header, views = provide(peers, request)
        return header, half(views) if request["what"] == "state" else views

    return provides
