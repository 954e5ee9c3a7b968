"""Uneven inputs under torch's `Join`: a rank without a batch left shadows the others' collectives.

It takes no steps while they do. So that boundary numbers mean the same on all ranks, each iteration
that it shadows ends at a boundary as well. What it holds there is not what the others hold: a
rank's *line* names the iterations that it has shadowed, and only ranks of one line are replicas of
each other, until the ranks' states are compared at the end of the block, when the last joiner's
model was broadcast (no optimizer's state is).

A script that does not step once per iteration (it accumulates gradients, or has two optimizers)
gets its numbers level at the end of the block; until then nobody can be replaced in place.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from flashrun.worker.process_group import FlashProcessGroup

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashrun.worker.runtime import Runtime


class _Hook(JoinHook):
    """Comes after the hooks of the script's own joinables."""

    def __init__(self, runtime: Runtime, group: FlashProcessGroup, device: torch.device) -> None:
        self._rt = runtime
        self._group = group
        self._device = device
        self._shadowed = False

    def main_hook(self) -> None:
        self._shadowed = True
        self._rt.before_step()
        self._rt.close(self._rt.boundary)  # where a fault in it can be met: no step was taken
        self._rt.at_boundary(shadowed=True)

    def post_hook(self, is_last_joiner: bool) -> None:
        """All ranks have the last joiner's model."""
        rt = self._rt
        word = torch.tensor([rt.boundary, self._shadowed], device=self._device)
        dist.all_reduce(word, dist.ReduceOp.MAX, group=self._group)
        level, uneven = word.tolist()
        if not uneven:
            return
        while rt.boundary < level:
            rt.at_boundary()
        rt.at_boundary(prove=True)


class _Boundaries(Joinable):
    """The one joinable that is ours, of the script's group."""

    def __init__(self, runtime: Runtime, group: FlashProcessGroup, device: torch.device) -> None:
        super().__init__()
        self._rt = runtime
        self._group = group
        self._device = device

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return _Hook(self._rt, self._group, self._device)

    @property
    def join_device(self) -> torch.device:
        return self._device

    @property
    def join_process_group(self) -> FlashProcessGroup:
        return self._group


def install(runtime: Runtime) -> Callable[[], None]:
    """Take part in each `Join` of all ranks; returns the undo."""
    owner: Any = Join
    original = owner.__init__

    @functools.wraps(original)
    def init(self: Join, joinables: list[Joinable], *args: Any, **kwargs: Any) -> None:
        # An optimizer (ZeRO) that joins takes steps in the iterations that it shadows.
        if joinables and not any(isinstance(j, torch.optim.Optimizer) for j in joinables):
            group = joinables[0].join_process_group
            if isinstance(group, FlashProcessGroup) and group.size() == runtime.world_size:
                ours = _Boundaries(runtime, group, joinables[0].join_device)
                joinables = [*joinables, ours]
        original(self, joinables, *args, **kwargs)

    notify = owner.notify_join_context
    works: weakref.WeakKeyDictionary[Joinable, Any] = weakref.WeakKeyDictionary()

    def notify_join_context(joinable: Joinable) -> Any:
        # DDP's reducer, which waits for it (divide_by_initial_world_size=False), keeps the C++ half
        # of it alone, and that would wait for ever.
        work = works[joinable] = notify(joinable)
        return work

    owner.__init__ = init
    owner.notify_join_context = staticmethod(notify_join_context)

    def undo() -> None:
        owner.__init__ = original
        owner.notify_join_context = staticmethod(notify)

    return undo
