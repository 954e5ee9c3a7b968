"""Futures of operations, for who waits in C++: DDP's reducer at the end of backward, comm hooks.

Nobody who waits there can be held, and an exception there would be the script's. So whoever could
wait there waits here before, where a generation that fails is held, and a future is set when the
operation has really completed, and never to an exception.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from flashrun.worker.oplog import Op

if TYPE_CHECKING:
    from flashrun.worker.runtime import Runtime


class Futures:
    """See the module."""

    def __init__(self, runtime: Runtime) -> None:
        self._rt = runtime
        self._backward: list[Op] = []  # issued by the backward that runs
        self._first_at_beat: Op | None = None

    def in_backward(self, op: Op) -> None:
        """DDP waits in C++ for its futures at the end of backward. Wait before that: callbacks run
        in the order they were queued, and DDP queues its own after the last bucket (reducer.cpp,
        mark_variable_ready)."""
        self._backward.append(op)
        # For each: where backward runs within backward, each has an end of its own.
        torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)

    def _end_of_backward(self) -> None:
        while self._backward:
            self._rt.wait(self._backward[0])
            self._backward.pop(0)

    def at_beat(self) -> None:
        """For a reduction that was under way a beat ago as well, somebody may wait in C++ who is
        not known here: see to it that it is completed."""
        pending = [op for op in list(self._backward) if not op.done]
        first = pending[0] if pending else None
        if first is not None and first is self._first_at_beat:
            for op in pending:
                self.attach(op, patient=False)
        self._first_at_beat = first

    def of(self, op: Op) -> Any:
        """The future of `op`."""
        with self._rt.lock:
            if op.future is None:
                op.future = torch.futures.Future()
                if op.done:
                    op.future.set_result(op.outputs())
                elif not op.aside:
                    self.attach(op)
            return op.future

    def attach(self, op: Op, patient: bool = True) -> None:
        """Have the operation's own thread complete it.

        Args:
            patient: not where the end of backward does (that thread would want the GIL).
        """
        rt = self._rt
        if op.handle is None or (op.aside and patient):
            return

        def completed(inner: Any) -> None:
            try:
                inner.wait()
            except RuntimeError:
                # It is issued again once somebody holds for it, but who waits for the future may be
                # in C++: the end of backward, for what a hook has issued in its callback.
                threading.Thread(
                    target=rt.wait, args=(op,), name="flashrun-wait", daemon=True
                ).start()
                return
            if not op.done:
                rt.completed(op)

        op.handle.get_future().add_done_callback(completed)
