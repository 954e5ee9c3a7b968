"""Values that a replay does not compute, and everything made from them.

A catch-up skips forward, backward, step and fetch, and a collective gives it its own input. So some
tensors hold *unreal* values: parameters once a step was taken, outputs, gradients, batches that
were not fetched, results of collectives. `Unreal` is a dispatch mode that follows them: what an
operation makes of an unreal tensor is unreal, what is overwritten with real values is real again.
The mark is an attribute of the storage, so views share it, and it ends with the memory.

Unreal values must never become something that Python sees, or the script would decide by them. The
operations that let values out are tagged in torch (``data_dependent_output``,
``dynamic_output_shape``): on unreal tensors they are a `Divergence`, unless a door has the dead
worker's answer. What is still unreal when the replay ends is `poison`'s matter.

Not followed: memory written behind torch's back (ctypes, extensions that take pointers).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from threading import get_ident
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch._C import (  # what the functions of torch.utils._python_dispatch (2.13) call
    _get_dispatch_stack_at,
    _len_torch_dispatch_stack,
    _pop_torch_dispatch_stack,
    _push_on_torch_dispatch_stack,
)
from torch.utils._python_dispatch import TorchDispatchMode

from flashrun.worker.replay.carried import script_frame

if TYPE_CHECKING:
    from flashrun.worker.replay.session import Session

MARK = "_flashrun_unreal"
USED = "_flashrun_used"  # of a gradient: the optimizer that has stepped with it
_SHARED = "_flashrun_shared"
_OVERWRITES = frozenset(
    {
        "zero_", "fill_", "copy_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_",
        "log_normal_", "cauchy_", "geometric_",
    }
)  # fmt: skip
# Read values, and are not tagged so in torch 2.13.
_READS = frozenset(
    {
        "_pack_padded_sequence", "_pad_packed_sequence", "is_nonzero", "_to_sparse", "to_sparse",
        "coalesce", "_coalesce", "_to_sparse_csr", "to_sparse_csr",
    }
)  # fmt: skip
_READ_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class Mark:
    """Where unreal values came from."""

    __slots__ = ("_at", "_code", "boundary", "made_by")

    def __init__(self, made_by: str, boundary: int) -> None:
        self.made_by = made_by
        self.boundary = boundary
        frame = script_frame(2)
        # the line is looked up when it is wanted: there are some marks in each iteration
        self._code: CodeType | None = frame.f_code if frame is not None else None
        self._at = frame.f_lasti if frame is not None else 0

    def _line(self, code: CodeType) -> int | None:
        for start, end, line in code.co_lines():
            if start <= self._at < end:
                return line
        return None

    def __str__(self) -> str:
        code = self._code
        place = f" at {code.co_filename}:{self._line(code)}" if code else ""
        return f"{self.made_by}{place}, interval {self.boundary}"


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_NO_TENSORS = frozenset({int, float, bool, type(None)})


def storages(tensor: torch.Tensor) -> list[Any]:
    """The storages that hold a tensor's values; several for a wrapper or a sparse tensor."""
    if type(tensor) not in _PLAIN and hasattr(tensor, "__tensor_flatten__"):
        names = tensor.__tensor_flatten__()[0]
        return [s for name in names for s in storages(getattr(tensor, name))]
    if tensor.layout is torch.strided:
        try:
            return [tensor.untyped_storage()]
        except (NotImplementedError, RuntimeError):  # has no memory (a fake tensor)
            return []
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices().untyped_storage(), tensor._values().untyped_storage()]
    return [tensor.values().untyped_storage()]


def mark_of(tensor: torch.Tensor) -> Mark | None:
    """The mark of a tensor whose values are unreal, None if they are real."""
    if type(tensor) in _PLAIN:
        try:
            found: Mark | None = tensor.untyped_storage().__dict__.get(MARK)
            return found
        except (NotImplementedError, RuntimeError):
            pass
    for storage in storages(tensor):
        if MARK in storage.__dict__:
            return storage.__dict__[MARK]  # type: ignore[no-any-return]
    return None


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor has its memory for itself."""
    return (
        tensor.layout is torch.strided
        and tensor.numel() * tensor.element_size() >= tensor.untyped_storage().nbytes()
    )


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among the arguments or results of an operation."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


class _Facts:
    """What matters of an operation."""

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.name = name = schema.name.partition("::")[2]
        self.reads = name in _READS or any(tag in func.tags for tag in _READ_TAGS)
        self.by_index = name == "index"  # dynamic only by a mask
        self.fresh = name.endswith("_like") or name.startswith("new_")  # takes no values
        self.overwrites = name in _OVERWRITES
        self.each = name in ("_foreach_zero_", "_foreach_copy_")
        self.written: list[int] = []  # positions of arguments that it changes
        self.written_names: list[str] = []
        self.outs: list[str] = []  # that it only writes
        for i, argument in enumerate(schema.arguments):
            if argument.is_out:
                self.outs.append(argument.name)
            elif argument.alias_info is not None and argument.alias_info.is_write:
                self.written.append(i)
                self.written_names.append(argument.name)
        # makes new values of old ones, and that is all
        self.plain = not (self.reads or self.fresh or self.written or self.outs)


class Unreal(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows unreal values on the main thread. See the module."""

    def __init__(self, session: Session) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._session = session
        self._facts: dict[Any, _Facts] = {}
        self._in_place = False  # on the stack of modes, or taken off it for a while
        self._away = False
        self.loading = False  # what is loaded from a file has been written by this replay
        self.cleared = 0  # how often values became real again

    # --- on and off

    def _start(self) -> None:
        """Begin with the first unreal value: what the script does before is not slowed down."""
        if not self._in_place:
            self._in_place = True
            self._below()

    def _below(self) -> None:
        """Onto the stack, below the script's own modes: they leave in their own order."""
        above = []
        while _len_torch_dispatch_stack():
            above.append(_pop_torch_dispatch_stack(None))
        for mode in (self, *reversed(above)):
            _push_on_torch_dispatch_stack(mode)

    def suspend(self) -> bool:
        """Take the mode off for the replay's own work; True if it is to be put back."""
        if (
            self._in_place
            and not self._away
            and (height := _len_torch_dispatch_stack())
            and _get_dispatch_stack_at(height - 1) is self
        ):
            _pop_torch_dispatch_stack(None)
            self._away = True
            return True
        return False

    def resume(self) -> None:
        _push_on_torch_dispatch_stack(self)
        self._away = False

    @property
    def started(self) -> bool:
        """Whether there has been an unreal value."""
        return self._in_place

    @property
    def away(self) -> bool:
        return self._away

    def end(self) -> None:
        """The replay is over: follow nothing any more."""
        if self._in_place and not self._away:
            above = []
            while (mode := _pop_torch_dispatch_stack(None)) is not self:
                above.append(mode)
            for mode in reversed(above):
                _push_on_torch_dispatch_stack(mode)
        self._in_place = False

    # --- marks

    def mark(self, tensor: torch.Tensor, made_by: str, mark: Mark | None = None) -> None:
        """The values of `tensor` are unreal from now on.

        Raises:
            Divergence: an array of numpy shares them.
        """
        for storage in storages(tensor):
            own = storage.__dict__
            if MARK in own and mark is None:
                continue
            mark = mark or Mark(made_by, self._session.boundary)
            shared = own.get(_SHARED)
            if shared is not None and shared() is not None:
                raise self._session.diverged(
                    "a numpy array shares memory with a tensor that gets values which the replay "
                    f"does not compute ({mark})"
                )
            own[MARK] = mark
            self._start()

    def mark_all(self, tensors: Iterable[torch.Tensor], made_by: str) -> None:
        for tensor in tensors:
            self.mark(tensor, made_by)

    def mark_anew(self, tensor: torch.Tensor, made_by: str) -> None:
        """The same for memory that may have been used for another unreal value before."""
        self.mark(tensor, made_by, Mark(made_by, self._session.boundary))

    def clear(self, tensor: torch.Tensor) -> None:
        """`tensor` has got real values; if that is all of its memory, it is real."""
        for storage in storages(tensor):
            own = storage.__dict__
            if MARK in own and tensor.numel() * tensor.element_size() >= storage.nbytes():
                del own[MARK]
                own.pop(USED, None)  # a gradient, zeroed
                self.cleared += 1

    def share(self, tensor: torch.Tensor, array: Any) -> None:
        """`array` shows what `tensor` holds, now and later."""
        for storage in storages(tensor):
            storage.__dict__[_SHARED] = weakref.ref(array)

    # --- operations

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if _dynamo_callback() is not None:
            return _guarded(self, func, types, args, kwargs)
        kwargs = kwargs or {}
        facts = self._facts.get(func)
        if facts is None:
            facts = self._facts[func] = _Facts(func)
        source = None if facts.fresh else self._source(facts, args, kwargs)
        if source is None:
            result = func(*args, **kwargs)
            if facts.plain:
                return result
            if self.loading and facts.name == "set_":
                self.mark(args[0], "torch.load of a file that the replay itself wrote")
                return result
            if facts.outs:
                for name in facts.outs:
                    for tensor in tensors_in((kwargs.get(name),)):
                        self.clear(tensor)
            elif facts.overwrites:
                self.clear(args[0])
            return result
        if facts.each:
            return self._each(facts, func, args, kwargs)
        session = self._session
        if (
            facts.reads
            and (not session.depth or get_ident() != session.main)
            and not (facts.by_index and not _unreal_mask(args))
        ):
            raise session.diverged(
                f"'{facts.name}' reads values that the replay does not compute ({source}) and that "
                "the log does not hold",
                script_frame(1),
            )
        try:
            result = func(*args, **kwargs)
        except RuntimeError as error:
            if session.depth:
                raise
            raise session.diverged(
                f"'{facts.name}' raised {error!r} on values that the replay does not compute",
                script_frame(1),
            ) from error
        if type(result) is torch.Tensor:
            if mark_of(result) is None:  # else a view of what is marked
                self.mark(result, facts.name, Mark(facts.name, session.boundary))
            if facts.plain:
                return result
        mark = None
        for tensor in tensors_in((result,)):
            if mark_of(tensor) is None:  # else a view of what is marked
                mark = mark or Mark(facts.name, session.boundary)
                self.mark(tensor, facts.name, mark)
        for i, name in zip(facts.written, facts.written_names, strict=True):
            value = args[i] if i < len(args) else kwargs.get(name)
            self.mark_all(tensors_in((value,)), facts.name)
        return result

    def _source(self, facts: _Facts, args: tuple[Any, ...], kwargs: Any) -> Mark | None:
        """The mark of an unreal value that an operation takes in."""
        first = 1 if facts.overwrites else 0
        for i in range(first, len(args)):
            value = args[i]
            if type(value) in _NO_TENSORS:
                continue
            if isinstance(value, torch.Tensor):
                found = mark_of(value)
                if found is not None:
                    return found
            elif isinstance(value, (list, tuple)):
                for tensor in tensors_in(value):
                    found = mark_of(tensor)
                    if found is not None:
                        return found
        if kwargs:
            for name, value in kwargs.items():
                if name not in facts.outs:
                    for tensor in tensors_in((value,)):
                        found = mark_of(tensor)
                        if found is not None:
                            return found
        return None

    def _each(self, facts: _Facts, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """An overwriting operation on lists: each member by itself."""
        sources = [None] * len(args[0]) if len(args) < 2 else [mark_of(t) for t in args[1]]
        result = func(*args, **kwargs)
        for tensor, source in zip(args[0], sources, strict=True):
            if source is None:
                self.clear(tensor)
            else:
                self.mark(tensor, facts.name)
        return result


# torch keeps Dynamo out of every mode at 3 µs per operation (2.13, utils/_python_dispatch.py:115),
# which is needed only where it looks on.
_guarded: Any = Unreal.__torch_dispatch__
Unreal.__torch_dispatch__ = _guarded.__wrapped__  # type: ignore[method-assign]
_dynamo_callback: Callable[[], Any] = torch._C._dynamo.eval_frame.get_eval_frame_callback


def _unreal_mask(args: tuple[Any, ...]) -> bool:
    """Whether the shape of an indexing depends on an unreal value."""
    return any(
        index.dtype in (torch.bool, torch.uint8) and mark_of(index) is not None
        for index in args[1]
        if isinstance(index, torch.Tensor)
    )


class Quiet:
    """The replay's own work on tensors: nothing is followed.

    Args:
        unreal: None outside of a catch-up.
    """

    __slots__ = ("_back", "_unreal")

    def __init__(self, unreal: Unreal | None) -> None:
        self._unreal = unreal
        self._back = False

    def __enter__(self) -> None:
        self._back = self._unreal is not None and self._unreal.suspend()

    def __exit__(self, *exception: object) -> None:
        if self._back and self._unreal is not None:
            self._unreal.resume()


class Loud(Quiet):
    """The script's own work within the replay's: followed as elsewhere."""

    __slots__ = ()

    def __enter__(self) -> None:
        self._back = self._unreal is not None and self._unreal.away
        if self._back and self._unreal is not None:
            self._unreal.resume()

    def __exit__(self, *exception: object) -> None:
        if self._back and self._unreal is not None:
            self._unreal.suspend()
