"""The skipped step of an optimizer, and what else of optimizers and scalers is not as it is live.

Relied on in torch 2.13: every optimizer's ``step`` is wrapped by ``Optimizer.profile_hook_step``
when its class is first instantiated (optim/optimizer.py), with the hooks around it and the step
itself inside.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import optimizer as torch_optimizer

from flashrun.worker.replay import kinds, standins, surroundings, unprofiled
from flashrun.worker.replay.scalars import fill_scalars, log_scalars
from flashrun.worker.replay.unreal import USED, is_whole

if TYPE_CHECKING:
    from flashrun.worker.replay.session import Session

REAL_STEPS = 2  # of each optimizer in a replay: it makes its state in the first


def _has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
    )


def _nothing() -> None:
    """In place of a step."""


class Steps:
    """See the module.

    Attributes:
        known: the optimizers that there are.
        taken: steps of each in the replay so far.
        accumulates: a step has used a gradient for the second time.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.known: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.accumulates = False
        # a step of theirs changes values of Python or generators besides
        self._real_only: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.taken: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = (
            weakref.WeakKeyDictionary()
        )
        self._marked: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = (
            weakref.WeakKeyDictionary()
        )

    def install(self) -> None:
        """Wrap optimizers and scalers."""
        patches = self._session.patches
        hook = torch.optim.Optimizer.profile_hook_step
        patches.set(
            torch.optim.Optimizer, "profile_hook_step", staticmethod(self.profile_hook_step(hook))
        )
        patches.wrap(torch.optim.Optimizer, "__init__", self.init)
        if self._session.replaying:
            patches.wrap(torch.optim.Optimizer, "zero_grad", self.zero_grad)
        patches.wrap(torch.amp.GradScaler, "unscale_", self.unscale)

    def profile_hook_step(self, hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap ``Optimizer.profile_hook_step`` so that the step itself is a region."""

        session = self._session

        def wrapped(func: Callable[..., Any]) -> Any:
            inner = self.step(func)
            stepped = hook(inner)

            @functools.wraps(stepped)
            def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
                if (
                    session.unreal is None
                    or _has_hooks(optimizer)
                    or unprofiled.listening()
                    or not session.here()
                ):
                    return stepped(optimizer, *args, **kwargs)
                return inner(optimizer, *args, **kwargs)  # torch would but name it

            return step

        return wrapped

    def zero_grad(self, original: Callable[..., Any]) -> Callable[..., Any]:
        session = self._session

        def zero_grad(optimizer: Any, set_to_none: bool = True) -> None:
            if (
                not set_to_none
                or session.unreal is None
                or unprofiled.listening()
                or not hasattr(optimizer, "_zero_grad_profile_name")  # unpickled: not wrapped yet
            ):
                original(optimizer, set_to_none)
                return
            # what it does (optim/optimizer.py:1057), without a guard against Dynamo around it
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad = None

        return zero_grad

    def step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        session = self._session

        def call(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if session.depth or not session.on or get_ident() != session.main:
                return original(optimizer, *args, **kwargs)
            closure = args[0] if args else kwargs.get("closure")
            if closure is not None:
                return self._step_with_closure(original, optimizer, closure, args, kwargs)
            if not session.replaying:
                return session.run_region(lambda: original(optimizer, *args, **kwargs))[0]
            steps = self.taken.get(optimizer, 0)
            real = steps < REAL_STEPS or session.starting() or optimizer in self._real_only
            self.taken[optimizer] = steps + 1

            def run() -> Any:
                with session.quiet():
                    if optimizer in self._real_only or steps >= REAL_STEPS:
                        return original(optimizer, *args, **kwargs)
                    before = surroundings.look((optimizer, type(optimizer)))
                    value = original(optimizer, *args, **kwargs)
                    if before != surroundings.look((optimizer, type(optimizer))):
                        self._real_only.add(optimizer)
                    return value

            value = session.replay_region(run, lambda _: None if real else _nothing)[0]
            self._mark_step(optimizer)
            if session.starting() or session.near_target():
                self._note_gradients(optimizer)
            return value

        for name in ("__name__", "__qualname__", "__doc__", "__wrapped__"):
            value = getattr(original, name, original if name == "__wrapped__" else None)
            setattr(call, name, value)
        return call

    def _note_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """See whether a step uses gradients that the step before has used: they have never been
        zeroed, and nobody has those of the join's boundary."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                grad = parameter.grad
                if grad is not None and is_whole(grad):
                    own = grad.untyped_storage().__dict__
                    self.accumulates = self.accumulates or own.get(USED) is optimizer
                    own[USED] = optimizer

    def _mark_step(self, optimizer: torch.optim.Optimizer) -> None:
        """What a step changes is unreal (also after one that ran: its gradients were)."""
        unreal = self._session.unreal
        if unreal is None or self._marked.get(optimizer) == unreal.cleared:
            return
        self._marked[optimizer] = unreal.cleared
        for group in optimizer.param_groups:
            unreal.mark_all(group["params"], "an optimizer's step")
        unreal.mark_all(standins.tensors(dict(optimizer.state)), "an optimizer's step")

    def _step_with_closure(
        self,
        original: Callable[..., Any],
        optimizer: Any,
        closure: Callable[[], Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """The closure is script, not region: its reads are logged, and a replay calls it as often
        as the optimizer did (LBFGS evaluates it a number of times that depends on values)."""
        session = self._session
        rest = args[1:]
        others = {k: v for k, v in kwargs.items() if k != "closure"}
        if session.replaying:
            first: Any = None
            calls = 0
            while (record := session.peek()) is not None and record.kind == kinds.CLOSURE:
                session.take()
                with torch.enable_grad(), session.loud():
                    value = closure()
                first = value if calls == 0 else first
                calls += 1
            if session.peek() is None:
                raise session.diverged("the dead worker's log ends in a step with a closure")
            steps = self.taken.get(optimizer, 0)
            self.taken[optimizer] = steps + 1

            def lazy_state() -> None:
                if steps < REAL_STEPS and not isinstance(optimizer, torch.optim.LBFGS):
                    original(optimizer, None, *rest, **others)

            with session.quiet():
                _, ordinal = session.replay_region(lazy_state, lambda _: None)
                self._mark_step(optimizer)
                fill_scalars(session, ordinal, first)
            return first
        randomness = session.randomness

        def logged() -> Any:
            session.append(kinds.CLOSURE, 0, b"")
            depth, session.depth = session.depth, 0
            try:
                return closure()
            finally:
                session.depth = depth
                if randomness is not None:
                    randomness.begin()  # what the closure drew is logged, or the script's own

        return self._closure_region(original, optimizer, logged, rest, others)

    def _closure_region(
        self,
        original: Callable[..., Any],
        optimizer: Any,
        closure: Callable[[], Any],
        rest: tuple[Any, ...],
        others: dict[str, Any],
    ) -> Any:
        session = self._session
        depth, session.depth = session.depth, 1
        try:
            value = original(optimizer, closure, *rest, **others)
        finally:
            session.depth = depth
        # numbered after its closures, as in the replay
        _, ordinal = session.run_region(lambda: None)
        log_scalars(session, ordinal, value)
        return value

    def init(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __init__(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            self.known.add(optimizer)

        return __init__

    def unscale(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Unscaling runs for real (on zeros); its reads, if any, are torch's own."""
        session = self._session

        def unscale_(scaler: Any, optimizer: Any) -> Any:
            if not session.here():
                return original(scaler, optimizer)
            session.depth = 1
            try:
                return original(scaler, optimizer)
            finally:
                session.depth = 0

        return unscale_
