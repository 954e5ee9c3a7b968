"""The skipped regions: backward, and what else makes them up (see `served` for the forward of an
outermost module, `steps` for an optimizer's step).

Relied on in torch 2.13: ``Tensor.backward`` ends in ``torch.autograd.backward`` (_tensor.py).
"""

from __future__ import annotations

import marshal
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
from flashrun.worker.replay.served import ORDINAL, Forwards, Served, item, scalars
from flashrun.worker.replay.steps import Steps

if TYPE_CHECKING:
    from flashrun.worker.replay.session import Session


class Regions:
    """Runs regions, for real or not."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._unused: dict[int, tuple[bool, ...]] = {}
        self.steps = Steps(session)
        self.outputs = Outputs(session, self.steps.known, self.steps.taken)
        known: weakref.WeakKeyDictionary[torch.nn.Module, Forwards] = weakref.WeakKeyDictionary()
        self.gradients = Gradients(session, self.steps.known, known)
        self.forwards = Served(session, known, self.gradients, self.outputs)

    def forget(self) -> None:
        """The replay is over: let go of what stood for results."""
        self.forwards.known.clear()
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
            real = self._through_outputs(original, tensors, args, kwargs)
            if session.replaying:
                return self._replay_backward(real, tensors, frame)
            # Before it runs: the peers may pass the boundary as soon as they have this rank's last
            # gradient, and a replacement can't compute the loss again (its weights are newer).
            values = [item(t.detach()) for t in scalars(tensors)]
            payload = ORDINAL.pack(session.ordinal + 1) + marshal.dumps(values)
            session.append(kinds.LOSS, session.site(frame), payload)
            return session.run_region(real)[0]

        return call

    def _through_outputs(
        self, original: Callable[..., Any], tensors: Any, args: tuple[Any, ...], kwargs: Any
    ) -> Callable[[], Any]:
        """The script's backward, and what follows it in outputs that were computed again."""

        def real(**also: Any) -> Any:
            return original(tensors, *args, **kwargs, **also)

        outputs, session = self.outputs, self.session
        remembers = session.replaying and session.remembers_outputs()
        if not remembers and not outputs.waits():
            return real
        names = "gradient", "retain_graph", "create_graph", "inputs"
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if given.get("create_graph") or given.get("inputs") is not None:
            outputs.partly(tensors)
            return real
        retain = bool(given.get("retain_graph"))
        if remembers and not retain:
            outputs.spend(tensors)
        if not outputs.waits():
            return real
        return lambda: outputs.backward(real, tensors, retain)

    def _replay_backward(self, real: Callable[[], Any], tensors: Any, frame: Any) -> Any:
        session = self.session
        site = session.site(frame)
        logged = self._logged_loss(tensors, site, frame)
        completing = session.completes()
        run = self.forwards.graph or session.starting() or completing or session.peek() is None
        self.forwards.graph = False
        given, missing = session.results_given, session.results_missing
        if run:
            parameters = self.gradients.parameters()
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
            self.gradients.note(site, touched)
            reduced: set[int] = set()
            if completing and session.results_given > given and session.results_missing == missing:
                reduced = self.gradients.reduced_by_ddp()
            if session.unreal is not None:
                # What DDP has filled in with reductions that are real has lost its mark there.
                unreal = (p.grad for p in touched if p.grad is not None and id(p) not in reduced)
                session.unreal.mark_all(unreal, "backward")
        else:
            value, _ = session.replay_region(
                self._quiet(real),
                lambda _: lambda: self.gradients.give_zeros(self.gradients.of_site(site, tensors)),
            )
        for tensor, number in zip(scalars(tensors), logged, strict=False):
            fill_scalar(session, tensor, number)
        return value

    def _quiet(self, real: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            with self.session.quiet():
                return real()

        return run

    def _loud(self, real: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            with self.session.loud():
                return real()

        return run

    def _logged_loss(self, tensors: Any, site: int, frame: Any) -> list[Any]:
        """The values that the dead worker logged before this backward; none past the log's end."""
        session = self.session
        ordinal = session.ordinal + 1
        record = session.peek()
        if record is None:
            with session.quiet():
                values = [item(t.detach()) for t in scalars(tensors)]
            session.append(kinds.LOSS, site, ORDINAL.pack(ordinal) + marshal.dumps(values))
            return []
        if (
            record.kind != kinds.LOSS
            or record.site != site
            or ORDINAL.unpack_from(record.payload)[0] != ordinal
        ):
            raise session.diverged(
                f"backward where the log has '{kinds.name(record.kind)}'", frame
            )
        session.take()
        values = marshal.loads(record.payload[ORDINAL.size :])
        return list(values)

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
            with session.quiet():
                value = self._replay_grad(real, outputs, several(inputs), site)
                if session.unreal is not None:
                    session.unreal.mark_all(standins.tensors(value), "autograd.grad")
            return value

        return call

    def _replay_grad(
        self, real: Callable[[], Any], roots: Any, inputs: list[torch.Tensor], site: int
    ) -> Any:
        session = self.session
        if (
            session.starting()
            or session.completes()
            or ((site not in self._unused or self.forwards.graph) and not is_stood_for(roots))
        ):
            value = session.replay_region(self._loud(real), lambda _: None)[0]
            self._unused[site] = tuple(g is None for g in value)
            return value
        unused = self._unused.get(site, (False,) * len(inputs))
        return session.replay_region(
            real,
            lambda _: lambda: tuple(
                None if no else torch.zeros_like(i, requires_grad=torch.is_grad_enabled()) * 1
                for i, no in zip(inputs, unused, strict=True)
            ),
        )[0]

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
    regions.steps.install()
    return regions
