"""What stands for the results of skipped regions, and when a region can't be skipped."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from flashrun.worker.replay import surroundings
from flashrun.worker.replay.surroundings import MODULE_KEYS, PLAIN

LARGE = 1 << 20  # elements above which an output is not copied for every call
MADE_OF = "_flashrun_made_of"  # of a kept leaf: the positions of inputs that its graph led to
Zeros = Callable[[Any, Any, Any], torch.Tensor]  # shape, type, device -> a gradient
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_SIZED = (list, dict, set, tuple)


def context() -> tuple[Any, ...]:
    """What besides its arguments decides the kind of a forward's output."""
    return (
        torch.is_grad_enabled(),
        torch._C._is_any_autocast_enabled()
        and (
            torch.is_autocast_enabled("cpu"),
            torch.is_autocast_enabled("cuda"),
            torch.get_autocast_dtype("cpu"),
            torch.get_autocast_dtype("cuda"),
        ),
        torch.is_inference_mode_enabled(),
    )


def signature(value: Any) -> Any:
    """A hashable description of the kind of a value: shapes and types, plain values themselves."""
    if type(value) is tuple and len(value) == 1:  # mostly: one tensor that a module is given
        return (tuple, signature(value[0]))
    if isinstance(value, torch.Tensor):
        return (value.shape, value.dtype, value.device, value.requires_grad)
    if value is None or isinstance(value, (int, float, str, bool)):
        return (type(value), value)
    if isinstance(value, (tuple, list)):
        return (type(value), *[signature(v) for v in value])
    if isinstance(value, dict):
        return (type(value), *[(k, signature(v)) for k, v in value.items()])
    return type(value)


def can_stand_in(output: Any) -> bool:
    """Whether later outputs of the same kind can be stood for by this one: numbers and texts in
    it are values of this call."""
    return all(
        leaf is None or isinstance(leaf, (bool, torch.Tensor)) or not isinstance(leaf, PLAIN)
        for leaf in pytree.tree_leaves(output)
    )


class Slot:
    """Where what flows back into outputs goes on, if not to where they came from.

    Attributes:
        real: the outputs as they were computed again.
        later: gets this and the gradients then, for the end of the backward.
        spent: backward has run through the graph, and has not kept it.
    """

    __slots__ = ("__weakref__", "later", "real", "spent")

    def __init__(self, later: list[Any]) -> None:
        self.real: list[torch.Tensor] | None = None
        self.later = later
        self.spent = False


class _Kept(torch.autograd.Function):
    """Outputs whose graph can be exchanged."""

    @staticmethod
    def forward(ctx: Any, slot: Slot, anchor: torch.Tensor, *kept: torch.Tensor) -> Any:
        ctx.slot = slot
        ctx.set_materialize_grads(False)
        return tuple(t.detach() for t in kept)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        if ctx.slot.real is None:
            return (None, None, *grads)
        ctx.slot.later.append((ctx.slot, grads))
        return (None, None, *[None for _ in grads])


_anchors: list[torch.Tensor] = []


def anchor() -> torch.Tensor:
    """A leaf that makes a graph of what has none."""
    if not _anchors:
        _anchors.append(torch.zeros((), requires_grad=True))
    return _anchors[0]


def keep_output(output: Any) -> Any:
    """A copy of an output without its graph; leaves remember whether they had one."""

    def keep(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            kept = leaf.detach().clone()
            return kept.requires_grad_() if leaf.requires_grad else kept
        return leaf

    if type(output) is torch.Tensor:
        return keep(output)
    return pytree.tree_map(keep, output)


class _Linked(torch.autograd.Function):
    """A stand-in that stays linked with what the module was given: backward goes on into that,
    with zeros."""

    @staticmethod
    def forward(ctx: Any, zeros: Zeros, kept: torch.Tensor, *inputs: torch.Tensor) -> Any:
        ctx.zeros = zeros
        ctx.kinds = [(t.shape, t.dtype, t.device) for t in inputs]
        return kept.clone() if kept.numel() <= LARGE else kept.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (None, *grads, *[ctx.zeros(*kind) for kind in ctx.kinds])


def linked(kept: torch.Tensor, inputs: Sequence[torch.Tensor], zeros: Zeros) -> torch.Tensor:
    """A copy of `kept` that stays linked with inputs."""
    made: torch.Tensor = _Linked.apply(zeros, kept, *inputs)  # type: ignore[no-untyped-call]
    return made


def _copy(kept: Any, inputs: Sequence[torch.Tensor], zeros: Zeros) -> Any:
    if not isinstance(kept, torch.Tensor):
        return kept
    if kept.requires_grad:
        made_of = kept.__dict__.get(MADE_OF)
        if made_of:
            return linked(kept, [inputs[i] for i in made_of if i < len(inputs)], zeros)
        if kept.numel() <= LARGE:
            return kept.clone()  # not a leaf, so that the script may change it in place
        return _Kept.apply(Slot([]), anchor(), kept)[0]  # type: ignore[no-untyped-call]
    return kept.clone() if kept.numel() <= LARGE else kept.detach()


def copy_output(kept: Any, inputs: Sequence[torch.Tensor], zeros: Zeros) -> Any:
    """A fresh stand-in for an output.

    Args:
        kept: from `keep_output`; its leaves may say which inputs they were made of (`MADE_OF`).
        inputs: the tensors that the module is given.
        zeros: makes the gradients that flow back into those.
    """
    if type(kept) is torch.Tensor:
        return _copy(kept, inputs, zeros)
    return pytree.tree_map(lambda leaf: _copy(leaf, inputs, zeros), kept)


def with_slot(output: Any, later: list[Any]) -> tuple[Any, Slot, list[torch.Tensor]]:
    """The same output behind a slot; also its differentiable leaves."""
    slot = Slot(later)
    leaves, spec = pytree.tree_flatten(output)
    at = [i for i, t in enumerate(leaves) if isinstance(t, torch.Tensor) and t.requires_grad]
    if at:
        fresh = _Kept.apply(  # type: ignore[no-untyped-call]
            slot, anchor(), *[leaves[i] for i in at]
        )
        for i, new in zip(at, fresh, strict=True):
            leaves[i] = new
    return pytree.tree_unflatten(leaves, spec), slot, [leaves[i] for i in at]


def tensors(value: Any) -> list[torch.Tensor]:
    """All tensors in a structure."""
    if type(value) is torch.Tensor:
        return [value]
    return [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


def is_compiled(module: torch.nn.Module) -> bool:
    """Some of it runs as compiled code, which is not made while operations are followed."""
    return any(
        m._compiled_call_impl is not None or type(m).__module__.startswith("torch._dynamo")
        for m in module.modules()
    )


def differentiable(output: Any) -> list[torch.Tensor]:
    """The leaves of an output that have a graph."""
    return [
        t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad
    ]


def _own(module: torch.nn.Module) -> list[tuple[str, Any]]:
    return [
        (key, value)
        for m in module.modules()
        if not type(m).__module__.startswith("torch.")
        for key, value in m.__dict__.items()
        if key not in MODULE_KEYS
    ]


def has_own_generator(module: torch.nn.Module) -> bool:
    """The module draws from a generator that is not a global one."""
    return any(isinstance(value, _GENERATORS) for _, value in _own(module))


def python_values(module: torch.nn.Module) -> tuple[list[Any], list[Any]]:
    """The plain values (and sizes of containers) that the script's own modules hold, and the
    identities and versions of the tensors among their plain attributes."""
    plain: list[Any] = []
    tensors: list[Any] = []
    for key, value in _own(module):
        if isinstance(value, PLAIN):
            plain.append((key, value))
        elif isinstance(value, torch.Tensor):
            tensors.append((key, id(value), value._version))
        elif isinstance(value, _SIZED):
            plain.append((key, len(value)))
    return plain, tensors


def values_around(module: torch.nn.Module) -> tuple[list[Any], list[Any]]:
    """The same, and what else of the script a call of the module may change."""
    plain, tensors = python_values(module)
    return [*plain, *surroundings.look((module, type(module)))], tensors


def object_values(value: Any, depth: int = 3) -> list[Any]:
    """Plain values in reach of a dataset, for seeing whether a fetch changes them."""
    found: list[Any] = []
    for key, member in list(getattr(value, "__dict__", {}).items()):
        if isinstance(member, PLAIN):
            found.append((key, member))
        elif isinstance(member, _SIZED):
            found.append((key, len(member)))
            if depth and isinstance(member, (list, tuple)) and len(member) <= 32:
                for one in member:
                    found.extend(object_values(one, depth - 1))
        elif isinstance(member, _GENERATORS):
            found.append((key, "generator"))
        elif depth and not isinstance(member, (torch.Tensor, type)):
            found.extend(object_values(member, depth - 1))
    return found


def holds_generator(value: Any) -> bool:
    """A dataset with a generator of its own (it would have to be advanced by fetching)."""
    return any(entry[1] == "generator" for entry in object_values(value) if len(entry) == 2)
