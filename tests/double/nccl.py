"""A double of ``ProcessGroupNCCL`` for the CPU, on real processes and sockets.

It does what makes NCCL hard, and does it on purpose:

- operations queue on a stream: a thread runs them one after the other in the order of issue, and
  ``issue`` and ``Work.wait`` return at once;
- a peer that died is silence: an operation that can't go on wakes nobody and raises nothing, after
  it has spoilt part of its outputs;
- ``abort`` makes everything that was queued end as if it had completed, with garbage in all
  outputs, written some time after ``abort`` has returned.

Who reads a result without waiting for the mark, or believes an end that came after an abort, trains
with garbage, and the weights show it. Underneath, a gloo group carries copies of the tensors.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch

from flashrun.worker.communicator import Gloo
from flashrun.worker.nccl import Queued
from flashrun.worker.oplog import KINDS, flatten, substitute

_FOR_EVER = timedelta(days=1)
_LATENCY, _DRAIN = 0.0005, 0.01  # s, at most: before an operation runs; from abort to garbage


class FakeWork:
    """As ``WorkNCCL``: its ``wait`` is the stream's business, not the host's."""

    def __init__(self, kind: str, args: tuple[Any, ...]) -> None:
        self.kind = kind
        self.args = args
        self.ended = threading.Event()

    def wait(self) -> bool:
        return True


class FakeMark:
    """As an event behind the operation: passed once it has ended, however it has."""

    def __init__(self, work: FakeWork) -> None:
        self._ended = work.ended

    def wait(self) -> None:
        self._ended.wait()

    def passed(self) -> bool:
        return self._ended.is_set()


def spoil(args: tuple[Any, ...], kind: str, rng: random.Random, share: float = 1.0) -> None:
    """Overwrite the outputs of an operation, or the first part of each."""
    with torch.no_grad():
        for tensor in flatten(KINDS[kind].outputs(args)):
            flat = tensor.detach().view(-1)
            number = int(flat.numel() * share)
            if flat.is_floating_point():
                flat[:number] = rng.choice([float("nan"), 1e30, -3.0])
            else:
                flat[:number] = rng.randrange(1, 100)


class FakeNccl:
    """See the module. Its methods are those of ``ProcessGroupNCCL``."""

    def __init__(self, gloo: Gloo, seed: int) -> None:
        self._gloo = gloo
        self._rng = random.Random(seed)
        self._stream: SimpleQueue[FakeWork | None] = SimpleQueue()
        self._abort = threading.Event()
        self._issuing = threading.Lock()
        self.thread = threading.Thread(target=self._run, name="fake-stream", daemon=True)
        self.thread.start()

    def __getattr__(self, kind: str) -> Callable[..., FakeWork]:
        if kind not in KINDS:
            raise AttributeError(kind)

        def start(*args: Any) -> FakeWork:
            with self._issuing:
                if self._abort.is_set():
                    raise RuntimeError("NCCL communicator was aborted")  # as torch does
                work = FakeWork(kind, args)
                self._stream.put(work)
                return work

        return start

    def abort(self) -> None:
        with self._issuing:
            self._abort.set()
            self._stream.put(None)
        self._gloo.abort()

    def _run(self) -> None:
        while (work := self._stream.get()) is not None:
            if not self._abort.is_set():
                time.sleep(self._rng.uniform(0, _LATENCY))
                self._collective(work)
            if self._abort.is_set():
                time.sleep(self._rng.uniform(0, _DRAIN))
                spoil(work.args, work.kind, self._rng)
            work.ended.set()

    def _collective(self, work: FakeWork) -> None:
        outputs = list(flatten(KINDS[work.kind].outputs(work.args)))
        by = {id(t): t.detach().clone() for t in flatten(work.args)}
        staged = tuple(substitute(arg, by) for arg in work.args)
        try:
            self._gloo.issue(work.kind, staged).wait()
        except RuntimeError:
            spoil(work.args, work.kind, self._rng, 0.5)
            self._abort.wait()  # nobody says anything
            return
        with torch.no_grad():
            for tensor in outputs:
                tensor.detach().copy_(by[id(tensor)])


class Double(Queued):
    """The communicator that the tests use in NCCL's place."""

    @classmethod
    def make(
        cls, store: Any, rank: int, size: int, timeout: timedelta, wanted: Callable[[], None]
    ) -> Double:
        """See `flashrun.worker.communicator.Maker`."""
        gloo = Gloo.make(store, rank, size, timeout, wanted)
        gloo.set_timeout(_FOR_EVER)  # NCCL has no timeouts
        return cls(FakeNccl(gloo, rank), FakeMark, timeout)
