"""Ways out of tensors that are not logged: in a replay, unreal values don't take them.

``__dlpack__``, the bytes of a storage, an address for ctypes. A file that the replay itself wrote
(into its scratch place) holds unreal tensors: what it loads from there is unreal again. Live there
is nothing here.
"""

from __future__ import annotations

import ctypes
import io
import os
import sys
from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch

from flashrun.worker.replay.unreal import MARK, mark_of

if TYPE_CHECKING:
    from flashrun.worker.replay.session import Session


def _refused(
    session: Session,
    what: str,
    mark: Callable[[Any], Any],
    original: Callable[..., Any],
    frames: Callable[[Any], bool] = lambda frame: True,
) -> Any:
    def way(self: Any, *args: Any, **kwargs: Any) -> Any:
        if session.replaying and not session.depth and get_ident() == session.main:
            found = mark(self)
            frame = sys._getframe(1)
            if found is not None and frames(frame):
                raise session.diverged(
                    f"{what} lets out values that the replay does not compute ({found})", frame
                )
        return original(self, *args, **kwargs)

    return way


def _uses_ctypes(frame: Any) -> bool:
    """An address is mostly asked for as an identity; not where ctypes is at hand."""
    return any(value is ctypes for value in frame.f_globals.values())


def _load(session: Session, original: Callable[..., Any]) -> Any:
    def load(f: Any, *args: Any, **kwargs: Any) -> Any:
        unreal = session.unreal
        if not session.here() or not session.replaying or unreal is None or unreal.loading:
            return original(f, *args, **kwargs)
        unreal.loading = unreal.started and _written(session, f)
        try:
            return original(f, *args, **kwargs)
        finally:
            unreal.loading = False

    return load


def _written(session: Session, f: Any) -> bool:
    """Whether this replay wrote what is in `f`; memory counts as written by it."""
    name = f if isinstance(f, (str, os.PathLike)) else getattr(f, "name", None)
    if not isinstance(name, (str, os.PathLike)):
        return not isinstance(f, io.IOBase) or isinstance(f, io.BytesIO)
    return session.view is None or session.view.wrote(name)


def _own(session: Session, original: Callable[..., Any]) -> Any:
    """DDP compares shapes between ranks and reads the answers in C++: none of the script's."""

    def verify(*args: Any, **kwargs: Any) -> Any:
        depth, session.depth = session.depth, 1
        try:
            return original(*args, **kwargs)
        finally:
            session.depth = depth

    return verify


def install(session: Session) -> None:
    """Watch the ways out, in a catch-up."""
    if not session.replaying:
        return
    wrap = session.patches.wrap
    tensor = torch.Tensor
    storage = torch.UntypedStorage
    wrap(tensor, "__dlpack__", partial(_refused, session, "__dlpack__", mark_of))
    wrap(torch, "to_dlpack", partial(_refused, session, "to_dlpack", mark_of))
    wrap(
        tensor,
        "data_ptr",
        lambda original: _refused(session, "data_ptr", mark_of, original, _uses_ctypes),
    )
    for name in ("__getitem__", "tolist"):
        wrap(
            storage,
            name,
            partial(_refused, session, f"a storage's {name}", lambda s: s.__dict__.get(MARK)),
        )
    wrap(torch, "load", partial(_load, session))
    wrap(torch.distributed, "_verify_params_across_processes", partial(_own, session))
