"""The operation log: what collectives an interval had, with what it takes to issue them again.

An entry holds the arguments as the script gave them (by reference), a copy of what the operation
overwrites (its inputs, where it works in place), and whether it completed here. How an operation is
issued again or given to somebody else is a property of its type, in the one table `KINDS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from flashrun.worker.communicator import Handle
    from flashrun.worker.process_group import FlashProcessGroup

SMALL = 64 * 1024  # bytes up to which a tensor is copied rather than kept by reference

Tensors = list[torch.Tensor]


def flatten(value: Any) -> Tensors:
    """The tensors in nested lists, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    found: Tensors = []
    if isinstance(value, (list, tuple)):
        for member in value:
            if isinstance(member, torch.Tensor):
                found.append(member)
            else:
                found += flatten(member)
    return found


def substitute(value: Any, by: dict[int, torch.Tensor]) -> Any:
    """`value` with each tensor replaced by ``by[id(tensor)]``, lists kept."""
    if isinstance(value, torch.Tensor):
        return by.get(id(value), value)
    if isinstance(value, (list, tuple)):
        return [substitute(member, by) for member in value]
    return value


@dataclass(frozen=True)
class Kind:
    """A type of operation.

    Attributes:
        inputs, outputs: from the arguments; in place where both give the same tensors.
        same_everywhere: one member's output is every member's output, so that a finished operation
            can be served by any survivor.
        synchronizes: its completion on one rank means that every rank had issued it.
        point_to_point: the other members do not take part and do not count it.
    """

    inputs: Callable[[tuple[Any, ...]], Any]
    outputs: Callable[[tuple[Any, ...]], Any]
    same_everywhere: bool = False
    synchronizes: bool = False
    point_to_point: bool = False


def _first(args: tuple[Any, ...]) -> Any:
    return args[0]


def _second(args: tuple[Any, ...]) -> Any:
    return args[1]


def _none(_: tuple[Any, ...]) -> Any:
    return ()


KINDS: dict[str, Kind] = {
    "allreduce": Kind(_first, _first, same_everywhere=True, synchronizes=True),
    "allreduce_coalesced": Kind(_first, _first, same_everywhere=True, synchronizes=True),
    "broadcast": Kind(_first, _first, same_everywhere=True),
    "barrier": Kind(_none, _none, same_everywhere=True, synchronizes=True),
    "monitored_barrier": Kind(_none, _none, same_everywhere=True, synchronizes=True),
    "allgather": Kind(_second, _first, same_everywhere=True, synchronizes=True),
    "allgather_coalesced": Kind(_second, _first, same_everywhere=True, synchronizes=True),
    "_allgather_base": Kind(_second, _first, same_everywhere=True, synchronizes=True),
    "reduce": Kind(_first, _first),
    "gather": Kind(_second, _first),
    "scatter": Kind(_second, _first),
    "reduce_scatter": Kind(_second, _first, synchronizes=True),
    "_reduce_scatter_base": Kind(_second, _first, synchronizes=True),
    "alltoall": Kind(_second, _first, synchronizes=True),
    "alltoall_base": Kind(_second, _first, synchronizes=True),
    "send": Kind(_first, _none, point_to_point=True),
    "recv": Kind(_none, _first, point_to_point=True),
    "recv_anysource": Kind(_none, _first, point_to_point=True),
}


GATHERS = frozenset({"allgather", "allgather_coalesced", "_allgather_base", "gather"})


class Kept:
    """A tensor's content at one moment: a copy, or a reference with the version it had."""

    __slots__ = ("content", "copied", "version")

    def __init__(self, tensor: torch.Tensor, copy: bool) -> None:
        self.copied = copy
        self.content = tensor.detach().clone() if copy else tensor
        self.version = 0 if copy else tensor._version

    def get(self) -> torch.Tensor | None:
        """The content, or None where the tensor has been changed since."""
        if self.copied or self.content._version == self.version:
            return self.content
        return None


class Op:
    """One collective in the log. See the module.

    Attributes:
        in_backward: issued by what runs in backward (DDP's buckets).
        seq: number in its group, counted from the group's creation (point to point: -1).
        args: as given to the backend.
        saved: per input tensor what it held when the operation was issued; None: not retained.
        aside: it works in copies of the tensors that it was given (see `set_aside`).
        results: per output tensor what it held on completion, taken when it is first asked for.
        handle: the operation on the present communicator; None: not issued there.
        issued: it was given to a communicator, so its outputs may hold anything.
        kept: bytes of copies in `saved` (see `retention`).
        held: bytes that this entry keeps in memory, copies and all that it refers to.
        done: completed on this rank, so the script may have gone on with the result.
        dropped: issued again although done, for the others' sake; kept until it ends.
    """

    __slots__ = (
        "args", "aside", "done", "dropped", "future", "group", "handle", "held", "in_backward",
        "interval", "issued", "kept", "kind", "results", "saved", "seq",
    )  # fmt: skip

    def __init__(
        self,
        group: FlashProcessGroup,
        kind: str,
        args: tuple[Any, ...],
        seq: int,
        interval: int,
        in_backward: bool = False,
    ) -> None:
        self.group = group
        self.kind = kind
        self.args = args
        self.seq = seq
        self.interval = interval
        self.in_backward = in_backward
        self.saved: list[Kept] | None = None
        self.aside = False
        self.results: list[Kept] | None = None
        self.handle: Handle | None = None
        self.issued = False
        self.kept = 0
        self.held = 0
        self.done = False
        self.dropped: Any = None
        self.future: Any = None

    def describe(self) -> str:
        return f"{self.kind} {self.seq} of group {self.group.ident}"

    def peers(self) -> list[int]:
        """Global ranks that it takes to complete."""
        if self.kind in ("send", "recv"):
            return [self.group.ranks[self.args[1]]]
        return [] if KINDS[self.kind].point_to_point else self.group.ranks

    def outputs(self) -> Tensors:
        return flatten(KINDS[self.kind].outputs(self.args))

    def inputs(self) -> Tensors:
        return flatten(KINDS[self.kind].inputs(self.args))

    def weight(self) -> int:
        """Bytes that it keeps in memory, about: it has at least some objects."""
        return 1024 + self.kept + sum([t.numel() * t.element_size() for t in self.outputs()])

    def retain(self, room: float) -> int:
        """Keep the inputs: copies where the operation overwrites them or where they are small.

        Args:
            room: bytes; where the copies take more, nothing is kept.

        Returns:
            Bytes that the copies take or would take.
        """
        kind = KINDS[self.kind]
        inputs = kind.inputs(self.args)
        if type(inputs) is tuple or (self.kind == "broadcast" and not self.is_root()):
            self.saved = []  # none, or overwritten, and nobody asks for what it held
            return 0
        in_place = inputs is kind.outputs(self.args)
        tensors = flatten(inputs)
        sizes = [t.numel() * t.element_size() for t in tensors]
        total = sum(size for size in sizes if in_place or size <= SMALL)
        if total <= room:
            self.kept = total
            self.saved = [
                Kept(t, in_place or size <= SMALL) for t, size in zip(tensors, sizes, strict=True)
            ]
        return total

    def set_aside(self, room: float) -> int:
        """Reduce in copies: the tensors that were given keep the inputs, and the copies, which the
        script never gets to see, keep the result as long as the log does. Only for a caller that
        takes the result from the future (see `reductions`).

        Args, Returns: as `retain`.
        """
        given, options = self.args
        total: int = sum([t.numel() * t.element_size() for t in given])
        if total <= room:
            self.kept = total
            self.saved = [Kept(t, False) for t in given]
            self.args = [t.detach().clone() for t in given], options
            self.aside = True
        return total

    def is_root(self) -> bool:
        return bool(self.args[1].rootRank == self.group.rank())

    def keep_results(self) -> None:
        """On completion: remember the outputs, small ones by copy."""
        if KINDS[self.kind].same_everywhere:
            if self.aside:  # the script does not get to see them
                self.results = [Kept(t, False) for t in self.args[0]]
                return
            self.results = [
                Kept(t, t.numel() * t.element_size() <= SMALL) for t in self.outputs()
            ]

    def served(self) -> Tensors | None:
        """What the operation gave, for somebody who has not got it; None: gone."""
        if not self.done or self.results is None:
            return None
        contents = [kept.get() for kept in self.results]
        return None if any(c is None for c in contents) else contents  # type: ignore[return-value]

    def reissuable(self) -> bool:
        """Whether the inputs are still what they were when it was issued."""
        if self.saved is None:
            return not self.issued and not self.done  # still as the script gave them
        return all(kept.get() is not None for kept in self.saved)

    def again(self) -> tuple[Any, ...]:
        """Arguments to issue it once more.

        Not completed here: the script's own tensors, with the inputs as they were. Completed:
        copies, since the script has moved on; the result is dropped.

        Raises:
            LookupError: an input is gone.
        """
        if not self.reissuable():
            raise LookupError(f"the inputs of {self.describe()} are gone")
        saved = [kept.get() for kept in self.saved or ()]
        inputs = self.inputs() if saved else []
        self.issued = True
        if not self.done:
            with torch.no_grad():
                for tensor, content in zip(inputs, saved, strict=True):
                    if content is not tensor and content is not None:
                        tensor.detach().copy_(content)
            return self.args
        by = {id(t): torch.empty_like(t.detach()) for t in self.outputs()}
        for tensor, content in zip(inputs, saved, strict=True):
            if content is not None:
                by[id(tensor)] = content.detach().clone()
        args = tuple(substitute(arg, by) for arg in self.args)
        self.dropped = args
        return args

    def fill(self, contents: Tensors | None) -> None:
        """Complete it with what another rank sent; None: zeros."""
        with torch.no_grad():
            outputs = self.outputs()
            if contents is None:
                for tensor in outputs:
                    tensor.detach().zero_()
            else:
                for tensor, content in zip(outputs, contents, strict=True):
                    tensor.detach().copy_(content.reshape(tensor.shape))
        self.complete()

    def receive(self, contents: Tensors | None) -> None:
        """Complete it with what another rank sent, which is kept for a rank that is replaced later;
        None: it gives nothing."""
        self.fill(contents)
        if contents is not None:
            self.results = [Kept(tensor, copy=False) for tensor in contents]

    def stand_in(self) -> None:
        """Complete it with this rank's own input in every place (catch-up)."""
        inputs, outputs = self.inputs(), self.outputs()
        if inputs and KINDS[self.kind].inputs(self.args) is not KINDS[self.kind].outputs(self.args):
            with torch.no_grad():
                for i, tensor in enumerate(outputs):
                    _spread(tensor.detach(), inputs[i % len(inputs)].detach())
        self.complete()

    def complete(self) -> None:
        """Whoever finds it complete first; now and then two threads do at once."""
        self.done = True
        if self.future is not None and not self.future.done():
            try:
                self.future.set_result(self.outputs())
            except RuntimeError:
                if not self.future.done():
                    raise


def _spread(target: torch.Tensor, source: torch.Tensor) -> None:
    """Fill `target` with repetitions of `source`, whatever the sizes."""
    if target.numel() == 0 or source.numel() == 0:
        return
    flat = source.reshape(-1)
    times = -(-target.numel() // flat.numel())
    target.copy_(flat.repeat(times)[: target.numel()].reshape(target.shape))


class Creation:
    """The creation of a group, in its place among the operations."""

    __slots__ = ("group",)

    def __init__(self, group: FlashProcessGroup) -> None:
        self.group = group


Entry = Op | Creation
