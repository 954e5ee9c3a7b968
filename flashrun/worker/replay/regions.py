"""The skipped regions: forward of an outermost module and backward (see `steps` for the step).

Relied on in torch 2.13: ``Module.__call__`` is a plain attribute (nn/modules/module.py:1917),
``Tensor.backward`` ends in ``torch.autograd.backward`` (_tensor.py).
"""

from __future__ import annotations

import marshal
import struct
import sys
import weakref
from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch

from flashrun.worker.replay import kinds, standins
from flashrun.worker.replay.doors import fill_scalar
from flashrun.worker.replay.outputs import Outputs, nodes, several, variable_of
from flashrun.worker.replay.recent import leaves as recent_leaves
from flashrun.worker.replay.steps import Steps
from flashrun.worker.replay.unreal import MARK, USED, mark_of

if TYPE_CHECKING:
    from flashrun.worker.replay.session import Session

_ORDINAL = struct.Struct("<Q")
_FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
BEHIND = "_flashrun_behind"  # of a leaf that stands for a graph: the parameters in that
REAL_CALLS = 2  # of each kind of input with gradients: DDP rebuilds its buckets in the second
_item = torch.Tensor.item  # taken before the door is installed


def _scalars(output: Any) -> list[torch.Tensor]:
    """The one-element floating tensors on the CPU that an output has at its first level."""
    if type(output) is torch.Tensor:
        candidates: Any = (output,)
    elif isinstance(output, (tuple, list)):
        candidates = output
    elif isinstance(output, dict):
        candidates = output.values()
    else:
        return []
    return [
        t
        for t in candidates
        if type(t) is torch.Tensor
        and t.numel() == 1
        and t.dtype in _FLOATING
        and t.is_cpu
    ]


def _will_rebuild_buckets(module: torch.nn.Module) -> bool:
    """Whether this is a DDP module that has yet to rebuild its buckets, which takes a real backward
    and a real forward after it (nn/parallel/distributed.py:1775; never where it looks for unused
    parameters, reducer.hpp, should_rebuild_buckets)."""
    if not isinstance(module, torch.nn.parallel.DistributedDataParallel):
        return False
    return not module._has_rebuilt_buckets and (
        module.static_graph or not module.find_unused_parameters
    )


class Forwards:
    """What a module returned for each kind of input."""

    def __init__(self) -> None:
        # key -> real calls so far, output, the parameters that its graph led to
        self.outputs: dict[Any, tuple[int, Any, list[torch.Tensor]]] = {}
        self.real_only = False
        self.own_generator = False
        self.trained = 0  # calls in training
        self.warned = False
        self.compiled = False
        self.marked = -1  # what it changes is marked since so many became real again


class Regions:
    """Runs regions, for real or not."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._forwards: weakref.WeakKeyDictionary[torch.nn.Module, Forwards] = (
            weakref.WeakKeyDictionary()
        )
        self._graph = False  # a forward with gradients ran for real since the last backward
        # call site -> the different lists of parameters that it gave gradients
        self._grads: dict[int, list[list[torch.Tensor]]] = {}
        # by id, since tensors compare elementwise
        self._zeros: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}
        self._unused: dict[int, tuple[bool, ...]] = {}
        self.steps = Steps(session)
        self.outputs = Outputs(session, self.steps.known, self.steps.taken)

    # --- forward

    def forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        session = self.session

        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if session.depth or not session.on or get_ident() != session.main:
                return original(module, *args, **kwargs)
            if session.poison is not None:
                session.poison.check((args, kwargs))
            if session.replaying:
                return self._replay_forward(original, module, args, kwargs)
            output, ordinal = session.run_region(lambda: original(module, *args, **kwargs))
            scalars = _scalars(output)
            if scalars:
                values = [_item(t.detach()) for t in scalars]
                session.append(
                    kinds.OUT, 0, _ORDINAL.pack(ordinal) + marshal.dumps(values)
                )
            if session.recent is not None and session.on:
                session.recent.keep(ordinal, output)
            return output

        return call

    def _replay_forward(
        self,
        original: Callable[..., Any],
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        session = self.session
        with session.quiet():
            known = self._forwards.get(module)
            if known is None:
                known = self._forwards[module] = Forwards()
                known.own_generator = standins.has_own_generator(module)
                known.real_only = known.own_generator
                known.compiled = standins.is_compiled(module)
            named = standins.signature(kwargs) if kwargs else None
            key = standins.signature(args), named, module.training, standins.context()
            calls, cached, _ = known.outputs.get(key, (0, None, []))
            real = (
                known.real_only
                or calls < REAL_CALLS
                or session.starting()
                or session.completes()
                or _will_rebuild_buckets(module)
            )
            before = standins.values_around(module) if real and not known.real_only else None
            again = None
            if session.remembers_outputs():
                again = self.outputs.about_to_call(original, module, args, kwargs, known)
            ran = []

            def run() -> Any:
                ran.append(True)
                with session.quiet() if known.compiled else session.loud():
                    return original(module, *args, **kwargs)

            output, ordinal = session.replay_region(
                run, lambda _: None if real else lambda: standins.copy_output(cached)
            )
            if real:
                if torch.is_grad_enabled():
                    self._graph = True
                self._learn(known, key, calls, output, module, before)
            elif session.past is not None and torch.is_grad_enabled():
                self._graph = True
            self._mark_forward(known, module, output, bool(ran))
            if module.training:
                known.trained += 1
            if again is not None:
                again.ran = bool(ran)
                output = self.outputs.add(again, output)
            self._fill(output, ordinal)
        return output

    def _mark_forward(
        self, known: Forwards, module: torch.nn.Module, output: Any, ran: bool
    ) -> None:
        """What a forward gave and changed is unreal, unless it really ran on real values."""
        unreal = self.session.unreal
        if unreal is None or (ran and (not unreal.started or not known.compiled)):
            return  # followed while it ran
        what = f"the output of {type(module).__name__}"
        for leaf in standins.tensors(output):
            unreal.mark_anew(leaf, what)
        if known.marked != unreal.cleared:
            known.marked = unreal.cleared
            unreal.mark_all(module.buffers(), f"a buffer of {type(module).__name__}")

    def _fill(self, output: Any, ordinal: int) -> None:
        """Give an output the values that the dead worker's had, as far as they are kept."""
        session = self.session
        record = session.peek()
        if (
            record is not None
            and record.kind == kinds.OUT
            and _ORDINAL.unpack_from(record.payload)[0] == ordinal
        ):
            session.take()
            values = marshal.loads(record.payload[_ORDINAL.size :])
            scalars = _scalars(output)
            if len(values) != len(scalars):
                raise session.diverged("a forward returned another number of scalars than before")
            for tensor, value in zip(scalars, values, strict=True):
                fill_scalar(session, tensor, value)
        unreal, recent = session.unreal, session.recent
        if unreal is None or recent is None or session.past is not None:
            return
        kept = recent.get(ordinal)
        if kept is None:
            return
        mine = recent_leaves(output)
        if [(t.shape, t.dtype) for t in kept] != [(t.shape, t.dtype) for t in mine]:
            raise session.diverged("a forward returned tensors of other shapes than before")
        for tensor, value in zip(mine, kept, strict=True):
            if mark_of(tensor) is not None:
                tensor.data.copy_(value)  # unseen by its graph, which may have kept it
                unreal.clear(tensor)

    def _learn(
        self,
        known: Forwards,
        key: Any,
        calls: int,
        output: Any,
        module: torch.nn.Module,
        before: Any,
    ) -> None:
        if not standins.can_stand_in(output):
            known.real_only = True
        after = standins.values_around(module) if before is not None else None
        if after is not None and after[0] != before[0]:
            known.real_only = True  # its forward changes Python values (a counter, a list)
        if after is not None and calls > 0 and after[1] != before[1] and not known.warned:
            known.warned = True
            self.session.warn(
                f"{type(module).__name__} keeps tensors between calls that are not buffers: their "
                "values are not replayed"
            )
        behind = known.outputs[key][2] if calls else []
        kept = standins.keep_output(output)
        if calls < REAL_CALLS and torch.is_grad_enabled():
            behind = self._led_to(standins.tensors(output))
        for leaf in standins.tensors(kept):
            leaf.__dict__[BEHIND] = behind
        known.outputs[key] = calls + 1, kept, behind

    def forget(self) -> None:
        """The replay is over: let go of what stood for results."""
        self._forwards.clear()
        self._zeros.clear()
        self._grads.clear()

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
            values = [_item(t.detach()) for t in _scalars(tensors)]
            payload = _ORDINAL.pack(session.ordinal + 1) + marshal.dumps(values)
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

    def _parameters(self) -> list[torch.Tensor]:
        found: dict[int, torch.Tensor] = {}
        for optimizer in self.steps.known:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    found[id(parameter)] = parameter
        for module in self._forwards:
            for parameter in module.parameters():
                found[id(parameter)] = parameter
        return [p for p in found.values() if p.requires_grad]

    def _replay_backward(self, real: Callable[[], Any], tensors: Any, frame: Any) -> Any:
        session = self.session
        site = session.site(frame)
        logged = self._logged_loss(tensors, site, frame)
        completing = session.completes()
        run = self._graph or session.starting() or completing or session.peek() is None
        self._graph = False
        given, missing = session.results_given, session.results_missing
        if run:
            parameters = self._parameters()
            before = [(p.grad, p.grad._version if p.grad is not None else 0) for p in parameters]
            value, _ = session.replay_region(real, lambda _: None)
            touched = [
                p
                for p, (grad, version) in zip(parameters, before, strict=True)
                if p.grad is not None and (p.grad is not grad or p.grad._version != version)
            ]
            if not (session.starting() or completing or session.past is not None):
                # Some of its graph may be stand-ins', which give nothing.
                behind = [p for p in self._led_to(tensors) if p.grad is None]
                self._zero_grads(behind)
                touched += behind
            self._note_touched(site, touched)
            reduced: set[int] = set()
            if completing and session.results_given > given and session.results_missing == missing:
                reduced = self._reduced_by_ddp()
            if session.unreal is not None:
                # What DDP has filled in with reductions that are real has lost its mark there.
                unreal = (p.grad for p in touched if p.grad is not None and id(p) not in reduced)
                session.unreal.mark_all(unreal, "backward")
        else:
            value, _ = session.replay_region(
                self._quiet(real),
                lambda _: lambda: self._zero_grads(self._of_site(site, tensors)),
            )
        for tensor, number in zip(_scalars(tensors), logged, strict=False):
            fill_scalar(session, tensor, number)
        return value

    def _reduced_by_ddp(self) -> set[int]:
        """The parameters whose gradients DDP reduces in this backward."""
        return {
            id(parameter)
            for outermost in self._forwards
            for module in outermost.modules()
            if isinstance(module, torch.nn.parallel.DistributedDataParallel)
            and module.require_backward_grad_sync
            for parameter in module.parameters()
        }

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
                values = [_item(t.detach()) for t in _scalars(tensors)]
            session.append(kinds.LOSS, site, _ORDINAL.pack(ordinal) + marshal.dumps(values))
            return []
        if (
            record.kind != kinds.LOSS
            or record.site != site
            or _ORDINAL.unpack_from(record.payload)[0] != ordinal
        ):
            raise session.diverged(
                f"backward where the log has '{kinds.name(record.kind)}'", frame
            )
        session.take()
        values = marshal.loads(record.payload[_ORDINAL.size :])
        return list(values)

    def _note_touched(self, site: int, touched: list[torch.Tensor]) -> None:
        known = self._grads.setdefault(site, [])
        ids = {id(p) for p in touched}
        if touched and all({id(p) for p in others} != ids for others in known):
            known.append(touched)

    def _of_site(self, site: int, tensors: Any) -> list[torch.Tensor]:
        """The parameters that a skipped backward gives gradients."""
        known = self._grads.get(site)
        if not known:
            return self._parameters()
        if len(known) == 1:
            return known[0]
        return self._led_to(tensors) or known[-1]

    def _led_to(self, tensors: Any) -> list[torch.Tensor]:
        """The parameters to which graphs lead, those of stand-ins as the ones they stand for."""
        with self.session.quiet():
            found: dict[int, torch.Tensor] = {}
            for node in nodes(tensors):
                leaf = variable_of(node)
                if leaf is not None and leaf is not standins.anchor():
                    found.update((id(p), p) for p in leaf.__dict__.get(BEHIND, (leaf,)))
        return list(found.values())

    def _zero_grads(self, parameters: list[torch.Tensor]) -> None:
        unreal = self.session.unreal
        for parameter in parameters:
            grad = parameter.grad
            if grad is None:
                known = self._zeros.get(id(parameter))
                if known is None or known[0]() is not parameter:
                    with self.session.quiet():
                        known = weakref.ref(parameter), torch.zeros_like(parameter)
                    self._zeros[id(parameter)] = known
                parameter.grad = grad = known[1]
                own = grad.untyped_storage().__dict__
                own.pop(USED, None)
                if MARK in own:
                    continue
            if unreal is not None:  # also one that was zeroed in place since
                unreal.mark(grad, "backward")

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
            or ((site not in self._unused or self._graph) and not self._is_stood_for(roots))
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

    def _is_stood_for(self, roots: Any) -> bool:
        """Whether a graph has stand-ins in it, behind which there is nothing."""
        leaves = map(variable_of, nodes(roots))
        return any(leaf is not None and BEHIND in leaf.__dict__ for leaf in leaves)


def install(session: Session) -> Regions:
    """Wrap modules, backward and optimizers."""
    regions = Regions(session)
    wrap = session.patches.wrap
    wrap(torch.nn.Module, "__call__", regions.forward)
    wrap(torch.autograd, "backward", regions.backward)
    wrap(
        torch.Tensor,
        "backward",
        lambda original: regions.backward(original),
    )
    wrap(torch.autograd, "grad", regions.grad)
    regions.steps.install()
    return regions
