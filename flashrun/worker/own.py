"""Tensors that the script keeps in places of its own: in objects, lists, dicts, plain attributes of
modules, and in variables that outlive a step (averages of weights, metric accumulators, the best
weights so far).

They are found by walking from the variables of the script's frames at the boundaries at which
replicas are proved, and named by their path, which is the same on every rank and in a replay. What
was there before the first step and has not changed since is not looked at again: a replay makes it
itself. Small ones go to a file of the rank at each boundary, since they may be each rank's own.
Large ones come from peers if all ranks have them equal, and so do small ones that the dead worker
did not come to write down.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from flashrun.worker.flat import Flat, unpack
from flashrun.worker.private import Private
from flashrun.worker.proof import AFTER_RECOVERY
from flashrun.worker.replay.api import Divergence
from flashrun.worker.replay.carried import is_script, variables_of

DEEPEST = 6
MOST = 20_000  # things that are looked at in one walk
SMALL = 64 << 10  # bytes of a tensor that goes to the rank's file
ALL_SMALL = 128 << 10  # bytes of all of them
PREFIX = "own "  # of their names among the state
_SKIPPED = (
    types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, type, str,
    bytes, int, float, bool, complex, type(None), range, torch.optim.Optimizer,
    torch.amp.GradScaler, torch.dtype, torch.device, torch.Size, torch.Generator,
)  # fmt: skip
_COPIED_ELSEWHERE = frozenset({"_parameters", "_buffers"})  # of modules
_INDEXED = (list, tuple, deque)

Step = tuple[bool, Any]  # whether an attribute, and its name; or the key or index


def _frames() -> Iterator[tuple[str, FrameType]]:
    """The script's frames with names, from ``__main__`` inwards."""
    frame: FrameType | None = sys._getframe(1)
    found = []
    while frame is not None:
        if is_script(frame.f_code.co_filename):
            found.append(frame)
            if frame.f_code.co_name == "<module>" and frame.f_globals["__name__"] == "__main__":
                break
        frame = frame.f_back
    for depth, one in enumerate(reversed(found)):
        yield f"{depth}:{one.f_code.co_name}", one


def _roots() -> dict[str, dict[str, Any]]:
    roots: dict[str, dict[str, Any]] = {}
    seen: set[int] = set()
    for name, frame in _frames():
        roots[name] = variables_of(frame)
        if id(frame.f_globals) not in seen:
            seen.add(id(frame.f_globals))
            if frame.f_code.co_name != "<module>":
                roots[f"globals of {frame.f_globals.get('__name__')}"] = frame.f_globals
    return roots


def _attributes(thing: Any) -> dict[str, Any]:
    """The plain attributes, without running any code of the script (properties, proxies)."""
    try:
        own = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return {}
    return own if isinstance(own, dict) else {}


def _slot(thing: Any, key: str) -> Any:
    try:
        return object.__getattribute__(thing, key)
    except AttributeError:
        return None


def _members(thing: Any) -> Iterator[tuple[Step, Any]]:
    kind = type(thing)
    if issubclass(kind, dict):
        members = list(dict.items(thing))
        yield from (((False, k), v) for k, v in members if type(k) in (str, int))
    elif issubclass(kind, _INDEXED):
        yield from (((False, i), v) for i, v in enumerate(thing))
    else:
        module = issubclass(kind, torch.nn.Module)
        for key, value in list(_attributes(thing).items()):
            if not (module and key in _COPIED_ELSEWHERE):
                yield (True, key), value
        slots = getattr(kind, "__slots__", ())
        for key in (slots,) if isinstance(slots, str) else tuple(slots):
            if key not in ("__weakref__", "__dict__"):
                yield (True, key), _slot(thing, key)


def _follow(thing: Any, step: Step) -> Any:
    attribute, key = step
    if attribute:
        own = _attributes(thing)
        return own[key] if key in own else _slot(thing, key)
    if isinstance(thing, dict):
        return dict.get(thing, key)  # creates nothing in a defaultdict
    return thing[key] if isinstance(thing, _INDEXED) and key < len(thing) else None


def _text(path: tuple[Step, ...]) -> str:
    return "".join(f".{key}" if attribute else f"[{key!r}]" for attribute, key in path)


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class Own:
    """See the module.

    Attributes:
        shared: names of what all ranks have equal, as far as was seen.
        large: name -> copy of what the large ones of these held at the last boundary.
    """

    def __init__(self, folder: Path, rank: int, fresh: bool) -> None:
        self._file = Private(folder, rank, fresh, "own")
        self._tree: dict[Step, Any] = {}  # of the paths to what was found; leaves are names
        # before the first step: tensor and version
        self._before: dict[str, tuple[weakref.ref[torch.Tensor], int]] | None = None
        # plain variables at the last walk
        self._outlived: dict[str, weakref.ref[torch.Tensor]] = {}
        self._small: list[str] = []
        self._large: list[str] = []
        self._answered: set[str] = set()
        self._postponed: set[str] = set()  # large ones that are copied once the ranks are compared
        self._flat: Flat | None = None
        self._written = -1  # the boundary that `_flat` is of
        self.shared: set[str] = set()
        self.large: dict[str, torch.Tensor] = {}
        # In a replacement: names of what all of its peers have equal, and what it takes of that.
        self.offered: list[str] = []
        self.taken: list[str] = []
        self.taken_at = -1  # the boundary

    def taken_lately(self, b: int) -> list[str]:
        """What was taken from peers, while the ranks are compared for it: a rank that was replaced
        long ago is a survivor like the others."""
        return self.taken if b <= self.taken_at + AFTER_RECOVERY else []

    # --- finding

    def _walk(self, known: set[int]) -> Iterator[tuple[tuple[Step, ...], torch.Tensor, bool]]:
        """Path, tensor, and whether it is a plain variable; breadth first. What is a plain variable
        and kept elsewhere too comes twice."""
        seen: set[int] = set()
        level: list[tuple[tuple[Step, ...], Any]] = [
            (((False, root), (False, name)), value)
            for root, variables in _roots().items()
            for name, value in variables.items()
            if not name.startswith("__")
        ]
        for depth in range(DEEPEST):
            following: list[tuple[tuple[Step, ...], Any]] = []
            for path, thing in level:
                kind = type(thing)
                if issubclass(kind, torch.Tensor):
                    if (
                        id(thing) not in seen
                        and id(thing) not in known
                        and kind is torch.Tensor
                        and thing.layout is torch.strided
                        and thing.grad_fn is None
                        and not thing.requires_grad
                    ):
                        if depth:
                            seen.add(id(thing))
                        yield path, thing, depth == 0
                elif (
                    id(thing) not in seen
                    and not issubclass(kind, _SKIPPED)
                    and not kind.__module__.startswith("flashrun.")
                ):
                    seen.add(id(thing))
                    if len(seen) > MOST:
                        return
                    following.extend(((*path, step), value) for step, value in _members(thing))
            level = following

    @staticmethod
    def _name(path: tuple[Step, ...]) -> str:
        (_, root), (_, variable), *rest = path
        return f"{PREFIX}{root} {variable}{_text(tuple(rest))}"

    def before_first_step(self, known: Iterable[torch.Tensor]) -> None:
        """Remember what there is before anything was trained."""
        if self._before is None:
            ids = {id(t) for t in known}
            self._before = {
                self._name(path): (weakref.ref(t), t._version) for path, t, _ in self._walk(ids)
            }

    def find(
        self, known: Iterable[torch.Tensor], replacement: bool = False, small_only: bool = False
    ) -> None:
        """Look again at what the script keeps.

        Args:
            known: what is carried otherwise.
            replacement: that looks for the first time, and has the names from others.
            small_only: the ranks are not compared now, so large ones that are new have to wait.
        """
        before = self._before or {}
        outlived: dict[str, weakref.ref[torch.Tensor]] = {}
        self._tree, self._small, self._large = {}, [], []
        room = ALL_SMALL
        taken: set[int] = set()
        for path, tensor, plain_variable in self._walk({id(t) for t in known}):
            name = self._name(path)
            if plain_variable:
                outlived[name] = weakref.ref(tensor)
                there = self._outlived.get(name)
                if not replacement and (there is None or there() is not tensor):
                    continue
            was = before.get(name)
            unchanged = was is not None and was[0]() is tensor and was[1] == tensor._version
            if unchanged and not replacement:  # whose versions need not count what it skipped
                continue
            if id(tensor) in taken and not replacement:  # which does not know by which name
                continue
            taken.add(id(tensor))
            size = _size(tensor)
            if size <= min(SMALL, room):
                room -= size
                self._small.append(name)
            else:
                self._large.append(name)
            tree = self._tree
            for step in path[:-1]:
                tree = tree.setdefault(step, {})
            tree[path[-1]] = name
        self._outlived = outlived
        self._postponed = set()
        if small_only:
            self._postponed = {name for name in self._large if name not in self._answered}

    def now(self) -> dict[str, torch.Tensor]:
        """What was found, as it is now, by name."""
        found: dict[str, torch.Tensor] = {}
        if self._tree:
            _collect(_roots(), self._tree, found)
        # In a replacement one may be poisoned (replay/poison.py), which its class tells: looking
        # at it is no use of it by the script.
        return {name: tensor for name, tensor in found.items() if type(tensor) is torch.Tensor}

    # --- at boundaries

    def at_boundary(self, boundary: int) -> None:
        """Write the small ones down, and copy the large ones that peers may be asked for."""
        self._written = boundary
        if not self._tree:
            self._flat, self.large = None, {}
            return
        now = self.now()
        small = {name: now[name] for name in self._small if name in now}
        if self._flat is None or not self._flat.fits(small):
            self._flat = Flat(small)
        self._file.write(boundary, self._flat.fill(small))
        left_out = (self._answered | self._postponed) - self.shared
        large = {
            name: now[name].detach()
            for name in self._large
            if name in now and name not in left_out
        }
        self.large = {
            name: copy
            if (copy := self.large.get(name)) is not None
            and copy.shape == tensor.shape
            and copy.dtype == tensor.dtype
            else torch.empty_like(tensor)
            for name, tensor in large.items()
        }
        if large:
            torch._foreach_copy_(list(self.large.values()), list(large.values()))

    def copies(self, boundary: int) -> dict[str, torch.Tensor]:
        """What was copied at the last boundary, by name.

        Raises:
            LookupError: that is another boundary.
        """
        if boundary != self._written:
            raise LookupError(f"what the script keeps was copied at boundary {self._written}")
        small = unpack(bytes(self._flat.content)) if self._flat is not None else {}
        return {**small, **self.large}

    def names_at(self, boundary: int) -> set[str]:
        """Of what was copied at a boundary; none where that was not the last one."""
        return set(self.copies(boundary)) if boundary == self._written else set()

    def answered(self, asked: Iterable[str], shared: Iterable[str]) -> None:
        """The ranks were compared: which of the names that were asked for are equal everywhere."""
        self._answered.update(asked)
        self.shared = set(shared)  # read by the script's thread: replaced, not changed

    # --- in a replacement

    def recorded(self, boundary: int) -> dict[str, torch.Tensor]:
        """What the dead worker wrote down at a boundary, by name."""
        content = self._file.read(boundary)
        return unpack(content) if content is not None else {}

    def missing(
        self, boundary: int, shared: Iterable[str], made: Callable[[torch.Tensor], bool]
    ) -> list[str]:
        """Names of what this replacement takes from peers, where all have the same: what is not in
        the file. If the worker died before it had written that at all, of what the file has of the
        boundary before only what is not known here: what a rank counts for itself mostly is.

        Args:
            shared: names of what all ranks have equal.
            made: whether the replay has made a tensor's real content.
        """
        recorded = self.recorded(boundary)
        if recorded:
            return [name for name in shared if name not in recorded]
        before, now = self.recorded(boundary - 1), self.now()
        return [n for n in shared if n not in before or (n in now and not made(now[n]))]

    def can_fill(self, boundary: int, taken: Iterable[str]) -> dict[str, torch.Tensor]:
        """The tensors of this replacement that will get the dead worker's values: from its file, or
        those of the names `taken` from peers."""
        names = self.recorded(boundary).keys() | set(taken)
        return {name: t for name, t in self.now().items() if name in names}

    def fill(self, boundary: int) -> None:
        """Fill in what the dead worker wrote down."""
        now = self.now()
        for name, content in self.recorded(boundary).items():
            tensor = now.get(name)
            if tensor is None:
                continue
            if tensor.shape != content.shape or tensor.dtype != content.dtype:
                raise Divergence(f"{name} has another shape or type than the dead worker's")
            tensor.copy_(content)


def _collect(thing: Any, tree: dict[Step, Any], found: dict[str, torch.Tensor]) -> None:
    for step, below in tree.items():
        member = _follow(thing, step)
        if isinstance(below, str):
            if isinstance(member, torch.Tensor):
                found[below] = member
        elif member is not None:
            _collect(member, below, found)
