"""The asynchronous path: recovery over communicators that behave like NCCL (tests/double/nccl.py).

The same jobs as tests/inplace, on the double: an operation is only complete once it was waited for
on the host and not aborted, a dead peer says nothing, and an abort leaves garbage behind.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache
from typing import Any

import pytest
import torch
from torch._C import _distributed_c10d as c10d

from flashrun.worker.nccl import Queued
from tests import helpers
from tests.double.nccl import Double, FakeNccl
from tests.inplace.harness import Fault, Job, Outcome, same
from tests.inplace.test_recovery import at_collective

torch.set_num_threads(1)  # before the forks: OpenMP does not survive them

STEPS = "14"
# kind -> operations on rank 0's streams; those of the set-up are among them
OPERATIONS = {"plain": 68, "accumulate": 16, "objects": 50, "norm": 28}


# Two may die in the first steps, or one boundary behind with something read there.
RESTARTS = ("not proved yet", "can't be replaced in place", "no survivor holds the state")


@pytest.fixture
def pair() -> Iterator[list[Double]]:
    """The two ends of a communicator, both in this process."""
    store = c10d.HashStore()
    made: dict[int, Double] = {}

    def make(rank: int) -> None:
        made[rank] = Double.make(store, rank, 2, timedelta(seconds=60), lambda: None)

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    both = [made[0], made[1]]
    ends = helpers.ends_of_communicators()
    yield both
    for communicator in both:
        communicator.abort()
        communicator._group.thread.join()
    both.clear()  # pytest keeps what it was given, and their sockets would stay open
    made.clear()
    del communicator
    gc.collect()  # errors hold the frames that they came through
    assert all(end.wait(60) for end in ends)


def reduce(value: float) -> tuple[torch.Tensor, tuple[object, ...]]:
    tensor = torch.full((1000,), value)
    return tensor, ([tensor], c10d.AllreduceOptions())


def test_wait_is_real_and_in_order(pair: list[Double]) -> None:
    ours = [reduce(float(i)) for i in range(3)]
    handles = [pair[0].issue("allreduce", args) for _, args in ours]
    assert not any(h.is_completed() for h in handles)
    for _ in range(3):
        pair[1].issue("allreduce", reduce(10.0)[1])
    handles[2].wait()
    assert all(h.is_completed() for h in handles), "they end in the order of issue"
    assert [t[999].item() for t, _ in ours] == [10.0, 11.0, 12.0]
    handles[0].get_future().wait()


def test_a_dead_peer_is_silent_until_the_abort(pair: list[Double]) -> None:
    done, args = reduce(1.0)
    finished = pair[0].issue("allreduce", args)
    pair[1].issue("allreduce", reduce(1.0)[1]).wait()
    finished.wait()
    tensors = [reduce(1.0) for _ in range(2)]
    handles = [pair[0].issue("allreduce", args) for _, args in tensors]
    future = handles[1].get_future()
    pair[1].abort()
    with pytest.raises(RuntimeError, match="aborted"):
        pair[1].issue("allreduce", reduce(1.0)[1]).wait()  # not where it is issued
    assert not handles[0].is_completed()
    pair[0].abort()
    for handle in handles:
        with pytest.raises(RuntimeError, match="aborted"):
            handle.wait()
    with pytest.raises(RuntimeError, match="aborted"):
        future.wait()
    for tensor, _ in tensors:
        assert not torch.equal(tensor, torch.full((1000,), 2.0)), "nothing to be trusted"
    finished.wait()  # it was complete before
    assert done[0].item() == 2.0


def test_an_operation_that_takes_too_long_ends_by_the_groups_own_timeout(
    pair: list[Double],
) -> None:
    pair[0].set_timeout(timedelta(seconds=0.2))
    with pytest.raises(RuntimeError, match="Timed out waiting 200ms for allreduce"):
        pair[0].issue("allreduce", reduce(1.0)[1]).wait()


@cache
def undisturbed(kind: str) -> Outcome:
    """Over gloo: the double must give the same without a fault, too."""
    outcome = Job("zoo.py", 3, (kind, STEPS)).run()
    assert outcome.end == "done", outcome.output
    return outcome


def dies(deaths: dict[tuple[int, int], tuple[int, bool]]) -> Callable[[int, int], None]:
    """(rank, incarnation) -> (operation on its streams that kills it, whether that has been done).

    In the middle of an operation, on the stream's thread: the script's may be anywhere.
    """

    def prepare(rank: int, incarnation: int) -> None:
        fatal = deaths.get((rank, incarnation))
        collective = FakeNccl._collective
        number = 0
        pid = os.getpid()  # asked before the replay logs such answers

        def counted(self, work):  # type: ignore[no-untyped-def]
            nonlocal number
            number += 1
            last = fatal is not None and number == fatal[0]
            if last and not fatal[1]:
                os.kill(pid, signal.SIGKILL)
            collective(self, work)
            if last:
                os.kill(pid, signal.SIGKILL)

        FakeNccl._collective = counted  # type: ignore[method-assign]

    return prepare


def run(kind: str, deaths: dict[tuple[int, int], tuple[int, bool]], **more: object) -> Outcome:
    prepare = dies(deaths)
    return Job("zoo.py", 3, (kind, STEPS), make=Double.make, in_child=prepare, **more).run()


def check(kind: str, outcome: Outcome, replaced: int) -> None:
    assert outcome.end == "done", (outcome.reason, outcome.lines, outcome.output)
    differences = same(undisturbed(kind).results, outcome.results)
    assert not differences, (differences, outcome.lines)
    assert sum(outcome.incarnations) == replaced, outcome.lines


def draw(rng: random.Random, kind: str) -> tuple[int, bool]:
    number = rng.randrange(max(8, OPERATIONS[kind] // 4), OPERATIONS[kind])
    # The last operation of a step of "plain" has a test of its own, below.
    return number, rng.random() < 0.5 and not (kind == "plain" and number % 5 == 0)


@pytest.mark.parametrize("kind", list(OPERATIONS))
def test_a_rank_dies_in_the_middle_of_an_operation(kind: str, seed: int) -> None:
    rng = random.Random(f"{seed} {kind}")
    deaths = {(rng.randrange(3), 0): draw(rng, kind)}
    print(f"{kind}: {deaths}")
    outcome = run(kind, deaths)
    if kind == "objects" and outcome.end == "restart":
        # Its subgroups: what only the dead rank had completed there, nobody can give to the others.
        assert "nobody has the result of" in outcome.reason, outcome.reason
        return
    check(kind, outcome, 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(OPERATIONS))
def test_many_deaths(kind: str, seed: int) -> None:
    rng = random.Random(f"many {seed} {kind}")
    check(kind, run(kind, {}), 0)
    for _ in range(10):
        ranks = rng.sample(range(3), rng.choice([1, 2]))
        deaths = {(rank, 0): draw(rng, kind) for rank in ranks}
        if rng.random() < 0.5:
            deaths[ranks[0], 1] = rng.randrange(1, 4), rng.random() < 0.5  # and its replacement
        print(f"{kind}: {deaths}")
        outcome = run(kind, deaths)
        if outcome.end == "restart":  # with a reason that is true of such a moment
            assert any(words in outcome.reason for words in RESTARTS), outcome.reason
            continue
        check(kind, outcome, sum(outcome.incarnations))
        assert sum(outcome.incarnations) >= 1


def test_a_rank_that_dies_one_boundary_behind() -> None:
    """It has given its last gradient and has not read the mean that came out of it, while the
    others go on to the next boundary. In place or restarted, but not wrong."""
    outcome = run("plain", {(2, 0): (50, True)})
    assert outcome.end in ("done", "restart"), outcome.output
    if outcome.end == "done":
        check("plain", outcome, 1)
    else:
        assert any(words in outcome.reason for words in RESTARTS)


@pytest.mark.parametrize("make", [None, Double.make], ids=["gloo", "double"])
def test_an_operation_that_is_open_across_the_optimizers_step(make: Any) -> None:
    """It is finished at the boundary, or can't be repeated; its input is never its result."""
    script = ("async_across.py", 3, ("10",))
    right = Job(*script).run()
    for moment in (17, 18):  # between two metrics; a metric itself
        death = at_collective({(1, 0): moment})
        outcome = Job(*script, make=make, in_child=death).run()
        if outcome.end == "restart" and moment == 18:
            assert "wait for it before the step" in outcome.reason
            continue
        assert outcome.end == "done", (outcome.reason, outcome.lines, outcome.output)
        assert not same(right.results, outcome.results), outcome.lines


@pytest.mark.parametrize("phase", ["hold", "rebuild"])
def test_again_during_the_recovery(phase: str) -> None:
    def now(job: Job) -> bool:
        return job.machine.generation == 1 and job.machine.phase == phase

    outcome = run("accumulate", {(1, 0): (9, False)}, faults=[Fault([2], when=now)])
    check("accumulate", outcome, 2)


def test_who_believes_an_end_that_came_after_the_abort_is_found_out() -> None:
    """The double is worth something: without the check, garbage reaches the weights."""
    prepare = dies({(1, 0): (30, False)})

    def believing(rank: int, incarnation: int) -> None:
        prepare(rank, incarnation)
        Queued.raise_if_aborted = lambda self: None  # type: ignore[method-assign]

    outcome = Job("zoo.py", 3, ("plain", STEPS), make=Double.make, in_child=believing).run()
    assert outcome.end != "done" or same(undisturbed("plain").results, outcome.results)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nccl_itself() -> None:
    """A group of one: creation, a real wait, abort. More needs one device per rank."""
    from flashrun.worker.nccl import Nccl

    store = c10d.HashStore()
    nccl = Nccl.make(store, 0, 1, timedelta(seconds=60), lambda: None)
    tensor = torch.ones(1 << 20, device="cuda")
    handle = nccl.issue("allreduce", ([tensor], c10d.AllreduceOptions()))
    handle.wait()
    assert tensor.sum().item() == 1 << 20
    nccl.abort()
    with pytest.raises(RuntimeError, match="aborted"):
        nccl.issue("allreduce", ([tensor], c10d.AllreduceOptions())).wait()
    handle.wait()
