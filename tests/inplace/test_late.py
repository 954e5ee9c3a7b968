"""Models that others are trained through, that come late, are frozen or thawed: wherever a worker
dies after that, its replacement has them as it had."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from flashrun.worker.buckets import Buckets
from tests.inplace.harness import Job, Outcome, same
from tests.inplace.test_turns import struck

torch.set_num_threads(1)  # before the forks: OpenMP does not survive them

ROUNDS = "9"
TIMEOUT = 200.0  # s; never met on the way to success
# way -> boundaries
WAYS = {
    **{str(critic): (4, 4 * critic + 1, 8 * critic + 6) for critic in range(1, 6)},  # steps of it
    "every": (6, 10), "frozen": (13, 25), "joins": (5, 6, 9, 17), "attacked": (7, 12),
    "wrapped": (9, 11, 12, 14, 21), "thawed": (9, 10, 16), "added": (9, 11), "branched": (9, 16),
    "switched": (9, 16), "within": (9, 11, 12, 21), "plain": (4, 5, 6, 7), "normed": (13, 30),
    "conv": (13, 30),
}  # fmt: skip
QUICK = {("2", 9, False), ("wrapped", 11, False), ("attacked", 7, False), ("frozen", 25, True)}


@cache
def undisturbed(way: str) -> Outcome:
    outcome = Job("late.py", 2, (way, ROUNDS), timeout=TIMEOUT).run()
    assert outcome.end == "done", outcome.output
    return outcome


@pytest.mark.parametrize(
    ("way", "b", "late"),
    [
        pytest.param(way, b, late, marks=[] if (way, b, late) in QUICK else pytest.mark.slow)
        for way in WAYS
        for b in WAYS[way]
        for late in (False, True)
    ],
)
def test_a_worker_lost(way: str, b: int, late: bool) -> None:
    outcome = struck("late.py", 2, (way, ROUNDS), b, late, timeout=TIMEOUT)
    assert outcome.end == "done", (outcome.reason, outcome.lines, outcome.output)
    assert outcome.incarnations == [0, 1]
    assert not same(undisturbed(way).results, outcome.results), outcome.lines


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_what_is_told_of_buckets_before_they_are_rebuilt() -> None:
    ddp, unused = (
        DistributedDataParallel(torch.nn.Linear(2, 1), find_unused_parameters=looks)
        for looks in (False, True)
    )
    buckets = Buckets()
    buckets.note([ddp, unused])

    def now() -> list[str | None]:
        return buckets.now(look=True)

    x = torch.ones(1, 2)
    assert now() == ["", ""]
    ddp.module(x).sum().backward()
    with ddp.no_sync():
        ddp(x).sum().backward()
    assert now() == ["", ""]
    ddp(x).sum().backward()
    unused(x).sum().backward()
    assert now() == ["next", ""]
    unused(x)
    ddp(x)
    found = now()
    assert found[0] and len(found[0]) == 16 and found[1] == ""
