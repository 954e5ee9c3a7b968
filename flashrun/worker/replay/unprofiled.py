"""Stretches of a step are not named for a profiler while there is none.

torch 2.13 gives a name to every ``zero_grad``, ``step`` and fetch (``autograd/profiler.py:919``,
``record_function``): two operations each, whether or not anybody listens, which a replay would
follow like the script's own. They take a tenth of its time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import profiler

from flashrun.worker.replay.patching import Patches

listening: Callable[[], bool] = torch._C._autograd._profiler_enabled


def install() -> Patches:
    """Let ``record_function`` pass where no profiler is on, until this is undone."""

    def entering(original: Callable[..., Any]) -> Callable[..., Any]:
        def __enter__(self: Any) -> Any:
            return original(self) if listening() else self

        return __enter__

    def leaving(original: Callable[..., Any]) -> Callable[..., Any]:
        def __exit__(self: Any, *exception: Any) -> None:
            if self.record is not None:  # what was not entered is not left
                original(self, *exception)

        return __exit__

    def on_future(original: Callable[..., Any]) -> Callable[..., Any]:
        def _call_end_callbacks_on_future(self: Any, future: Any) -> Any:
            return original(self, future) if self.record is not None else future

        return _call_end_callbacks_on_future

    patches = Patches()
    for name, make in (
        ("__enter__", entering),
        ("__exit__", leaving),
        ("_call_end_callbacks_on_future", on_future),
    ):
        original = getattr(profiler.record_function, name)
        replacement = make(original)
        replacement.__wrapped__ = original  # type: ignore[attr-defined]  # TorchScript takes this
        patches.set(profiler.record_function, name, replacement)
    return patches
