"""A survivor that is one boundary behind: what it waits for has completed on the others."""

from __future__ import annotations

import os
import signal
from functools import cache
from typing import Any

import pytest
import torch

from flashrun import messages
from flashrun.worker.communicator import Gloo
from flashrun.worker.oplog import flatten
from flashrun.worker.runtime import Runtime
from tests.inplace.harness import Job, Outcome, same

torch.set_num_threads(1)  # before the forks: OpenMP does not survive them

AT = 5  # the boundary of the laggard
SMALL, LARGE = "8", "200"  # width of the layer: its gradients are copied as results, or not


class Failing:
    """An operation that takes part with copies, and fails here once the job knows of a fault."""

    def __init__(self, runtime: Runtime, inner: Any) -> None:
        self._runtime, self._inner = runtime, inner

    def wait(self) -> None:
        self._inner.wait()
        with self._runtime.told:
            self._runtime.told.wait_for(lambda: self._runtime.pending > self._runtime.generation)
        raise RuntimeError("the connection was reset")

    def is_completed(self) -> bool:
        return False

    def get_future(self) -> Any:
        return torch.futures.Future()  # never set


def stuck_at(number: int, dies_at: int | None) -> Any:
    """Rank 2 does not get the result of its `number`-th operation of interval `AT`, which the
    others get; rank 1 dies before its `dies_at`-th, or at the boundary after it."""

    def prepare(rank: int, incarnation: int) -> None:
        issue, at, make, pid = Gloo.issue, Runtime.at_boundary, Runtime.__init__, os.getpid()
        mine: list[Runtime] = []
        seen: list[str] = []

        def made(runtime, *args):  # type: ignore[no-untyped-def]
            make(runtime, *args)
            mine.append(runtime)

        def issued(communicator, kind, args):  # type: ignore[no-untyped-def]
            runtime = mine[0]
            if (rank, incarnation, runtime.boundary) == (1, 0, AT) and dies_at:
                seen.append(kind)
                if len(seen) == dies_at:
                    os.kill(pid, signal.SIGKILL)
            if (rank, incarnation, runtime.boundary) == (2, 0, AT) and not runtime.generation:
                seen.append(kind)
                if len(seen) == number:
                    copies = {id(t): t.detach().clone() for t in flatten(args[0])}
                    copied = [copies[id(t)] for t in flatten(args[0])]
                    return Failing(runtime, issue(communicator, kind, (copied, *args[1:])))
            return issue(communicator, kind, args)

        def boundary(runtime):  # type: ignore[no-untyped-def]
            at(runtime)
            if (rank, incarnation, runtime.boundary) == (1, 0, AT + 1):
                os.kill(pid, signal.SIGKILL)

        Gloo.issue = issued  # type: ignore[method-assign]
        Runtime.__init__ = made  # type: ignore[method-assign]
        Runtime.at_boundary = boundary  # type: ignore[method-assign]

    return prepare


def run(
    *arguments: str,
    stuck: int | None = None,
    dies_at: int | None = None,
    environ: dict[str, str] | None = None,
) -> Outcome:
    prepare = stuck_at(stuck, dies_at) if stuck else None
    return Job("metric.py", 3, arguments, in_child=prepare, environ=environ or {}).run()


@cache
def undisturbed(*arguments: str) -> Outcome:
    outcome = run(*arguments)
    assert outcome.end == "done", outcome.output
    return outcome


GRADIENTS, METRIC = 1, 2  # the operations of an interval


STUCK = [
    (SMALL, "4", METRIC), (LARGE, "4", METRIC), (SMALL, "0", GRADIENTS), (LARGE, "0", GRADIENTS)
]  # fmt: skip
QUICK = {(LARGE, METRIC, ""), (LARGE, GRADIENTS, "clip"), (LARGE, GRADIENTS, "inf")}


@pytest.mark.parametrize(
    ("width", "elements", "stuck", "also"),
    [
        pytest.param(
            *case, also, marks=[] if (case[0], case[2], also) in QUICK else pytest.mark.slow
        )
        for case in STUCK
        for also in ("", "clip", "hooks", "inf")
    ],
)
def test_the_laggard_is_taken_along(width: str, elements: str, stuck: int, also: str) -> None:
    arguments = (width, "9", elements, also)
    outcome = run(*arguments, stuck=stuck)
    assert outcome.end == "done", (outcome.reason, outcome.lines, outcome.output)
    assert outcome.incarnations == [0, 1, 0]
    assert any(f"boundary {AT + 1}" in line for line in outcome.lines), outcome.lines
    assert not same(undisturbed(*arguments).results, outcome.results), outcome.lines


@pytest.mark.parametrize("width", [SMALL, LARGE])
@pytest.mark.parametrize("use", ["norm", "keep"])
def test_its_gradients_are_right(width: str, use: str) -> None:
    """The script reads or keeps what it makes of gradients which the others have had."""
    arguments = (width, "9", "0", use)
    outcome = run(*arguments, stuck=GRADIENTS)
    assert outcome.end == "done", outcome
    assert not same(undisturbed(*arguments).results, outcome.results)


def test_gradients_that_nobody_has_are_not_read_as_zeros() -> None:
    """Without a copy the next backward has overwritten them, or the script."""
    environ = {messages.RETAIN: "off"}
    outcome = run(LARGE, "9", "0", "view", "norm", stuck=GRADIENTS, environ=environ)
    assert outcome.end == "restart", outcome
    assert "nobody has the result of allreduce" in outcome.reason


@pytest.mark.parametrize("width", [SMALL, LARGE])
@pytest.mark.parametrize("view", [(), ("view",)], ids=["copied", "view"])
def test_who_has_a_result_gives_it_to_who_has_not(width: str, view: tuple[str, ...]) -> None:
    """Rank 1 dies in the same interval, before the operation after the one that rank 2 has not
    completed and rank 0 has. With gradients that are views of DDP's bucket rank 0's inputs are
    overwritten by then."""
    arguments = (width, "9", "4", *view)
    outcome = run(*arguments, stuck=GRADIENTS, dies_at=METRIC)
    assert outcome.end == "done", (outcome.reason, outcome.lines, outcome.output)
    assert any(f"boundary {AT}" in line for line in outcome.lines), outcome.lines
    assert not same(undisturbed(*arguments).results, outcome.results), outcome.lines


def test_a_result_that_nobody_has_is_no_zero() -> None:
    """A metric too large to be kept as a copy, which the script has changed since."""
    outcome = run("8", "9", "40000", "scale", stuck=METRIC)
    assert outcome.end == "restart", outcome
    assert "nobody has the result of allreduce" in outcome.reason


def test_who_is_within_a_step_gives_no_state() -> None:
    """Rank 1 dies in a second evaluation of the closure: the others have moved the weights."""
    outcome = run(SMALL, "9", "4", "lbfgs", stuck=-1, dies_at=4)
    assert outcome.end == "restart" and "within its optimizer's step" in outcome.reason, outcome


def test_a_step_that_calls_back_is_not_taken_from_others() -> None:
    outcome = run(SMALL, "9", "4", "lbfgs", stuck=4)  # the last of the closure
    assert outcome.end == "restart" and "LBFGS" in outcome.reason, outcome
