"""The communicator over gloo: a wait ends once it was cut, whether or not gloo noticed."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch._C import _distributed_c10d as c10d

from flashrun.worker import communicator
from flashrun.worker.communicator import Gloo
from tests import helpers


@pytest.fixture
def pair() -> Iterator[list[Gloo]]:
    """The two ends of one communicator, in this process."""
    store = c10d.HashStore()

    def make(rank: int) -> Gloo:
        return Gloo.make(store, rank, 2, timedelta(seconds=60), lambda: None)

    # One after the other would wait for each other; side by side, each takes the other's sockets
    # for its own as well, which cuts both.
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(make, range(2)))
    ends = helpers.ends_of_communicators()
    yield both
    both.clear()  # closes what they listen on
    gc.collect()
    assert all(end.wait(60) for end in ends)


def reduce(one: Gloo, tensor: torch.Tensor) -> communicator.Handle:
    return one.issue("allreduce", ([tensor], c10d.AllreduceOptions()))


def test_both_come(pair: list[Gloo]) -> None:
    tensors = [torch.ones(3) * (rank + 1) for rank in range(2)]
    handles = [reduce(one, tensor) for one, tensor in zip(pair, tensors, strict=True)]
    for handle in handles:
        handle.wait()
    assert all(torch.equal(tensor, torch.full((3,), 3.0)) for tensor in tensors)


def test_a_cut_wakes_who_waits(pair: list[Gloo], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is gloo that ends the wait: neither the group's timeout, nor the end of a slice of it."""
    monkeypatch.setattr(communicator, "CUT_GRACE", 1e9)
    monkeypatch.setattr(communicator, "_SLICE", timedelta(hours=1))
    handle = reduce(pair[0], torch.ones(3))
    threading.Timer(0.05, pair[0].abort).start()
    with pytest.raises(RuntimeError) as caught:
        handle.wait()
    assert not communicator.timed_out(caught.value), caught.value
    assert handle.is_completed()


def test_a_cut_that_gloo_does_not_notice(
    pair: list[Gloo], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen in the soak: an operation that was being issued at that moment waited 30 minutes."""
    monkeypatch.setattr(communicator, "CUT_GRACE", 0.1)
    monkeypatch.setattr(communicator, "_SLICE", timedelta(seconds=0.05))
    handle = reduce(pair[0], torch.ones(3))
    pair[0]._sockets.clear()
    pair[0].abort()
    with pytest.raises(RuntimeError, match="cut off, and did not notice"):
        handle.wait()
    assert not handle.is_completed()
    reduce(pair[1], torch.ones(3)).wait()  # after all: nothing is left under way


def test_nobody_waits_for_a_thread_of_a_communicator_that_was_cut(pair: list[Gloo]) -> None:
    """Seen in the soak: the one that was replaced was dropped at the next step, in the script's
    thread, which waited there for that operation."""
    ended = threading.Event()
    weakref.finalize(pair[0]._group, ended.set)
    handle: communicator.Handle | None = reduce(pair[0], torch.ones(3))
    pair[0]._sockets.clear()
    pair[0].abort()
    del handle, pair[0]
    gc.collect()
    reduce(pair[0], torch.ones(3)).wait()  # the other end, after all: the first one is still there
    assert ended.wait(60)


ENDS = """
import sys
from datetime import timedelta
from concurrent.futures import ThreadPoolExecutor
import torch
from torch._C import _distributed_c10d as c10d
from flashrun.worker.communicator import Gloo

store = c10d.HashStore()
with ThreadPoolExecutor(2) as pool:
    both = list(pool.map(
        lambda rank: Gloo.make(store, rank, 2, timedelta(hours=1), lambda: None), range(2)))
handle = both[0].issue("allreduce", ([torch.ones(3)], c10d.AllreduceOptions()))
both[0]._sockets.clear()
both[0].abort()
{kept}
print("ends", flush=True)
"""


@pytest.mark.parametrize(
    "kept",
    [
        "both.append(both)",  # found by the collector alone, when everything ends
        "import flashrun.worker.communicator as its; its.kept = both",  # goes with the module
        "sys.kept = both",  # goes last
    ],
)
def test_a_process_ends_whatever_a_cut_communicator_waits_for(kept: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ENDS.replace("{kept}", kept)],
        timeout=60, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout) == (0, "ends\n"), ended.stderr
