"""Object collectives (``torch/distributed/distributed_c10d.py``, torch 2.13): what they gave goes
to the log; in catch-up it comes from there and no collective is issued.

A rank's own objects are pickled by torch to be sent, so what is logged here is picklable. The log
is read by a process of the same user on the same node; nothing is unpickled that came over the
network other than through torch itself.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from flashrun.worker.replay import kinds

if TYPE_CHECKING:
    from types import FrameType

    from flashrun.worker.replay.session import Session

# name of the function -> position and name of the list that it fills in
_FILLS = {
    "broadcast_object_list": (0, "object_list"),
    "all_gather_object": (0, "object_list"),
    "gather_object": (1, "object_gather_list"),
    "scatter_object_list": (0, "scatter_object_output_list"),
    "recv_object_list": (0, "object_list"),
}


def _wrapped(
    session: Session, place: int, name: str, original: Callable[..., Any]
) -> Callable[..., Any]:
    def collective(*args: Any, **kwargs: Any) -> Any:
        if not session.here():
            return original(*args, **kwargs)
        frame = sys._getframe(1)
        target = args[place] if len(args) > place else kwargs.get(name)
        if session.replaying:
            record = session.expect(kinds.OBJECTS, frame)
            if record is None:
                return past_the_end(frame, target, args, kwargs)
            if session.completes():
                issued(args, kwargs)
            session.depth = 1  # what it unpickles is the dead worker's, and real
            try:
                result, values = pickle.loads(record.payload)  # noqa: S301  (own log, same user)
            finally:
                session.depth = 0
            if target is not None and values is not None:
                target[:] = values
            return result
        return recorded(frame, target, args, kwargs)

    def issued(args: Any, kwargs: Any) -> None:
        """Collectives of this interval are counted; what this one gives is in the log."""
        try:
            inside(args, kwargs)
        except Exception:  # noqa: BLE001  # nobody has its result any more
            session.results_missing += 1

    def inside(args: Any, kwargs: Any) -> Any:
        """The collective; what it calls is no read of the script's own."""
        session.depth = 1
        try:
            return original(*args, **kwargs)
        finally:
            session.depth = 0

    def recorded(frame: FrameType, target: Any, args: Any, kwargs: Any) -> Any:
        result = inside(args, kwargs)
        values = list(target) if target is not None else None
        session.append(kinds.OBJECTS, session.site(frame), pickle.dumps((result, values)))
        return result

    def past_the_end(frame: FrameType, target: Any, args: Any, kwargs: Any) -> Any:
        """The dead worker took part, and had not logged what it got: the survivors have it."""
        before = session.results_missing
        if session.completes():
            result = recorded(frame, target, args, kwargs)
            if session.results_missing == before:
                return result
        raise session.diverged(
            "the dead worker's log ends before an object collective, whose result nobody has",
            frame,
        )

    return collective


def install(session: Session) -> None:
    """Wrap the object collectives where scripts find them."""
    import torch.distributed as dist

    if not dist.is_available():
        return
    from torch.distributed import distributed_c10d

    for name, (place, argument) in _FILLS.items():
        for owner in (distributed_c10d, dist):
            session.patches.wrap(owner, name, partial(_wrapped, session, place, argument))
