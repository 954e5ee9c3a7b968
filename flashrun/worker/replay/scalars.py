"""One-element results of regions (losses): logged live, and given to what stands for them."""

from __future__ import annotations

import marshal
import struct
from typing import TYPE_CHECKING, Any

import torch

from flashrun.worker.replay import kinds
from flashrun.worker.replay.doors import fill_scalar

if TYPE_CHECKING:
    from flashrun.worker.replay.session import Session

_ORDINAL = struct.Struct("<Q")
_item = torch.Tensor.item  # taken before the door is installed
_FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def scalars(output: Any) -> list[torch.Tensor]:
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


def packed(ordinal: int, found: list[torch.Tensor]) -> bytes:
    """The values of `scalars` of a region, as they are logged."""
    return _ORDINAL.pack(ordinal) + marshal.dumps([_item(t.detach()) for t in found])


def unpacked(payload: bytes, ordinal: int) -> list[Any] | None:
    """The values; None: they are another region's."""
    if _ORDINAL.unpack_from(payload)[0] != ordinal:
        return None
    values: list[Any] = marshal.loads(payload[_ORDINAL.size :])
    return values


def log_scalars(session: Session, ordinal: int, output: Any) -> None:
    """Live: log those of what a region gave."""
    found = scalars(output)
    if found:
        session.append(kinds.OUT, 0, packed(ordinal, found))


def fill_scalars(session: Session, ordinal: int, output: Any) -> None:
    """In a replay: give them the values that the dead worker's had.

    Raises:
        Divergence: it had another number of them.
    """
    record = session.peek()
    if record is None or record.kind != kinds.OUT:
        return
    values = unpacked(record.payload, ordinal)
    if values is None:
        return
    session.take()
    mine = scalars(output)
    if len(values) != len(mine):
        raise session.diverged("a forward or step returned another number of scalars than before")
    for tensor, value in zip(mine, values, strict=True):
        fill_scalar(session, tensor, value)
