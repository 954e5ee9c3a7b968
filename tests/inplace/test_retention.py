"""What is kept of collectives' inputs: how much, until when, and what is left without it."""

from __future__ import annotations

import os
import re
import signal
from typing import Any

import torch

from flashrun import messages
from flashrun.worker.retention import Retention
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


EVALUATED = 3  # the interval in which gathers.py evaluates


def keeps_little(rank: int, incarnation: int) -> None:
    """As on a machine with little memory."""
    init = Retention.__init__

    def made(retention, *args):  # type: ignore[no-untyped-def]
        init(retention, *args)
        retention.limit = 1 << 20

    Retention.__init__ = made  # type: ignore[method-assign]


def dies_at(interval: int, gather: int) -> Any:
    """Rank 1 dies as it issues that all-gather of the interval (0: its first collective)."""

    def prepare(rank: int, incarnation: int) -> None:
        keeps_little(rank, incarnation)
        issue, pid = Runtime.issue, os.getpid()
        count = 0

        def issued(runtime, group, kind, args):  # type: ignore[no-untyped-def]
            nonlocal count
            if (rank, incarnation, runtime.boundary) == (1, 0, interval):
                count += kind == "allgather"
                if count >= gather:
                    os.kill(pid, signal.SIGKILL)
            return issue(runtime, group, kind, args)

        Runtime.issue = issued  # type: ignore[method-assign]

    return prepare


def test_an_interval_without_an_end_does_not_fill_memory() -> None:
    """An evaluation gathers 20 MB, of which 1 MB is kept; before and after it all is as ever."""
    outcome = Job("gathers.py", 3, (STEPS,), in_child=keeps_little).run()
    assert outcome.end == "done", outcome.output
    said = [e for e in outcome.events if e.get("event") == "retention-limit"]
    assert {e["rank"] for e in said} == {0, 1, 2} and len(said) == 3
    assert all(1 << 20 < e["bytes"] < 3 << 20 for e in said), said
    assert len([line for line in outcome.lines if "more than is kept" in line]) == 1
    for result in outcome.results.values():
        assert result.pop("held") < 3 << 20
    fault = Job("gathers.py", 3, (STEPS,), in_child=dies_at(EVALUATED, 40)).run()
    assert fault.end == "restart" and "have let go of what collectives gave" in fault.reason
    later = Job("gathers.py", 3, (STEPS,), in_child=dies_at(EVALUATED + 2, 0)).run()
    assert later.end == "done", later.reason
    for result in later.results.values():
        result.pop("held")
    assert not same(outcome.results, later.results)


def test_off_recovers_where_no_collective_was_under_way() -> None:
    undisturbed = run("off")
    assert any("--retain=off does not keep them" in line for line in undisturbed.lines)
    outcome = run("off", dies_in_backward)
    assert outcome.end == "restart" and "(--retain)" in outcome.reason
    outcome = run("off", dies_first)
    assert outcome.end == "done", outcome.reason
    assert not same(undisturbed.results, outcome.results)
    assert outcome.incarnations == [0, 1, 0]
