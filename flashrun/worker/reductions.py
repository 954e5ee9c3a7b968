"""DDP's reductions of gradients, which may be made in a copy of the bucket.

An all-reduce works in place: its input has to be copied before if it is to be issued again, and its
result is gone once the script clips the gradients or the next backward fills the bucket. DDP's
reducer takes the result from the operation's future and copies it into the gradients. So where the
reducer itself asks, the copy is what is reduced: one copy keeps both, the input in the bucket until
the next backward (by then this rank needs it no more), and the result in the copy.

Relied on in torch 2.13: ``Reducer::run_allreduce_hook`` gives the bucket to
``ProcessGroup::allreduce`` and ``finalize_backward`` reads ``future_work->value()``
(csrc/distributed/c10d/reducer.cpp; so do the built-in C++ hooks); it runs in hooks of autograd, so
that the frame that calls is ``_engine_run_backward`` (autograd/graph.py), or none in the thread of
a device. Its map of used parameters, an integer tensor, is reduced in place.

Nobody but the end of backward completes such an operation, before the reducer waits for it (see
`futures.Futures.in_backward`). The first iteration of a static graph is another matter: there the
reducer issues and waits in one go, ``Reducer._delay_all_reduce``, after everything that was queued.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch._C import _distributed_c10d as c10d

if TYPE_CHECKING:
    from flashrun.worker.oplog import Op

_FILE = os.path.join("torch", "autograd", "graph.py")
_NAME = "_engine_run_backward"
_in_one_go: list[bool] = []
_OURS = os.path.dirname(os.path.abspath(__file__))


def by_reducer(op: Op) -> bool:
    """Whether C++ has issued this operation in backward, for a bucket of gradients. Called below
    the process group's method, whose caller is looked at."""
    if op.kind != "allreduce" or not op.in_backward or _in_one_go:
        return False
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back  # type: ignore[assignment]
    # A device's own thread of autograd has no Python above, but for hooks, which have frames.
    if frame is not None and not (
        frame.f_code.co_name == _NAME and frame.f_code.co_filename.endswith(_FILE)
    ):
        return False
    return all(t.is_floating_point() or t.is_complex() for t in op.args[0])


def install() -> Callable[[], None]:
    """Note when a reducer issues and waits in one go; returns the undo."""
    reducer: Any = c10d.Reducer
    original = reducer._delay_all_reduce

    @functools.wraps(original)
    def delayed(self: Any) -> None:
        _in_one_go.append(True)
        try:
            original(self)
        finally:
            _in_one_go.pop()

    reducer._delay_all_reduce = delayed

    def undo() -> None:
        reducer._delay_all_reduce = original

    return undo
