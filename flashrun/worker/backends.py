"""Which of the script's backends are carried by us, and by what."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from flashrun.worker.communicator import Communicator, Gloo, Handle, Maker
from flashrun.worker.oplog import flatten

Choose = Callable[[str], Maker | None]


def choose(backend: str) -> Maker | None:
    """What builds communicators for `backend`; None: torch does as ever, and it is not recovered.

    Args:
        backend: as given to ``init_process_group``; "undefined": nothing was.
    """
    cuda = torch.cuda.is_available()
    if backend in ("gloo", "cpu:gloo"):
        return Gloo.make
    if backend in ("undefined", "cpu:gloo,cuda:nccl"):
        return ByDevice.make if cuda else Gloo.make
    if backend in ("nccl", "cuda:nccl") and cuda:
        return _nccl()
    return None


def _nccl() -> Maker:
    from flashrun.worker.nccl import Nccl

    return Nccl.make


class ByDevice:
    """Gloo for what is on the CPU, NCCL for the rest: what a script gets that names no backend."""

    ordered = False

    def __init__(self, cpu: Communicator, cuda: Communicator) -> None:
        self._cpu, self._cuda = cpu, cuda

    @classmethod
    def make(
        cls, store: Any, rank: int, size: int, timeout: timedelta, wanted: Callable[[], None]
    ) -> ByDevice:
        """See `Maker`."""
        cpu = Gloo.make(store, rank, size, timeout, wanted)
        own = c10d.PrefixStore("cuda", store)
        return cls(cpu, _nccl()(own, rank, size, timeout, wanted))

    def issue(self, kind: str, args: tuple[Any, ...]) -> Handle:
        tensors = flatten(args)
        cuda = not tensors or tensors[0].device.type == "cuda"  # a barrier is NCCL's, as in torch
        if kind == "monitored_barrier":
            cuda = False
        return (self._cuda if cuda else self._cpu).issue(kind, args)

    def abort(self) -> None:
        self._cpu.abort()
        self._cuda.abort()

    def set_timeout(self, timeout: timedelta) -> None:
        self._cpu.set_timeout(timeout)
        self._cuda.set_timeout(timeout)
