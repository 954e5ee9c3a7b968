"""Values that enter Python through a result's shape: ``len(x[mask])``, ``nonzero``, ``unique``.

Live, the shape that such a function gave is logged. In a replay whose input is unreal, the result
gets the dead worker's shape; its values stay unreal.
"""

from __future__ import annotations

import marshal
import sys
from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch

from flashrun.worker.replay import kinds
from flashrun.worker.replay.unreal import mark_of, tensors_in

if TYPE_CHECKING:
    from types import FrameType

    from flashrun.worker.replay.session import Session

_MASKS = (torch.bool, torch.uint8)
_BOTH = (  # functions that are methods as well
    "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount",
    "repeat_interleave",
)  # fmt: skip


def _always(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return True


def _condition_only(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return len(args) + len(kwargs) == 1


def _shapes(result: Any) -> list[tuple[int, ...]]:
    return [tuple(t.shape) for t in tensors_in((result,))]


def _door(
    session: Session,
    applies: Callable[[tuple[Any, ...], dict[str, Any]], bool],
    original: Callable[..., Any],
) -> Any:
    def door(*args: Any, **kwargs: Any) -> Any:
        if (
            session.depth
            or not session.on
            or get_ident() != session.main
            or not applies(args, kwargs)
        ):
            return original(*args, **kwargs)
        frame = sys._getframe(1)
        if session.replaying:
            return _replayed(session, original, frame, args, kwargs)
        result = _inside(session, original, args, kwargs)
        session.append(kinds.SHAPES, session.site(frame), marshal.dumps(_shapes(result)))
        return result

    return door


def _inside(
    session: Session, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call `original`; what it calls is no read of the script's own."""
    session.depth = 1
    try:
        return original(*args, **kwargs)
    finally:
        session.depth = 0


def _replayed(
    session: Session,
    original: Callable[..., Any],
    frame: FrameType,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    name = getattr(original, "__name__", "indexing")
    record = session.expect(kinds.SHAPES, frame)
    unreal = any(mark_of(t) for t in tensors_in((*args, *kwargs.values())))
    if record is None and unreal:
        raise session.diverged(
            f"the log ends before '{name}' of values that the replay does not compute",
            frame,
        )
    try:
        result = _inside(session, original, args, kwargs)
    except (RuntimeError, IndexError) as error:
        if not unreal:
            raise
        raise session.diverged(f"'{name}' raised {error!r} on unreal values", frame) from error
    if record is None:
        session.append(kinds.SHAPES, session.site(frame), marshal.dumps(_shapes(result)))
        return result
    logged = marshal.loads(record.payload)
    if _shapes(result) == logged:
        return result
    if not unreal:
        raise session.diverged(f"'{name}' gave {_shapes(result)} and not {logged} as before", frame)
    if len(_shapes(result)) != len(logged):
        raise session.diverged(f"'{name}' gave another number of results than before", frame)
    return _reshaped(session, result, iter(logged))


def _reshaped(session: Session, result: Any, shapes: Any) -> Any:
    """Unreal results of the logged shapes in place of `result`."""
    if isinstance(result, torch.Tensor):
        with session.quiet():
            new = result.detach().new_zeros(next(shapes))
            if result.requires_grad:
                new = new.requires_grad_().clone()  # as a result: not a leaf
            if session.unreal is not None:
                session.unreal.mark(new, "a result of a logged shape")
        return new
    return type(result)([_reshaped(session, member, shapes) for member in result])


def _index_door(session: Session, original: Callable[..., Any]) -> Any:
    """``x[mask]``: any other index passes through at little cost."""
    masked = _door(session, _always, original)

    def __getitem__(self: torch.Tensor, index: Any) -> Any:
        if isinstance(index, torch.Tensor):
            if index.dtype in _MASKS:
                return masked(self, index)
        elif type(index) is tuple or type(index) is list:
            for member in index:
                if isinstance(member, torch.Tensor) and member.dtype in _MASKS:
                    return masked(self, index)
        return original(self, index)

    return __getitem__


def install(session: Session) -> None:
    """Put the doors in place."""
    wrap = session.patches.wrap
    always = partial(_door, session, _always)
    for name in _BOTH:
        wrap(torch, name, always)
        wrap(torch.Tensor, name, always)
    wrap(torch, "where", partial(_door, session, _condition_only))
    wrap(torch.nn.functional, "one_hot", always)
    wrap(torch.Tensor, "__getitem__", partial(_index_door, session))
