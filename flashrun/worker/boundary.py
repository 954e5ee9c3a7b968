"""Counts step boundaries: the returns of outermost optimizer steps.

Relied on in torch 2.13: every optimizer class has its ``step`` wrapped by
``Optimizer.profile_hook_step`` when it is first instantiated (optim/optimizer.py:567), and
``GradScaler.step`` (amp/grad_scaler.py:375) is the attempt that counts, whether or not it skips.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from flashrun.worker.runtime import Runtime


def install(runtime: Runtime) -> Callable[[], None]:
    """Hook the steps; returns the undo. Comes after the replay's hooks, to be outside of them."""
    optimizer: Any = torch.optim.Optimizer
    scaler: Any = torch.amp.GradScaler
    hook = optimizer.__dict__["profile_hook_step"]
    scaled = scaler.step
    main = threading.get_ident()
    inside = False

    def counted(step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if inside:
                return step(*args, **kwargs)
            if threading.get_ident() != main:
                return step(*args, **kwargs)
            inside = True
            runtime.before_step()
            try:
                result = step(*args, **kwargs)
            finally:
                inside = False
                runtime.stepping.end()
            runtime.at_boundary()
            return result

        return wrapper

    def watched(step: Callable[..., Any]) -> Callable[..., Any]:
        """The step itself, inside of its hooks and of the replay's log."""

        @functools.wraps(step)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            laggard = runtime.laggard
            closure = args[1] if len(args) > 1 else kwargs.get("closure")
            mine = inside and threading.get_ident() == main
            if closure is None:
                if mine and not runtime.stepping.now:
                    runtime.stepping.begin()
                return step(*args, **kwargs)
            if laggard.running:
                runtime.diverged(laggard.called_back())

            def evaluate() -> Any:
                loss = closure()
                if mine and not runtime.stepping.now:  # nothing is changed before it knows a loss
                    runtime.stepping.begin()
                return loss

            laggard.in_closure = True
            try:
                if len(args) > 1:
                    return step(args[0], evaluate, *args[2:], **kwargs)
                return step(*args, **{**kwargs, "closure": evaluate})
            finally:
                laggard.in_closure = False

        return wrapper

    def profile_hook_step(step: Callable[..., Any]) -> Callable[..., Any]:
        return counted(hook.__func__(watched(step)))

    def scaler_step(self: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside or not self._enabled or threading.get_ident() != main:
            return scaled(self, target, *args, **kwargs)
        inside = True
        runtime.before_step()
        try:
            result = scaled(self, target, *args, **kwargs)
        finally:
            inside = False
            runtime.stepping.end()
        runtime.at_boundary()
        return result

    optimizer.profile_hook_step = staticmethod(profile_hook_step)
    scaler.step = scaler_step

    def undo() -> None:
        optimizer.profile_hook_step = hook
        scaler.step = scaled

    return undo
