"""What is kept of collectives' inputs: how much, until when, and what is left without it."""

from __future__ import annotations

import os
import re
import signal
from typing import Any

import torch

from flashrun import messages
from flashrun.worker.runtime import Runtime
from tests.inplace.harness import Job, Outcome, same

torch.set_num_threads(1)  # before the forks: OpenMP does not survive them

GRADIENTS = 4 * (256 * 256 + 256)  # bytes in heavy.py, one DDP bucket
STEPS = "8"


def run(retain: str, prepare: Any = None, world: int = 3) -> Outcome:
    environ = {messages.RETAIN: retain}
    return Job("heavy.py", world, (STEPS,), environ=environ, in_child=prepare).run()


def retained(outcome: Outcome, what: str) -> int:
    """Bytes at the last boundary at which they were reported, or the peak of all."""
    return int([e[what] for e in outcome.events if e.get("event") == "retained"][-1])


def dies_in_backward(rank: int, incarnation: int) -> None:
    """Rank 1 dies in backward of interval 5, so that the others' all-reduce is under way."""
    issue, pid = Runtime.issue, os.getpid()

    def issued(runtime, group, kind, args):  # type: ignore[no-untyped-def]
        if (rank, incarnation, runtime.boundary) == (1, 0, 5):
            os.kill(pid, signal.SIGKILL)
        return issue(runtime, group, kind, args)

    Runtime.issue = issued  # type: ignore[method-assign]


def dies_first(rank: int, incarnation: int) -> None:
    """Rank 1 dies at boundary 5, and the others issue nothing before they have heard of it."""
    at, pid = Runtime.at_boundary, os.getpid()

    def boundary(runtime):  # type: ignore[no-untyped-def]
        at(runtime)
        if runtime.boundary == 5:
            if (rank, incarnation) == (1, 0):
                os.kill(pid, signal.SIGKILL)
            if incarnation == 0:
                with runtime.told:
                    runtime.told.wait_for(lambda: runtime.pending > runtime.generation)

    Runtime.at_boundary = boundary  # type: ignore[method-assign]


def test_one_interval_is_kept_and_no_more() -> None:
    outcome = run("on")
    assert outcome.end == "done", outcome.output
    assert GRADIENTS <= retained(outcome, "bytes") < GRADIENTS + 1000
    peaks = {e["rank"]: e["peak"] for e in outcome.events if e.get("event") == "retained"}
    # Backward of a step begins before it is known that nobody needs the step before; and in the
    # first interval rank 0 has given all its parameters to the others.
    for rank, times in {0: 3, 1: 2, 2: 2}.items():
        assert times * GRADIENTS <= peaks[rank] < times * GRADIENTS + 2000
    assert not any("--retain" in line for line in outcome.lines)


def test_what_a_cap_leaves_out_is_said_once_and_restarts() -> None:
    outcome = run("100000", dies_in_backward)
    assert outcome.end == "restart", outcome
    assert "were not kept (--retain)" in outcome.reason
    (line,) = [line for line in outcome.lines if "--retain" in line and "step's" in line]
    # Whoever is heard first says it; rank 0 has broadcast the parameters in that interval as well.
    assert re.search(r"0\.(263|526) MB of inputs, and --retain=100000 does not keep them", line)
    assert retained(outcome, "peak") <= 100_000


def test_a_cap_that_suffices() -> None:
    outcome = run(str(2 * GRADIENTS), dies_in_backward)
    assert outcome.end == "done", outcome.reason
    assert not same(run("on").results, outcome.results)


def test_off_recovers_where_no_collective_was_under_way() -> None:
    undisturbed = run("off")
    assert any("--retain=off does not keep them" in line for line in undisturbed.lines)
    outcome = run("off", dies_in_backward)
    assert outcome.end == "restart" and "(--retain)" in outcome.reason
    outcome = run("off", dies_first)
    assert outcome.end == "done", outcome.reason
    assert not same(undisturbed.results, outcome.results)
    assert outcome.incarnations == [0, 1, 0]
