"""The forward of an outermost module, in a replay: served from what it gave for the same kind of
input, wherever it needs not run.

It runs in the first intervals, for each new kind of input (which of its parameters are frozen
included), until a DDP module that it is, has or belongs to has rebuilt its buckets, and in the
interval that is completed. A module whose forward changes Python values always runs.

What is served stays linked with the inputs that it was made of. So a model that begins to be
trained late, through one that is served by then (a generator through its critic), has a graph from
the loss to its end, and its DDP buckets become those of the dead worker.

Relied on in torch 2.13: ``Module.__call__`` is a plain attribute (nn/modules/module.py:1917).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from flashrun.worker.buckets import has_yet_to_rebuild
from flashrun.worker.replay import standins
from flashrun.worker.replay.gradients import BEHIND, Gradients
from flashrun.worker.replay.outputs import Outputs, nodes
from flashrun.worker.replay.recent import leaves as recent_leaves
from flashrun.worker.replay.scalars import fill_scalars, log_scalars
from flashrun.worker.replay.unreal import mark_of

if TYPE_CHECKING:
    from flashrun.worker.replay.session import Session

REAL_CALLS = 2  # of each kind of input with gradients: DDP rebuilds its buckets in the second
_TOKEN = "flashrun"  # in the metadata of a graph's node, which live as long as that


class _Token:
    """Lives as long as the graph of a forward that ran."""

    __slots__ = ("__weakref__",)


@dataclass
class Gave:
    """What a module returned for one kind of input.

    Attributes:
        calls: real ones so far.
        kept: the output, without its graph.
        graphs: of its differentiable leaves, see `Gradients.made_of`.
    """

    calls: int = 0
    kept: Any = None
    graphs: list[tuple[list[torch.Tensor], list[int]]] = field(default_factory=list)


class Forwards:
    """What a module returned for each kind of input."""

    def __init__(self) -> None:
        self.outputs: dict[Any, Gave] = {}
        self.real_only = False
        self.own_generator = False
        self.trained = 0  # calls in training
        self.warned = False
        self.compiled = False
        self.marked = -1  # what it changes is marked since so many became real again
        self.parameters: list[torch.Tensor] = []
        self.settling: list[weakref.ref[DDP]] = []  # that will rebuild their buckets
        self.looked = -1  # for those, when there were so many


class Served:
    """See the module.

    Attributes:
        known: what each module returned.
    """

    def __init__(
        self,
        session: Session,
        known: weakref.WeakKeyDictionary[torch.nn.Module, Forwards],
        gradients: Gradients,
        outputs: Outputs,
    ) -> None:
        self.session = session
        self.known = known
        self._gradients = gradients
        self._outputs = outputs
        self._ran = False  # a forward with gradients, for real since the last backward
        self._graphs: weakref.WeakSet[_Token] = weakref.WeakSet()  # of such, not gone through yet
        self._ddp: list[weakref.ref[DDP]] = []  # all that were made

    def forget(self) -> None:
        """The replay is over."""
        self.known.clear()
        self._graphs.clear()
        self._ddp.clear()

    def made(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Around the constructor of DDP modules."""

        @functools.wraps(original)
        def __init__(module: DDP, *args: Any, **kwargs: Any) -> None:
            original(module, *args, **kwargs)
            self._ddp.append(weakref.ref(module))

        return __init__

    def begin_backward(self, roots: Any, retain: bool) -> bool:
        """A backward is about to begin.

        Returns:
            Whether graphs of forwards that ran may be part of its own.
        """
        runs, self._ran = self._ran, False
        if self._graphs:
            tokens = [node.metadata.get(_TOKEN) for node in nodes(roots)]
            reached = self._graphs.intersection(t for t in tokens if t is not None)
            runs = runs or bool(reached)
            if not retain:
                self._graphs -= reached
        return runs

    def ran(self) -> bool:
        """Whether there are graphs of forwards that ran and were not gone through."""
        return self._ran or bool(self._graphs)

    def _note_graph(self, output: Any) -> None:
        self._ran = True
        token = _Token()
        for leaf in standins.differentiable(output):
            node: Any = leaf.grad_fn
            if node is not None:
                node.metadata[_TOKEN] = token
                self._graphs.add(token)

    def _settles(self, known: Forwards, module: torch.nn.Module) -> bool:
        """Whether the buckets of DDP modules depend on what it does now."""
        if known.looked != len(self._ddp):
            known.looked = len(self._ddp)
            mine = set(module.modules())
            known.settling = [
                ref for ref in self._ddp
                if (ddp := ref()) is not None and (ddp in mine or module in set(ddp.modules()))
            ]  # fmt: skip
        if known.settling:
            known.settling = [
                ref for ref in known.settling
                if (ddp := ref()) is not None and has_yet_to_rebuild(ddp)
            ]  # fmt: skip
        return bool(known.settling)

    def zeros_for(self, tensor: torch.Tensor, made_of: list[torch.Tensor]) -> torch.Tensor:
        """In place of a gradient that the script has asked for.

        Args:
            made_of: what it stays linked with, as it has a graph itself.
        """
        kept = torch.zeros_like(tensor, requires_grad=bool(made_of))
        if not made_of:
            return kept
        kept.__dict__[BEHIND] = []
        return standins.linked(kept, made_of, self._zeros)

    def _zeros(self, shape: Any, dtype: Any, device: Any) -> torch.Tensor:
        session = self.session
        with session.quiet():
            zeros = torch.zeros(shape, dtype=dtype, device=device)
            if session.unreal is not None:
                session.unreal.mark(zeros, "backward")
        return zeros

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
            log_scalars(session, ordinal, output)
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
            known = self.known.get(module)
            if known is None:
                known = self.known[module] = Forwards()
                known.own_generator = standins.has_own_generator(module)
                known.real_only = known.own_generator
                known.compiled = standins.is_compiled(module)
                known.parameters = list(module.parameters())
            named = standins.signature(kwargs) if kwargs else None
            flags = [p.requires_grad for p in known.parameters]
            trained = all(flags) or tuple(flags)
            key = standins.signature(args), named, module.training, trained, standins.context()
            gave = known.outputs.get(key)
            if gave is None:
                gave = known.outputs[key] = Gave()
            real = (
                known.real_only
                or gave.calls < REAL_CALLS
                or session.starting()
                or session.completes()
                or (torch.is_grad_enabled() and self._settles(known, module))
            )
            before = standins.values_around(module) if real and not known.real_only else None
            again = None
            if session.remembers_outputs():
                again = self._outputs.about_to_call(original, module, args, kwargs, known)
            ran = []

            def run() -> Any:
                ran.append(True)
                with session.quiet() if known.compiled else session.loud():
                    return original(module, *args, **kwargs)

            def serve() -> Any:
                linked = any(made_of for _, made_of in gave.graphs)
                inputs = standins.tensors((args, kwargs)) if linked else []
                return standins.copy_output(gave.kept, inputs, self._zeros)

            output, ordinal = session.replay_region(run, lambda _: None if real else serve)
            if ran and torch.is_grad_enabled():
                self._note_graph(output)
            if real:
                self._learn(known, gave, output, module, before)
                self._learn_graphs(gave, output, (args, kwargs))
                gave.calls += 1
            self._mark_forward(known, module, output, bool(ran))
            if module.training:
                known.trained += 1
            if again is not None:
                again.ran = bool(ran)
                output = self._outputs.add(again, output)
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
        fill_scalars(session, ordinal, output)
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
        self, known: Forwards, gave: Gave, output: Any, module: torch.nn.Module, before: Any
    ) -> None:
        if not standins.can_stand_in(output):
            known.real_only = True
        known.parameters = list(module.parameters())
        after = standins.values_around(module) if before is not None else None
        if after is not None and after[0] != before[0]:
            known.real_only = True  # its forward changes Python values (a counter, a list)
        if after is not None and gave.calls > 0 and after[1] != before[1] and not known.warned:
            known.warned = True
            self.session.warn(
                f"{type(module).__name__} keeps tensors between calls that are not buffers: their "
                "values are not replayed"
            )
        gave.kept = standins.keep_output(output)

    def _learn_graphs(self, gave: Gave, output: Any, inputs: Any) -> None:
        if gave.calls < REAL_CALLS and torch.is_grad_enabled():
            given = standins.tensors(inputs)
            gave.graphs = [
                self._gradients.made_of(leaf, given) for leaf in standins.differentiable(output)
            ]
        kept = standins.differentiable(gave.kept)
        for leaf, (behind, made_of) in zip(kept, gave.graphs, strict=False):
            leaf.__dict__[BEHIND] = behind
            leaf.__dict__[standins.MADE_OF] = made_of
