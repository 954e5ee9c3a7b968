"""The skipped regions: backward, and what else makes them up (see `served` for the forward of an
outermost module, `steps` for an optimizer's step).

Relied on in torch 2.13: ``Tensor.backward`` ends in ``torch.autograd.backward`` (_tensor.py).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch

from flashrun.worker.replay import kinds, standins
from flashrun.worker.replay.doors import fill_scalar
from flashrun.worker.replay.gradients import Gradients, is_stood_for
from flashrun.worker.replay.outputs import Outputs, several
from flashrun.worker.replay.scalars import packed, scalars, unpacked
from flashrun.worker.replay.served import Forwards, Served
from flashrun.worker.replay.steps import Steps

if TYPE_CHECKING:
    from flashrun.worker.replay.session import Session


_OF_BACKWARD = "gradient", "retain_graph", "create_graph", "inputs"
_OF_GRAD = "grad_outputs", "retain_graph", "create_graph"


def _within(context: Callable[[], Any], real: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        with context():
            return real()

    return run


class Regions:
    """Runs regions, for real or not."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._unused: dict[tuple[int, int], tuple[bool, ...]] = {}
        self.steps = Steps(session)
        self.outputs = Outputs(session, self.steps.known, self.steps.taken)
        known: weakref.WeakKeyDictionary[torch.nn.Module, Forwards] = weakref.WeakKeyDictionary()
        self.gradients = Gradients(session, self.steps.known, known)
        self.forwards = Served(session, known, self.gradients, self.outputs)

    def forget(self) -> None:
        """The replay is over: let go of what stood for results."""
        self.forwards.forget()
        self.gradients.forget()

    # --- backward

    def backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        session = self.session

        def call(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if session.depth or not session.on or get_ident() != session.main:
                return original(tensors, *args, **kwargs)
            frame = sys._getframe(1)
            if session.poison is not None:
                session.poison.check(tensors)
            given = {**dict(zip(_OF_BACKWARD, args, strict=False)), **kwargs}
            real = self._through_outputs(
                lambda **also: original(tensors, *args, **kwargs, **also), tensors, given
            )
            if session.replaying:
                retain = bool(given.get("retain_graph") or given.get("create_graph"))
                return self._replay_backward(real, tensors, frame, retain)
            # Before it runs: the peers may pass the boundary as soon as they have this rank's last
            # gradient, and a replacement can't compute the loss again (its weights are newer).
            payload = packed(session.ordinal + 1, scalars(tensors))
            session.append(kinds.LOSS, session.site(frame), payload)
            return session.run_region(real)[0]

        return call

    def _through_outputs(
        self, real: Callable[..., Any], tensors: Any, given: dict[str, Any]
    ) -> Callable[[], Any]:
        """The script's backward, and what follows it in outputs that were computed again."""
        outputs, session = self.outputs, self.session
        remembers = session.replaying and session.remembers_outputs()
        if not remembers and not outputs.waits():
            return real
        if given.get("create_graph") or given.get("inputs") is not None:
            outputs.partly(tensors)
            return real
        retain = bool(given.get("retain_graph"))
        if remembers and not retain:
            outputs.spend(tensors)
        if not outputs.waits():
            return real
        return lambda: outputs.backward(real, tensors, retain)

    def _replay_backward(
        self, real: Callable[[], Any], tensors: Any, frame: Any, retain: bool
    ) -> Any:
        session = self.session
        site = session.site(frame)
        logged = self._logged_loss(tensors, site, frame)
        completing = session.completes()
        ran = self.forwards.begin_backward(tensors, retain)
        run = ran or session.starting() or completing or session.peek() is None
        results, missing = session.results_given, session.results_missing
        if run:
            parameters = self.gradients.parameters()
            others = self.gradients.others(tensors, parameters)
            before = [(p.grad, p.grad._version if p.grad is not None else 0) for p in parameters]
            value, _ = session.replay_region(real, lambda _: None)
            touched = [
                p
                for p, (grad, version) in zip(parameters, before, strict=True)
                if p.grad is not None and (p.grad is not grad or p.grad._version != version)
            ]
            if not (session.starting() or completing or session.past is not None):
                # Some of its graph may be stand-ins', which give nothing.
                behind = [p for p in self.gradients.led_to(tensors) if p.grad is None]
                self.gradients.give_zeros(behind)
                touched += behind
            self.gradients.note(site, touched, bool(others))
            reduced: set[int] = set()
            all_given = session.results_given > results and session.results_missing == missing
            if completing and all_given:
                reduced = self.gradients.reduced_by_ddp()
            if session.unreal is not None:
                # What DDP has filled in with reductions that are real has lost its mark there.
                given = [p for p in touched if id(p) not in reduced] + others
                grads = (p.grad for p in given if p.grad is not None)
                session.unreal.mark_all(grads, "backward")
        else:
            value, _ = session.replay_region(
                _within(session.quiet, real),
                lambda _: lambda: self.gradients.give_zeros(self.gradients.of_site(site, tensors)),
            )
        for tensor, number in zip(scalars(tensors), logged, strict=False):
            fill_scalar(session, tensor, number)
        return value

    def _logged_loss(self, tensors: Any, site: int, frame: Any) -> list[Any]:
        """The values that the dead worker logged before this backward; none past the log's end."""
        session = self.session
        ordinal = session.ordinal + 1
        record = session.peek()
        if record is None:
            with session.quiet():
                payload = packed(ordinal, scalars(tensors))
            session.append(kinds.LOSS, site, payload)
            return []
        mine = record.kind == kinds.LOSS and record.site == site
        values = unpacked(record.payload, ordinal) if mine else None
        if values is None:
            raise session.diverged(
                f"backward where the log has '{kinds.name(record.kind)}'", frame
            )
        session.take()
        return values

    def grad(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``torch.autograd.grad``: zeros where a skipped graph can't give anything."""
        session = self.session

        def call(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if not session.here():
                return original(outputs, inputs, *args, **kwargs)

            def real() -> Any:
                return original(outputs, inputs, *args, **kwargs)

            if session.poison is not None:
                session.poison.check((outputs, inputs))
            self.outputs.partly(outputs)
            if not session.replaying:
                return session.run_region(real)[0]
            site = session.site(sys._getframe(1))
            given = {**dict(zip(_OF_GRAD, args, strict=False)), **kwargs}
            create = bool(given.get("create_graph"))
            with session.quiet():
                value = self._replay_grad(real, outputs, several(inputs), site, create)
                if session.unreal is not None:
                    session.unreal.mark_all(standins.tensors(value), "autograd.grad")
            return value

        return call

    def _replay_grad(
        self,
        real: Callable[[], Any],
        roots: Any,
        inputs: list[torch.Tensor],
        site: int,
        create: bool,
    ) -> Any:
        session = self.session
        kind = site, len(inputs)
        if (
            session.starting()
            or session.completes()
            or ((kind not in self._unused or self.forwards.ran()) and not is_stood_for(roots))
        ):
            value = session.replay_region(_within(session.loud, real), lambda _: None)[0]
            self._unused[kind] = tuple(g is None for g in value)
            return value
        unused = self._unused.get(kind, (False,) * len(inputs))
        linked = [t for t in several(roots) if t.requires_grad] if create else []

        def zeros() -> Any:
            return tuple(
                None if no else self.forwards.zeros_for(i, linked)
                for i, no in zip(inputs, unused, strict=True)
            )

        return session.replay_region(real, lambda _: zeros)[0]


def install(session: Session) -> Regions:
    """Wrap modules, backward and optimizers."""
    regions = Regions(session)
    wrap = session.patches.wrap
    wrap(torch.nn.Module, "__call__", regions.forwards.forward)
    wrap(torch.autograd, "backward", regions.backward)
    wrap(
        torch.Tensor,
        "backward",
        lambda original: regions.backward(original),
    )
    wrap(torch.autograd, "grad", regions.grad)
    if session.replaying:
        wrap(torch.nn.parallel.DistributedDataParallel, "__init__", regions.forwards.made)
    regions.steps.install()
    return regions
