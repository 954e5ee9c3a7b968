"""The script's other threads in a replay.

What they read is not logged, since threads take turns differently in each run. So a value that the
replay does not compute must not be read by one of them: the replay ends with the reason. Their
operations on such values are followed as those of the main thread are (`unreal`; modes of torch are
each thread's own). Live there is nothing here.

Relied on in Python: ``threading.Thread._bootstrap_inner`` is what runs in a new thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flashrun.worker.replay.api import Divergence
from flashrun.worker.replay.unreal import Mark, mark_of

if TYPE_CHECKING:
    from flashrun.worker.replay.session import Session


class _Followed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows unreal values on one thread."""

    def __init__(self, session: Session) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._session = session

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        unreal = self._session.unreal
        if unreal is None:  # the replay is over
            return func(*args, **(kwargs or {}))
        try:
            return unreal.__torch_dispatch__(func, types, args, kwargs)
        except Divergence as error:
            self._session.refuse(f"a thread of the script reads what is in no log: {error}")


def check(session: Session, tensor: torch.Tensor) -> None:
    """A read of this tensor, which torch does without an operation."""
    mark: Mark | None = mark_of(tensor) if isinstance(tensor, torch.Tensor) else None
    if mark is not None:
        session.refuse(
            "a thread of the script reads what is in no log: values that the replay does not"
            f" compute ({mark})"
        )


def _is_ours(thread: threading.Thread) -> bool:
    target = getattr(thread, "_target", None)
    modules = (type(thread).__module__, getattr(target, "__module__", None) or "")
    return any(name.startswith("flashrun.") for name in modules)


def install(session: Session) -> None:
    """Follow the threads that begin in a catch-up."""
    if not session.replaying:
        return

    def make(original: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
        def _bootstrap_inner(thread: threading.Thread) -> None:
            if _is_ours(thread) or not session.replaying:
                return original(thread)
            with _Followed(session):
                return original(thread)

        return _bootstrap_inner

    session.patches.wrap(threading.Thread, "_bootstrap_inner", make)
