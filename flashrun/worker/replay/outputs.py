"""Outputs of modules near the target whose graphs may be needed where the replay has none.

A GAN's fake batch is made before the critic's step and trained through after it. If that step is
the boundary at which a replacement joins, its graph has to lead to real gradients; if it is the one
before, the interval after it is completed with the survivors' results, and its backward has to
issue the same collectives. So outputs are remembered as long as they or their graphs live, with the
conditions under which they were made, and are computed again at those two moments. What flows back
into one goes on into the graph that was computed, at the end of that backward: by then all of the
graph made since has run, as it would have where both are one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils import _pytree as pytree
from torch.utils.weak import TensorWeakRef

from flashrun.worker.replay import standins
from flashrun.worker.replay.api import Divergence
from flashrun.worker.replay.unreal import MARK, storages

if TYPE_CHECKING:
    from flashrun.worker.replay.served import Forwards
    from flashrun.worker.replay.session import Session

Optimizer = torch.optim.Optimizer
_DEVICES = ("cpu", "cuda")
# Their buffers change with every forward, which computes the same whatever they were.
_AVERAGES = (
    torch.nn.modules.batchnorm._BatchNorm, torch.nn.modules.instancenorm._InstanceNorm
)  # fmt: skip


class Conditions:
    """What decides what a module does besides its arguments, as it is now."""

    def __init__(self, module: torch.nn.Module) -> None:
        modules = list(module.modules())
        self._training = [(m, m.training) for m in modules]
        self._parameters = [(p, p.requires_grad) for p in module.parameters()]
        self._ddp = [(m, m.require_backward_grad_sync) for m in modules if isinstance(m, DDP)]
        self._cast = [
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in _DEVICES
        ]
        self._cached = torch.is_autocast_cache_enabled()
        self.training = module.training
        self.values = standins.python_values(module)[0]

    @contextmanager
    def again(self) -> Iterator[None]:
        """As they were, without a collective of DDP's own."""
        now = [
            *((m, "training", was) for m, was in self._training if m.training != was),
            *((p, "requires_grad", was) for p, was in self._parameters if p.requires_grad != was),
            *((m, "require_backward_grad_sync", was) for m, was in self._ddp),
            *((m, "require_forward_param_sync", False) for m, _ in self._ddp),
        ]
        back = [(thing, name, getattr(thing, name)) for thing, name, _ in now]
        with ExitStack() as stack:
            for device, enabled, dtype in self._cast:
                if enabled or torch.is_autocast_enabled(device):
                    torch.clear_autocast_cache()  # of other weights
                    stack.enter_context(torch.autocast(device, dtype, enabled, self._cached))
            stack.enter_context(torch.enable_grad())
            try:
                for thing, name, was in now:
                    setattr(thing, name, was)
                yield
            finally:
                for thing, name, is_now in back:
                    setattr(thing, name, is_now)


@dataclass
class Call:
    """A forward that can be run again.

    Attributes:
        inputs: the tensors among the arguments, with their versions before it.
        steps: of the optimizers, before it.
        known: of the module.
        trained: how often the module was called in training before.
        ran: for real in the replay.
    """

    module: torch.nn.Module
    original: Callable[..., Any]
    args: Any
    kwargs: dict[str, Any]
    random_states: bytes
    conditions: Conditions
    inputs: list[tuple[torch.Tensor, int]]
    steps: dict[int, int]
    known: Forwards
    trained: int
    ran: bool = False


class Output:
    """What it gave: as long as it or a graph that it is part of lives, it may be used."""

    def __init__(self, call: Call, slot: standins.Slot, leaves: list[torch.Tensor]) -> None:
        self.call = call
        self.slot = weakref.ref(slot)
        self.leaves = [(TensorWeakRef(leaf), leaf._version) for leaf in leaves]

    def there(self) -> list[torch.Tensor | None]:
        """The differentiable leaves, as far as they live."""
        return [reference() for reference, _ in self.leaves]

    def unchanged(self) -> bool:
        """Whether nobody has written into what is left of it."""
        return all((t := ref()) is None or t._version == was for ref, was in self.leaves)


class Outputs:
    """The outputs of the last intervals of a replay.

    Args:
        optimizers: all that there are.
        steps: of each, in the replay so far; changes as it goes on.
    """

    def __init__(
        self,
        session: Session,
        optimizers: Iterable[Optimizer],
        steps: weakref.WeakKeyDictionary[Optimizer, int],
    ) -> None:
        self._session = session
        self._optimizers = optimizers
        self._steps = steps
        self._outputs: list[Output] = []
        self._prune_at = 8
        self._later: list[tuple[standins.Slot, tuple[torch.Tensor | None, ...]]] = []
        self._computed: list[Output] = []  # with a graph of their own now

    # --- near the target

    def about_to_call(
        self,
        original: Callable[..., Any],
        module: torch.nn.Module,
        args: Any,
        kwargs: dict[str, Any],
        known: Forwards,
    ) -> Call | None:
        """Note what it takes to call a module again."""
        randomness = self._session.randomness
        if randomness is None or not torch.is_grad_enabled():
            return None
        return Call(
            module, original, args, kwargs, randomness.whole(), Conditions(module),
            [(t, t._version) for t in standins.tensors((args, kwargs))],
            {id(optimizer): n for optimizer, n in self._steps.items()},
            known, known.trained,
        )  # fmt: skip

    def add(self, call: Call, output: Any) -> Any:
        """Remember an output as long as it lives; gives the one for the script."""
        output, slot, leaves = standins.with_slot(output, self._later)
        if leaves:
            if len(self._outputs) >= self._prune_at:
                self._outputs = self._living()
                self._prune_at = 8 + 2 * len(self._outputs)
            self._outputs.append(Output(call, slot, leaves))
        return output

    def _living(self) -> list[Output]:
        return [o for o in self._outputs if o.slot() is not None]

    def _optimizers_of(self, module: torch.nn.Module) -> list[Optimizer]:
        mine = {id(p) for p in module.parameters()}
        return [
            optimizer for optimizer in self._optimizers
            if any(id(p) in mine for group in optimizer.param_groups for p in group["params"])
        ]  # fmt: skip

    def _stepped(self, call: Call) -> bool:
        """Whether weights have been stepped since: the script can't train through it either."""
        return any(
            self._steps.get(optimizer, 0) != call.steps.get(id(optimizer), 0)
            for optimizer in self._optimizers_of(call.module)
        )

    def _has_its_weights(self, call: Call) -> bool:
        """Whether the module's weights are those of the call. Without an optimizer they may be an
        average, which the script changes by itself."""
        optimizers = self._optimizers_of(call.module)
        if not optimizers:
            return next(call.module.parameters(), None) is None
        return not self._stepped(call)

    # --- computing them

    def before_completion(self) -> None:
        """At the boundary before the interval that is completed: give what has outlived it the
        graph that the dead worker had, if only with weights of the replay."""
        living = [
            o for o in self._living()
            if not self._stepped(o.call) and (slot := o.slot()) is not None and not slot.spent
        ]  # fmt: skip
        if all(o.call.ran for o in living):
            return  # these have it
        if any(o.call.known.own_generator or self._changes_values(o.call) for o in living):
            raise self._session.diverged(
                "outputs from before an optimizer's step are still in use, and computing them again"
                " would change what their modules keep"
            )
        try:
            self._compute(living, lambda output: True, lambda output, real: None)
        except Divergence:
            raise
        except Exception as error:  # whatever the script's module makes of such values
            raise self._session.diverged(
                f"an output from before an optimizer's step can't be computed again: {error}"
            ) from error

    def _changes_values(self, call: Call) -> bool:
        return standins.python_values(call.module)[0] != call.conditions.values

    def keep_usable(self) -> set[int]:
        """At the join: forget what is no more in use, or can't be made right.

        Returns:
            By id, what `after_state` may make right.
        """
        self._outputs = [o for o in self._living() if self._has_its_weights(o.call)]
        return {id(t) for o in self._outputs for t in o.there() if t is not None}

    def after_state(self, unreal: set[int]) -> list[torch.Tensor]:
        """Compute the outputs that live and whose weights have not been stepped since they were
        made, with the weights that have come from the peers.

        Args:
            unreal: by id, the tensors whose values are not known.

        Returns:
            The outputs that are right now, with their graphs.

        Raises:
            Divergence: computing one of them takes collectives of its own.
        """
        right: list[torch.Tensor] = []
        memory: set[int] = set()

        def is_real(tensor: torch.Tensor) -> bool:
            return id(tensor) not in unreal or any(id(s) in memory for s in storages(tensor))

        def can(output: Output) -> bool:
            call = output.call
            by_averages = not call.conditions.training and any(True for _ in call.module.buffers())
            return (
                output.unchanged()
                and not call.known.own_generator
                and self._has_its_weights(call)
                and not self._changes_values(call)
                and all(is_real(t) and t._version == was for t, was in call.inputs)
                and not (by_averages and call.known.trained != call.trained)
            )

        def take(output: Output, real: list[torch.Tensor]) -> None:
            for leaf, value in zip(output.there(), real, strict=True):
                if leaf is None:
                    continue
                if leaf.numel() > standins.LARGE:  # it shares memory with others
                    leaf.data = value.detach()
                else:
                    leaf.data.copy_(value.detach())  # unseen by who has kept it for backward
                right.append(leaf)
                for storage in storages(leaf):
                    storage.__dict__.pop(MARK, None)
                    memory.add(id(storage))

        for output in self._computed:  # with weights of the replay
            slot = output.slot()
            if slot is not None:
                slot.real = None
        self._computed = []
        self._compute(self._living(), can, take)
        self._outputs = []
        return right

    def _compute(
        self,
        outputs: list[Output],
        can: Callable[[Output], bool],
        take: Callable[[Output, list[torch.Tensor]], None],
    ) -> None:
        """In the order in which they were made: backward takes the youngest first."""
        session, randomness = self._session, self._session.randomness
        if randomness is None:
            return
        whole = randomness.whole()
        depth, session.depth = session.depth, 1
        instead: dict[int, torch.Tensor] = {}  # the graphs go on from one to the other
        try:
            for output in outputs:
                slot = output.slot()
                if slot is None or not can(output):
                    continue
                randomness.restore_whole(output.call.random_states)
                with session.quiet():
                    try:
                        real = self._again(output.call, instead)
                    except Divergence:
                        if not slot.spent:
                            raise
                        continue  # only its value might be used, which stays unknown
                    if real is None or len(real) != len(output.leaves):
                        continue
                    take(output, real)
                slot.real = real
                self._computed.append(output)
                for leaf, value in zip(output.there(), real, strict=True):
                    if leaf is not None:
                        instead[id(leaf)] = value
        finally:
            session.depth = depth
            randomness.restore_whole(whole)

    def _again(self, call: Call, instead: dict[int, torch.Tensor]) -> list[torch.Tensor] | None:
        """The outputs that have a graph; None: they depend on what the first call has changed."""
        buffers = [(b, b.detach().clone()) for b in call.module.buffers()]
        args, kwargs = pytree.tree_map(
            lambda t: instead.get(id(t), t) if isinstance(t, torch.Tensor) else t,
            (call.args, call.kwargs),
        )
        try:
            with call.conditions.again():
                real = standins.differentiable(call.original(call.module, *args, **kwargs))
            harmless = {
                id(b) for m in call.module.modules() if isinstance(m, _AVERAGES)
                for b in m.buffers(recurse=False)
            }  # fmt: skip
            changed = [b for b, was in buffers if not torch.equal(b, was)]
            depends = any(id(b) not in harmless for b in changed)  # as spectral norm does
            return None if depends and not self._session.replaying else real
        finally:
            for buffer, was in buffers:
                buffer.data.copy_(was)  # backward may have kept it: its version stays

    # --- backward

    def waits(self) -> bool:
        """Whether something may flow back into what was computed."""
        if self._computed:
            self._computed = [o for o in self._computed if o.slot() is not None]
        return bool(self._computed)

    def spend(self, roots: Any) -> None:
        """In the replay: a backward begins that keeps nothing of its graph."""
        for node in nodes(roots):
            slot = getattr(node, "slot", None)
            if isinstance(slot, standins.Slot):
                slot.spent = True

    def backward(self, run: Callable[..., Any], roots: Any, retain: bool) -> Any:
        """A backward, and what follows it in the graphs that were computed again.

        Args:
            run: the script's; takes ``inputs``.
            roots: where it begins.
            retain: the graph may be used again.
        """
        roots = several(roots)
        self._check_stages(roots)
        value = run(**self._up_to_here(roots))
        while self._later:
            now, self._later[:] = list(self._later), []
            pairs = [
                (root, grad)
                for slot, grads in now
                for root, grad in zip(slot.real or (), grads, strict=True)
                if grad is not None
            ]
            roots, grads = [root for root, _ in pairs], [grad for _, grad in pairs]
            torch.autograd.backward(
                roots, grads, retain_graph=retain, **self._up_to_here(roots)
            )
        return value

    def _check_stages(self, roots: list[torch.Tensor]) -> None:
        """Refuse what would give a parameter gradients twice: DDP takes the first for all."""
        reached: set[int] = set()
        while roots:
            slots, variables, _ = _reach(roots)
            if any(id(v) in reached for v in variables):
                self._refuse(
                    "a backward leads to one model by outputs from before an optimizer's step and"
                    " by others"
                )
            reached |= {id(v) for v in variables}
            roots = [root for slot in slots for root in slot.real or ()]

    def _up_to_here(self, roots: list[torch.Tensor]) -> dict[str, Any]:
        """For a backward: nothing behind an output that was computed again is to run. It would be
        given no gradients, but DDP would count its parameters as ready."""
        ran = {slot for o in self._computed if o.call.ran and (slot := o.slot()) is not None}
        slots, variables, checkpoints = _reach(roots)
        if ran.isdisjoint(slots):
            return {}
        if checkpoints:
            self._refuse(
                "a backward leads through a reentrant checkpoint and an output from before an"
                " optimizer's step"
            )
        return {"inputs": [*variables, standins.anchor()]}

    def _refuse(self, what: str) -> None:
        if self._session.replaying:
            raise self._session.diverged(what)
        self._session.refuse(what)

    def partly(self, roots: Any) -> None:
        """Only some gradients are asked for, or those of gradients."""
        if self.waits() and any(_computed(node) is not None for node in nodes(roots)):
            self._refuse(
                "gradients are asked for that lead through an output from before an optimizer's"
                " step (torch.autograd.grad, `inputs` or `create_graph` of backward)"
            )


def _never(node: Any) -> bool:
    return False


def several(tensors: Any) -> list[Any]:
    """One tensor or many, as autograd's functions take them."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def nodes(tensors: Any, ends: Callable[[Any], bool] = _never) -> Iterator[Any]:
    """Those of the graph that leads to some tensors, the accumulation of gradients included.

    Args:
        tensors: one or many.
        ends: whether what lies behind a node is left out.
    """
    left: list[Any] = [
        t.grad_fn if t.grad_fn is not None else torch.autograd.graph.get_gradient_edge(t).node
        for t in several(tensors)
        if isinstance(t, torch.Tensor) and t.requires_grad
    ]
    seen: set[Any] = set()
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            if not ends(node):
                left.extend(following for following, _ in node.next_functions)


def variable_of(node: Any) -> torch.Tensor | None:
    """The leaf whose gradient a node accumulates, if it is such a node."""
    leaf = getattr(node, "variable", None)
    return leaf if isinstance(leaf, torch.Tensor) else None


def _computed(node: Any) -> standins.Slot | None:
    """The slot of a node behind which another graph is now."""
    slot = getattr(node, "slot", None)
    return slot if isinstance(slot, standins.Slot) and slot.real is not None else None


def _reach(
    roots: Iterable[Any],
) -> tuple[list[standins.Slot], list[torch.Tensor], bool]:
    """What backward comes to from `roots`: outputs that were computed again, leaves, and whether
    there is a reentrant checkpoint, which allows no ``inputs``."""
    slots, variables, checkpoints = [], [], False
    for node in nodes(roots, ends=lambda node: _computed(node) is not None):
        slot, variable = _computed(node), variable_of(node)
        if slot is not None:
            slots.append(slot)
        if variable is not None:
            variables.append(variable)
        checkpoints = checkpoints or type(node).__name__ == "CheckpointFunctionBackward"
    return slots, variables, checkpoints
