"""The doors through which values of tensors enter Python (torch 2.13, ``torch/_tensor.py`` and
``torch/_C/__init__.pyi`` ``TensorBase``). What a door gave is logged, or comes from the log.

In catch-up a scalar that was read also takes the logged value itself, so that what the script goes
on computing from it is right too.
"""

from __future__ import annotations

import marshal
import sys
import zlib
from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch

from flashrun.worker.replay import kinds, memory, threads

if TYPE_CHECKING:
    from types import FrameType

    from flashrun.worker.replay.session import Session

LARGEST = 1 << 20  # bytes of one read that are logged; larger ones must be reproducible
_SAMPLERS = ("torch/utils/data/sampler.py", "torch/utils/data/distributed.py")


def fill_scalar(session: Session, tensor: torch.Tensor, value: Any) -> None:
    """Give a one-element tensor the value that was read from it: it is real then."""
    if (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.numel() == 1
        and isinstance(value, (int, float, bool))
    ):
        if not memory.fill_one(tensor, value):
            with session.quiet():
                tensor.data.fill_(value)  # unseen by its graph, which may have kept it
        if session.unreal is not None:
            session.unreal.clear(tensor)


def _scalar_door(session: Session, kind: int, fill: bool, original: Callable[..., Any]) -> Any:
    def door(self: torch.Tensor) -> Any:
        if session.depth or not session.on or get_ident() != session.main:
            return original(self)
        frame = sys._getframe(1)
        if session.replaying:
            if _is_refused(self, kind):
                return original(self)
            value = session.read(kind, frame, lambda: original(self), (self,))
            if fill:
                fill_scalar(session, self, value)
            return value
        value = original(self)
        session.append(kind, session.site(frame), marshal.dumps(value))
        return value

    return door


def _is_refused(tensor: torch.Tensor, kind: int) -> bool:
    """Whether torch refuses such a read, so that nothing was logged: numpy and others try an index
    before they take a tensor as an array (``array[tensor]``)."""
    if tensor.numel() != 1:
        return True
    return kind == kinds.INDEX and (tensor.is_floating_point() or tensor.is_complex())


def _predicate_door(session: Session, kind: int, original: Callable[..., Any]) -> Any:
    """A function of tensors that gives a Python bool."""

    def door(*args: Any, **kwargs: Any) -> Any:
        if session.depth or not session.on or get_ident() != session.main:
            return original(*args, **kwargs)
        frame = sys._getframe(1)
        if session.replaying:
            return session.read(
                kind, frame, lambda: original(*args, **kwargs), (*args, *kwargs.values())
            )
        value = original(*args, **kwargs)
        session.append(kind, session.site(frame), marshal.dumps(value))
        return value

    return door


def _bulk_door(
    session: Session,
    kind: int,
    original: Callable[..., Any],
    pack: Callable[[Any], bytes | memoryview | None],
    unpack: Callable[[Session, torch.Tensor, Any, bytes], Any],
) -> Any:
    """A read of many values: logged in full up to `LARGEST` bytes, above that by its checksum,
    which a replay must reproduce."""

    def door(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if session.depth or not session.on or get_ident() != session.main:
            if session.replaying and get_ident() != session.main:
                threads.check(session, self)
            return original(self, *args, **kwargs)
        frame = sys._getframe(1)
        if frame.f_code.co_filename.endswith(_SAMPLERS):
            return original(self, *args, **kwargs)  # drawn from a generator that is right
        small = self.numel() * self.element_size() <= LARGEST
        if session.replaying:
            return replayed(session, self, frame, small, args, kwargs)
        value = original(self, *args, **kwargs)
        content = pack(value)
        if content is not None:
            session.append(kind, session.site(frame), payload(content, small))
        return value

    def payload(content: bytes | memoryview, small: bool) -> bytes:
        return b"f" + bytes(content) if small else b"c" + zlib.crc32(content).to_bytes(4, "little")

    def replayed(
        session: Session,
        tensor: torch.Tensor,
        frame: FrameType,
        small: bool,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        value = original(tensor, *args, **kwargs)
        content = pack(value)
        if content is None:
            return value
        record = session.expect(kind, frame)
        if record is None:
            session.past_the_end(kind, frame, (tensor,))
            session.append(kind, session.site(frame), payload(content, small))
            return value
        if record.payload[:1] == b"f":
            with session.quiet():
                return unpack(session, tensor, value, record.payload[1:])
        if record.payload[1:] != zlib.crc32(content).to_bytes(4, "little"):
            raise session.diverged(
                f"a read of {tensor.numel()} values is not logged in full (over {LARGEST} bytes) "
                "and has other values in the replay",
                frame,
            )
        return value

    return door


def _unpack_array(session: Session, tensor: torch.Tensor, array: Any, content: bytes) -> Any:
    import numpy as np

    logged = np.frombuffer(content, dtype=array.dtype)
    if logged.size != array.size:
        raise ValueError("logged array of another size")
    if array.tobytes() != content:
        if not array.flags.writeable:
            return logged.reshape(array.shape).copy()
        array[...] = logged.reshape(array.shape)  # shares memory: the tensor is right as well
    if session.unreal is not None:
        session.unreal.clear(tensor)
        session.unreal.share(tensor, array)
    return array


def _unpack_list(session: Session, tensor: torch.Tensor, value: Any, content: bytes) -> Any:
    logged = marshal.loads(content)
    if type(tensor) is torch.Tensor and logged != value:
        tensor.detach().copy_(torch.tensor(logged, dtype=tensor.dtype).reshape(tensor.shape))
    if session.unreal is not None:
        session.unreal.clear(tensor)
    return logged


def _pack_array(array: Any) -> bytes | memoryview | None:
    """The content of an array, not copied where that can be had."""
    if not hasattr(array, "tobytes") or array.dtype.hasobject:
        return None
    if array.size and array.flags.c_contiguous:
        return memoryview(array.view("u1") if array.ndim else array.reshape(1).view("u1")).cast("B")
    content: bytes = array.tobytes()
    return content


def install(session: Session) -> None:
    """Put the doors in place."""
    tensor = torch.Tensor
    wrap = session.patches.wrap
    for name, kind, fill in (
        ("item", kinds.ITEM, True),
        ("__float__", kinds.FLOAT, True),
        ("__int__", kinds.INT, False),
        ("__bool__", kinds.BOOL, False),
        ("__index__", kinds.INDEX, True),
        ("__complex__", kinds.COMPLEX, False),
    ):
        wrap(tensor, name, partial(_scalar_door, session, kind, fill))
    wrap(tensor, "__repr__", partial(_repr_door, session))
    wrap(
        tensor,
        "tolist",
        lambda original: _bulk_door(
            session, kinds.TOLIST, original, lambda value: marshal.dumps(value), _unpack_list
        ),
    )
    wrap(
        tensor,
        "numpy",
        lambda original: _bulk_door(session, kinds.NUMPY, original, _pack_array, _unpack_array),
    )
    for owner in (torch, tensor):
        for name, kind in (
            ("equal", kinds.EQUAL),
            ("allclose", kinds.ALLCLOSE),
            ("is_nonzero", kinds.NONZERO),
        ):
            wrap(owner, name, partial(_predicate_door, session, kind))


def _repr_door(session: Session, original: Callable[..., Any]) -> Any:
    """A tensor's text: its own reads are inside of the door."""

    def text(self: torch.Tensor, args: Any, kwargs: Any) -> Any:
        depth, session.depth = session.depth, 1
        try:
            return original(self, *args, **kwargs)
        finally:
            session.depth = depth

    def door(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if session.depth or not session.on or get_ident() != session.main:
            return original(self, *args, **kwargs)
        frame = sys._getframe(1)
        if session.replaying:
            return session.read(kinds.REPR, frame, lambda: text(self, args, kwargs), (self,))
        value = text(self, args, kwargs)
        session.append(kinds.REPR, session.site(frame), marshal.dumps(value))
        return value

    return door
