"""A process group that ``destroy_process_group`` gave up is freed late, and without the GIL.

The last thread to touch a gloo operation may be gloo's own, which needs the GIL to free a tensor
that Python has seen (2.13: ProcessGroupGloo.cpp, ``runLoop``: ``workInProgress_[i].reset()``).
``ProcessGroupGloo``'s destructor joins that thread. torch's Python wrapper lets go of the GIL for
it (csrc/distributed/c10d/init.cpp, ``IntrusivePtrNoGilDestructor``), but a DDP model's ``Reducer``,
which holds the group as well, is freed with the GIL held. So a script that destroys the group and
then drops its model within a moment of its last collective can hang for ever, under any launcher.
Here a group outlives its model: the reference that is dropped last is the wrapper's.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import time
from collections import deque
from collections.abc import Callable
from typing import Any

# A script that makes and destroys groups all the time must not collect their threads and sockets.
_MOST_KEPT = 16
_KEPT_FOR = 30.0  # seconds; gloo's thread needs milliseconds


class _Kept:
    """Groups that were destroyed a moment ago, oldest first."""

    def __init__(self) -> None:
        self._groups: deque[tuple[float, Any]] = deque()
        self._registered = False

    def add(self, groups: list[Any]) -> None:
        if not self._registered:
            atexit.register(self.keep_for_ever)
            self._registered = True
        now = time.monotonic()
        self._groups.extend((now, group) for group in groups)
        while self._groups and (
            len(self._groups) > _MOST_KEPT or self._groups[0][0] < now - _KEPT_FOR
        ):
            self._groups.popleft()

    def keep_for_ever(self) -> None:
        """At the end of the process the system frees the rest, in no order that could hang."""
        for _, group in self._groups:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def install() -> Callable[[], None]:
    """Wrap ``torch.distributed.destroy_process_group`` (2.13: distributed_c10d.py, line 2361).

    Returns:
        What undoes it.
    """
    import torch.distributed
    from torch.distributed import distributed_c10d

    c10d: Any = distributed_c10d
    top: Any = torch.distributed
    original = c10d.destroy_process_group
    kept = _Kept()

    @functools.wraps(original)
    def destroy_process_group(group: Any = None) -> Any:
        world = group is None or group == c10d.GroupMember.WORLD
        groups = list(c10d._world.pg_map) if world else [group]
        result = original(group)
        kept.add(groups)
        return result

    def undo() -> None:
        put(original)
        atexit.unregister(kept.keep_for_ever)

    def put(function: Any) -> None:
        for module in (c10d, top):
            module.destroy_process_group = function

    put(destroy_process_group)
    return undo
