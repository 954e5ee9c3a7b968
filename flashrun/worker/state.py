"""Everything of a script that has state: found, named the same on every rank, laid out as bytes.

Objects are noted as they are created (``Module.__init__``, ``Module.__setstate__`` for copies,
``Optimizer.__init__``, ``GradScaler.__init__``; torch 2.13), by weak reference and in order, so
that one script gives one numbering. What a replay computes exactly by itself (schedulers, counters)
is not sent. Tensors that change between an optimizer's step and the next (buffers, EMA copies, a
scaler) are copied at every boundary, since a survivor is held later than that.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from flashrun.worker import scalers
from flashrun.worker.buckets import Buckets
from flashrun.worker.replay.api import Divergence

_numpy = torch.Tensor.numpy  # taken before the replay puts its door there


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    view: memoryview = _numpy(flat).data
    return view


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as a contiguous one on the CPU: itself, or a copy."""
    return tensor.detach().contiguous().cpu()


def in_place(tensor: torch.Tensor) -> bool:
    """Whether bytes can be received right into its memory."""
    return tensor.device.type == "cpu" and tensor.is_contiguous()


class Objects:
    """The objects with state that exist, in order of creation."""

    def __init__(self) -> None:
        self.version = 0
        self._modules: list[tuple[str, weakref.ref[torch.nn.Module]]] = []
        self._optimizers: list[tuple[str, weakref.ref[torch.optim.Optimizer]]] = []
        self._scalers: list[tuple[str, weakref.ref[Any]]] = []
        self._counts: dict[str, int] = {}
        self._known: dict[int, weakref.ref[Any]] = {}

    def install(self) -> Callable[[], None]:
        """Patch the constructors; returns the undo."""
        undo: list[Callable[[], None]] = []

        def note(owner: Any, name: str, found: list[Any]) -> None:
            original = owner.__dict__[name]

            def noted(this: Any, *args: Any, **kwargs: Any) -> Any:
                self._note(this, found)
                return original(this, *args, **kwargs)

            noted.__wrapped__ = original  # type: ignore[attr-defined]
            for attribute in ("__name__", "__qualname__", "__doc__", "__module__"):
                setattr(noted, attribute, getattr(original, attribute))
            setattr(owner, name, noted)
            undo.append(lambda: setattr(owner, name, original))

        note(torch.nn.Module, "__init__", self._modules)
        note(torch.nn.Module, "__setstate__", self._modules)
        note(torch.optim.Optimizer, "__init__", self._optimizers)
        note(torch.amp.GradScaler, "__init__", self._scalers)

        def undo_all() -> None:
            for step in undo:
                step()

        return undo_all

    def _note(self, this: Any, found: list[Any]) -> None:
        # By identity, and never through a hash: a class may define its own (torchmetrics' reads
        # what is not there yet in its constructor).
        key = id(this)
        known = self._known.get(key)
        if known is None or known() is not this:
            self._known[key] = weakref.ref(this, lambda _: self._known.pop(key, None))
            # numbered per class: a copy that one rank alone makes must not shift other names
            kind = type(this).__name__
            number = self._counts[kind] = self._counts.get(kind, -1) + 1
            found.append((f"{kind}#{number}", weakref.ref(this)))
            self.version += 1

    @staticmethod
    def _alive(noted: list[tuple[str, weakref.ref[Any]]]) -> Iterator[tuple[str, Any]]:
        for name, ref in noted:
            found = ref()
            if found is not None:
                yield name, found

    def modules(self) -> list[tuple[str, torch.nn.Module]]:
        """The outermost modules with their names."""
        alive = [(n, m) for n, m in self._alive(self._modules) if "_modules" in m.__dict__]
        inner = {id(c) for _, m in alive for c in m._modules.values() if c is not None}
        return [(n, m) for n, m in alive if id(m) not in inner]

    def optimizers(self) -> list[tuple[str, torch.optim.Optimizer]]:
        return [
            (n, o) for n, o in self._alive(self._optimizers) if "param_groups" in o.__dict__
        ]

    def scalers(self) -> list[tuple[str, Any]]:
        return list(self._alive(self._scalers))


@dataclass
class Layout:
    """What there is at a boundary.

    Attributes:
        tensors: name -> tensor, in an order that is the same on every rank.
        trees: per optimizer, its state as JSON with tensors by name.
        moving: names of those that are copied at each boundary.
        buffers: names of modules' buffers, which may differ between ranks (see `private`).
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    trees: dict[str, Any] = field(default_factory=dict)
    moving: list[str] = field(default_factory=list)
    buffers: list[str] = field(default_factory=list)

    def describe(self) -> dict[str, Any]:
        """As JSON: what the receiver needs to make room."""
        return {
            "tensors": [
                [name, str(t.dtype).removeprefix("torch."), list(t.shape)]
                for name, t in self.tensors.items()
            ],
            "trees": self.trees,
        }

    def size(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


def _encode(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_encode(v, f"{name}/{i}", tensors) for i, v in enumerate(value)]}
    if isinstance(value, dict):
        return {
            "dict": [
                [k if type(k) in (str, int) else str(k), _encode(v, f"{name}/{k}", tensors)]
                for k, v in value.items()
            ]
        }
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    return {"opaque": type(value).__name__}  # stays as it is on the receiver


def _key(key: Any) -> Any:
    """The one string of that content that a program text has, as the optimizer's own code would
    use: a pickle of several states holds it once, and a checkpoint is the same file."""
    return sys.intern(key) if type(key) is str else key


def _decode(tree: Any, old: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if "tensor" in tree:
        return tensors[tree["tensor"]]
    for kind in (list, tuple):
        if kind.__name__ in tree:
            olds = list(old) if isinstance(old, (list, tuple)) else []
            return kind(
                _decode(t, olds[i] if i < len(olds) else None, tensors)
                for i, t in enumerate(tree[kind.__name__])
            )
    if "dict" in tree:
        olds_by = {str(k): v for k, v in old.items()} if isinstance(old, dict) else {}
        return {_key(k): _decode(t, olds_by.get(str(k)), tensors) for k, t in tree["dict"]}
    return tree.get("value", old)


class State:
    """The state of this rank: laid out, copied at boundaries, hashed, received."""

    def __init__(self, objects: Objects) -> None:
        self.objects = objects
        self._version = -1
        self._names: list[str] = []
        self._copies: list[torch.Tensor] = []
        self._moving: list[torch.Tensor] = []
        self._scalers: dict[str, torch.Tensor] = {}
        self.buffers: list[torch.Tensor] = []
        self.buckets = Buckets()
        self.boundary = 0

    def layout(self) -> Layout:
        """What there is now; tensors by reference."""
        layout = Layout()
        tensors: dict[str, torch.Tensor] = {}
        seen: set[int] = set()
        owned: set[int] = set()
        for _, optimizer in self.objects.optimizers():
            for group in optimizer.param_groups:
                owned.update(id(p) for p in group["params"])

        def add(name: str, tensor: Any, moving: bool) -> None:
            if isinstance(tensor, torch.Tensor) and id(tensor) not in seen:
                seen.add(id(tensor))
                tensors[name] = tensor
                if moving:
                    layout.moving.append(name)

        for head, module in self.objects.modules():
            for name, parameter in module.named_parameters():
                add(f"{head}/{name}", parameter, id(parameter) not in owned)
            for name, buffer in module.named_buffers():
                if buffer is not None and id(buffer) not in seen:
                    layout.buffers.append(f"{head}/{name}")
                add(f"{head}/{name}", buffer, True)
        for head, optimizer in self.objects.optimizers():
            at = 0
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    add(f"{head}/param/{at}", parameter, False)
                    if parameter in optimizer.state:
                        name = f"{head}/{at}"
                        layout.trees[name] = _encode(optimizer.state[parameter], name, tensors)
                    at += 1
        optimizers = self.objects.optimizers()
        for head, scaler in self.objects.scalers():
            for name, tensor in scalers.tensors_of(head, scaler, optimizers):
                add(name, tensor, False)  # copied apart: they are others at each boundary
        layout.tensors = tensors
        return layout

    def versions(self) -> list[Any]:
        """What tells whether an optimizer has changed anything since it was asked before."""
        found: list[Any] = []
        for _, optimizer in self.objects.optimizers():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    held = optimizer.state.get(parameter)
                    values = held.values() if isinstance(held, dict) else ()
                    for value in (parameter, *values):
                        if isinstance(value, torch.Tensor):
                            found.append(value._version)
                        else:
                            found.append(value if isinstance(value, (int, float)) else id(value))
        return found

    def refresh(self, force: bool) -> None:
        """Look again at what there is, if there may be something new."""
        if force or self._version != self.objects.version:
            self._version = self.objects.version
            layout = self.layout()
            self.buckets.note(
                m
                for _, m in self.objects.modules()
                if isinstance(m, torch.nn.parallel.DistributedDataParallel)
            )
            self.buffers = [layout.tensors[name].detach() for name in layout.buffers]
            self._names = layout.moving
            self._moving = [layout.tensors[name].detach() for name in layout.moving]
            self._copies = [torch.empty_like(t) for t in self._moving]

    def at_boundary(self, boundary: int) -> None:
        """Copy what moves between steps. Cheap where there is nothing of the kind."""
        self.boundary = boundary
        self.refresh(boundary <= 3)
        if self._moving:
            with torch.no_grad():
                torch._foreach_copy_(self._copies, self._moving)
        found = self.objects.scalers()
        optimizers = self.objects.optimizers() if found else []
        self._scalers = {
            name: tensor.detach().clone()
            for head, scaler in found
            for name, tensor in scalers.tensors_of(head, scaler, optimizers)
        }

    def at(self, boundary: int) -> Layout:
        """The state as it was at the last boundary.

        Raises:
            LookupError: that is another boundary.
        """
        if boundary != self.boundary:
            raise LookupError(f"this rank is at boundary {self.boundary}, not {boundary}")
        layout = self.layout()
        for name, copy in zip(self._names, self._copies, strict=True):
            if name in layout.tensors:
                layout.tensors[name] = copy
        for name in [n for n in layout.tensors if n.startswith(scalers.PREFIX)]:
            del layout.tensors[name]
        layout.tensors.update(self._scalers)
        return layout

    def shape_at(self, boundary: int) -> str:
        """A hash of names and shapes of what a receiver must have to take this state; what
        optimizers and scalers hold is made for it."""
        described = self.at(boundary).describe()
        made: set[str] = set()
        _names_in(described["trees"], made)
        return fingerprint(
            {
                "tensors": sorted(
                    str(t)
                    for t in described["tensors"]
                    if t[0] not in made and not t[0].startswith(scalers.PREFIX)
                )
            }
        )

    def room(
        self, described: dict[str, Any], kept: dict[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], Callable[[], None]]:
        """Make room for what a donor describes.

        Args:
            kept: what the script keeps in places of its own, by name.

        Returns:
            Per name a contiguous CPU tensor to fill, in the donor's order, and what puts the
            content in its place afterwards.

        Raises:
            Divergence: this rank has not got the donor's modules, or in another shape.
        """
        mine = {**self.layout().tensors, **kept}
        into: dict[str, torch.Tensor] = {}
        final: dict[str, torch.Tensor] = {}
        in_trees: set[str] = set()
        _names_in(described["trees"], in_trees)
        problems = []
        for name, dtype_name, shape in described["tensors"]:
            dtype = getattr(torch, dtype_name)
            own = mine.get(name)
            if own is not None and (list(own.shape) != shape or own.dtype != dtype):
                if name not in in_trees:
                    problems.append(f"{name}: {list(own.shape)} here, {shape} on the donor")
                    continue
                own = None
            if own is None:
                if name not in in_trees and not name.startswith(scalers.PREFIX):
                    problems.append(f"{name}: only on the donor")
                    continue
                own = torch.empty(shape, dtype=dtype)
            final[name] = own
            into[name] = own.detach() if in_place(own) else torch.empty(shape, dtype=dtype)
        if problems:
            raise Divergence("the state differs from the donor's: " + "; ".join(problems[:5]))

        def put() -> None:
            with torch.no_grad():
                for name, tensor in final.items():
                    if into[name].data_ptr() != tensor.data_ptr():
                        tensor.detach().copy_(into[name])
            self._put_trees(described["trees"], final)

        return into, put

    def _put_trees(self, trees: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        for head, optimizer in self.objects.optimizers():
            at = 0
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    tree = trees.get(f"{head}/{at}")
                    if tree is not None:
                        old = optimizer.state.get(parameter)
                        optimizer.state[parameter] = _decode(tree, old, tensors)
                    elif parameter in optimizer.state:
                        del optimizer.state[parameter]
                    at += 1
        for head, scaler in self.objects.scalers():
            scalers.put(head, scaler, self.objects.optimizers(), tensors)


def _names_in(tree: Any, found: set[str]) -> None:
    if isinstance(tree, dict):
        if "tensor" in tree and isinstance(tree["tensor"], str):
            found.add(tree["tensor"])
        for value in tree.values():
            _names_in(value, found)
    elif isinstance(tree, list):
        for value in tree:
            _names_in(value, found)


def fingerprint(described: dict[str, Any]) -> str:
    """A hash of a description: two donors with equal ones have the same layout of bytes."""
    text = json.dumps(described, sort_keys=True).encode()
    return hashlib.blake2b(text, digest_size=8).hexdigest()


def nbytes(dtype_name: str, shape: list[int]) -> int:
    dtype: torch.dtype = getattr(torch, dtype_name)
    return math.prod(shape) * dtype.itemsize
