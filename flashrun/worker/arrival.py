"""Where a catch-up ends: at the boundary at which the survivors are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashrun.worker.replay.api import Divergence, Mode
from flashrun.worker.replay.unreal import mark_of

if TYPE_CHECKING:
    from flashrun.worker.runtime import Runtime


def _hook_states_lost(b: int) -> Divergence:
    return Divergence(
        f"what DDP's PowerSGD hook kept at boundary {b} is each rank's own, and the worker died"
        " before it had written that"
    )


class Arrival:
    """See the module."""

    def __init__(self, runtime: Runtime) -> None:
        self._rt = runtime

    def at_boundary(self, b: int) -> None:
        """In catch-up: stop where the survivors are; do not run past what the log covers before the
        target is known (rule 5)."""
        rt = self._rt
        if (
            rt.target is None
            and not rt.no_log
            and b >= max(rt.replay.newest_boundary() - 1, 0)
        ):
            rt.await_target()
        if rt.target is not None and rt.copied is not None:
            try:
                rt.copied.reaches(rt.target, rt.replay.newest_boundary())
            except Divergence as error:
                rt.diverged(error)
        if rt.target is None or b < rt.target:
            if b + 1 == rt.target and rt.replay.newest_boundary() <= b and not rt.no_log:
                # A hook's state comes out of local gradients, which nobody can give.
                if not rt.hook_states.written(b + 1):
                    rt.diverged(_hook_states_lost(b + 1))
                try:
                    rt.completion.begin(b)
                except Divergence as error:
                    rt.diverged(error)
            return
        if b > rt.target:
            rt.diverged(Divergence(f"at boundary {b}, but the survivors are at {rt.target}"))
        if b:
            rt.own.find(rt.state.layout().tensors.values(), replacement=True)
            rt.own.taken_at = b
            rt.own.taken = rt.own.missing(b, rt.own.offered, lambda t: mark_of(t) is None)
        try:
            if b and not rt.hook_states.restore(b):
                raise _hook_states_lost(b)
            if not rt.no_log:
                rt.replay.finish_catchup(rt, b)
        except Divergence as error:
            rt.diverged(error)
        rt.mode = Mode.LIVE
        if b == 0:
            rt.has_state = True
        rt.state.at_boundary(b)  # not the contents yet, but what there is
        with rt.hold_lock:
            rt.enter()
