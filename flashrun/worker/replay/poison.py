"""What is still unreal when a replay has ended must not be used.

Tensors that the script holds and that nobody can give it: an output of weights that are gone, a
value derived from a batch long ago, a copy of earlier weights. One that it keeps in a container or
an object since before the last interval is kept to be used: that is a `Divergence` at the join. The
others are mostly variables that the script overwrites before it reads them, so they only become
*poison*: their class is changed to one whose every use ends the process with the reason (tier 3);
what overwrites them makes them tensors again. Graphs from the replay don't lead to real gradients:
a gradient that flows into one ends the process as well.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.weak import TensorWeakRef

from flashrun.worker.replay.holders import locate
from flashrun.worker.replay.unreal import Mark, mark_of, storages, tensors_in

if TYPE_CHECKING:
    from flashrun.worker.replay.session import Session

_tensor = torch.Tensor
_GradBucket: Any = getattr(dist, "GradBucket", None)
_ATTRIBUTES = (
    "shape", "dtype", "device", "layout", "requires_grad", "grad_fn", "is_leaf", "ndim", "grad",
    "is_cpu", "is_cuda", "is_sparse", "itemsize", "nbytes", "_version", "output_nr",
)  # fmt: skip
_DESCRIBE = frozenset(  # what tells no value
    {getattr(_tensor, name).__get__ for name in _ATTRIBUTES}
    | {vars(torch._C.TensorBase)[name].__set__ for name in ("requires_grad", "grad")}
    | {vars(torch._C.TensorBase)["grad"].__delete__}
    | {
        _tensor.size, _tensor.dim, _tensor.numel, _tensor.stride, _tensor.is_contiguous,
        _tensor.requires_grad_, _tensor.detach_, _tensor.element_size, _tensor.nelement,
        _tensor.is_floating_point, _tensor.__len__, _tensor.__hash__, _tensor.get_device,
    }
)  # fmt: skip
_OVERWRITE = frozenset(
    {
        _tensor.zero_, _tensor.fill_, _tensor.copy_, _tensor.normal_, _tensor.uniform_,
        _tensor.random_, _tensor.exponential_, torch._foreach_zero_, torch._foreach_copy_,
    }
)  # fmt: skip


class _Used:
    """The part of the classes of poisoned tensors that they have in common."""

    _flashrun_poisoned = True  # read by `carried`

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _DESCRIBE:
                return func(*args, **kwargs)
            if func in _OVERWRITE and not any(
                isinstance(t, _Used) for t in tensors_in((*args[1:], *kwargs.values()))
            ):
                for tensor in tensors_in(args[:1]):
                    heal(tensor)
                return func(*args, **kwargs)
            for tensor in tensors_in((*args, *kwargs.values())):
                if isinstance(tensor, _Used):
                    _refuse(tensor, getattr(func, "__name__", "an operation"))
        raise AssertionError("an operation on a poisoned tensor without one")


_classes: dict[type, type] = {}


def heal(tensor: torch.Tensor) -> None:
    if isinstance(tensor, _Used):
        poisoned: Any = tensor
        poisoned.__class__ = type(tensor).__mro__[2]
        del poisoned._flashrun_poison


def _refuse(tensor: Any, use: str) -> None:
    poison, mark = tensor._flashrun_poison
    poison.refuse(mark, use)


def _poisoned(kind: type) -> type:
    known = _classes.get(kind)
    if known is None:
        known = _classes[kind] = type(kind.__name__, (_Used, kind), {"__module__": kind.__module__})
    return known


def _all_tensors() -> tuple[list[torch.Tensor], list[torch.nn.Module], list[Any]]:
    """Every tensor, module and scaler that the collector knows."""
    kinds: dict[type, int] = {}
    found: tuple[list[Any], list[Any], list[Any]] = ([], [], [])
    for thing in gc.get_objects():
        kind = type(thing)
        number = kinds.get(kind)
        if number is None:
            number = kinds[kind] = (
                0 if issubclass(kind, torch.Tensor)
                else 1 if issubclass(kind, torch.nn.Module)
                else 2 if issubclass(kind, torch.amp.GradScaler)
                else 3
            )
        if number < 3:
            found[number].append(thing)
    return found


def _filled(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """DDP's buckets live on from the replay; C++ has filled them before a communication hook gets
    to see them."""

    def filled(bucket: Any) -> Any:
        content = original(bucket)
        for tensor in tensors_in((content,)):
            heal(tensor)
        return content

    return filled


class Poison:
    """What could not be made real at a join.

    Args:
        b: the boundary of the join.
    """

    def __init__(self, session: Session, b: int) -> None:
        self._session = session
        self._b = b
        self._unreal: list[tuple[torch.Tensor, Mark]] = []
        self._graphs: list[torch.Tensor] = []
        self._grads: set[int] = set()
        self._hoped: set[int] = set()
        self._in_memory: dict[int, list[TensorWeakRef]] = {}

    def find(
        self,
        optimizers: list[torch.optim.Optimizer],
        restored: list[torch.Tensor | None],
        hoped: set[int],
    ) -> None:
        """Find what is alive and unreal, and not sent by peers.

        Args:
            optimizers: all that there are.
            restored: tensors whose content at this boundary came from the log.
            hoped: by id, tensors that may still be computed.

        Raises:
            Divergence: some of it is kept to be used.
        """
        right = {id(t) for t in restored}
        self._hoped = hoped
        self._unreal = self._candidates(optimizers, right)
        if self._kept():
            gc.collect()  # cycles that nobody holds any more
            self._unreal = self._candidates(optimizers, right)
            self._refuse_kept(sys._getframe(1))

    def _candidates(
        self, optimizers: list[torch.optim.Optimizer], right: set[int]
    ) -> list[tuple[torch.Tensor, Mark]]:
        tensors, modules, scalers = _all_tensors()
        sent = {id(s) for t in _state(optimizers, modules, scalers) for s in storages(t)}
        self._grads = {id(t.grad) for t in tensors if t.is_leaf and t.grad is not None}
        self._graphs, found = [], []
        for tensor in tensors:
            if any(id(s) in sent for s in storages(tensor)):
                continue  # also a view of a parameter: both its values and its graph are right
            if tensor.grad_fn is not None:
                self._graphs.append(tensor)
            mark = mark_of(tensor)
            if mark is not None and id(tensor) not in right:
                found.append((tensor, mark))
        return found

    def _kept(self) -> dict[int, Mark]:
        """What has outlived an interval. Gradients always have, and are seldom used again."""
        return {
            id(t): mark
            for t, mark in self._unreal
            if mark.boundary < self._b - 1
            and id(t) not in self._grads
            and id(t) not in self._hoped
        }

    def _refuse_kept(self, frame: FrameType) -> None:
        old = self._kept()
        kept = [(path, old[i]) for i, path in locate(frame, set(old)).items()]
        if kept:
            path, mark = kept[0]
            others = f" (and {len(kept) - 1} more)" if len(kept) > 1 else ""
            raise self._session.diverged(
                f"the script keeps {path}{others}, whose values this replay does not compute and "
                f"no peer sends (made by {mark}); what is kept in a module or an optimizer is sent"
            )

    def unreal(self) -> set[int]:
        """By id, what was found."""
        return {id(t) for t, _ in self._unreal}

    def spread(self, real: list[torch.Tensor]) -> bool:
        """Poison what is left; False: nothing is.

        Args:
            real: outputs that have been computed meanwhile, with their graphs.
        """
        regained = {id(s) for t in real for s in storages(t)}
        count = 0
        for tensor, mark in self._unreal:
            if not any(id(s) in regained for s in storages(tensor)):
                count += 1
                for storage in storages(tensor):
                    self._in_memory.setdefault(storage._cdata, []).append(TensorWeakRef(tensor))
                tensor._flashrun_poison = (self, mark)  # type: ignore[attr-defined]
                tensor.__class__ = _poisoned(type(tensor))
        for tensor in self._graphs:
            if isinstance(tensor, _Used):
                continue
            if not any(id(s) in regained for s in storages(tensor)):  # nor a view of those
                count += 1
                tensor.register_hook(self._no_gradient)  # type: ignore[no-untyped-call]
        self._unreal, self._graphs = [], []
        if count and _GradBucket is not None:
            for name in ("buffer", "gradients"):
                self._session.patches.wrap(_GradBucket, name, _filled)
        return bool(count)

    def _no_gradient(self, grad: torch.Tensor) -> None:
        self._session.refuse(
            "a gradient flows into a graph from before the step at which this worker was replaced:"
            " the replay has not computed it"
        )

    def refuse(self, mark: Mark, use: str) -> None:
        """Something of this is used."""
        self._session.refuse(
            f"'{use}' uses a tensor from before the step at which this worker was replaced, whose"
            f" values the replay has not computed (made by {mark})"
        )

    def overwritten(self, tensor: torch.Tensor) -> None:
        """All memory of `tensor` has got real values behind Python's back: also what lies in it
        (gradients that are views of DDP's bucket)."""
        with torch._C.DisableTorchFunctionSubclass():
            memory = storages(tensor)
        for storage in memory:
            for reference in self._in_memory.pop(storage._cdata, ()):
                inside = reference()
                if inside is not None:
                    heal(inside)

    def check(self, values: Any) -> None:
        """Refuse poison that goes where its class is not asked (compiled code, C++)."""
        for tensor in tensors_in((values,)):
            if isinstance(tensor, _Used):
                _refuse(tensor, "a call")

    def sent(self, inputs: Iterable[torch.Tensor], outputs: Iterable[torch.Tensor]) -> None:
        """The same for a collective, which also gives real values."""
        for tensor in inputs:
            if isinstance(tensor, _Used):
                _refuse(tensor, "a collective")
        for tensor in outputs:
            heal(tensor)


def _state(
    optimizers: list[torch.optim.Optimizer], modules: list[torch.nn.Module], scalers: list[Any]
) -> Iterable[torch.Tensor]:
    """What peers send."""
    for module in modules:
        for own in (module.__dict__.get("_parameters"), module.__dict__.get("_buffers")):
            yield from (t for t in (own or {}).values() if t is not None)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]
        for state in optimizer.state.values():
            yield from tensors_in(state.values() if isinstance(state, dict) else (state,))
    for scaler in scalers:
        yield from (t for t in (scaler._scale, scaler._growth_tracker) if t is not None)


