"""Small tensors that the script carries from step to step.

A running loss kept as a tensor (``total += loss.detach()``) is made of values that a replay does
not compute. So at every boundary the log gets the content of the small CPU tensors in reach of the
script's frames: local and global variables, the attributes of ``self``, members of short lists
and dicts, the last members of long lists. The replay finds the same tensors in the same order and
fills them in.
"""

from __future__ import annotations

import inspect
import os
import sys
from contextlib import AbstractContextManager
from types import BuiltinFunctionType, FrameType, FunctionType, ModuleType
from typing import Any

import torch

from flashrun.worker.replay import memory

LARGEST = 16  # elements of a tensor that is carried
MEMBERS = 64  # of a list or dict that is looked through
LAST = 4  # members of a longer list
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_LIBRARY = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_MOST_KNOWN = 1 << 16  # a script that makes classes as it goes must not fill memory
_SNAPSHOTS = sys.version_info < (3, 13)
_OWN_REFERENCES = 3  # to the snapshot: the frame's, the variable's, the argument's
_CONTAINERS = frozenset({list, tuple, dict})
_SCALARS = frozenset({int, float, str, bool, type(None), bytes, complex})
# what most other variables are, and has no tensor in it that is looked for
_OTHERS = _SCALARS | {type, ModuleType, FunctionType, BuiltinFunctionType}


class _Scripts(dict[str, bool]):
    """Whether a file is the script's; each is looked at once."""

    def __missing__(self, filename: str) -> bool:
        known = self[filename] = not (
            filename.startswith((_OURS, _TORCH, "<"))
            or (filename.startswith(_LIBRARY) and "site-packages" not in filename)
        )
        return known


_scripts = _Scripts()


def is_script(filename: str) -> bool:
    return _scripts[filename]


def script_frame(above: int, most: int = 32) -> FrameType | None:
    """The innermost frame of the script, `above` frames up or further; None if it is far away."""
    frame: FrameType | None = sys._getframe(above + 1)
    for _ in range(most):
        if frame is None or is_script(frame.f_code.co_filename):
            return frame
        frame = frame.f_back
    return None


def _frames(frame: FrameType | None) -> list[FrameType]:
    """Those of the script, from the inside out."""
    found = []
    while frame is not None:
        if _scripts[frame.f_code.co_filename]:
            found.append(frame)
        frame = frame.f_back
    return found


def variables_of(frame: FrameType) -> dict[str, Any]:
    """What a frame of the script has.

    Before Python 3.13 a function's ``f_locals`` is a dict that the frame keeps. It must not keep
    the script's tensors alive, so it is emptied, unless the script has it too (``locals()``).
    """
    variables = frame.f_locals
    if not _SNAPSHOTS or not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return variables
    copied = dict(variables)
    if sys.getrefcount(variables) == _OWN_REFERENCES:
        variables.clear()
    return copied


def _is_tensor(kind: type) -> bool:
    """A plain tensor, or one that was made poison (`poison`, whose classes have that mark): it has
    to count, since in a later replay it is a tensor again."""
    return kind is torch.Tensor or (
        torch.Tensor in kind.__mro__
        and getattr(kind, "_flashrun_poisoned", False)
        and kind.__mro__[2] is torch.Tensor
    )


_NOTHING, _MEMBERS, _TENSOR = range(3)


class _Holds(dict[type, int]):
    """What a variable of a class may be: nothing to look for, a container, a tensor."""

    def __missing__(self, kind: type) -> int:
        if len(self) > _MOST_KNOWN:
            self.clear()
        if kind in _CONTAINERS:
            found = _MEMBERS
        else:
            found = _NOTHING if kind in _OTHERS or not _is_tensor(kind) else _TENSOR
        self[kind] = found
        return found


_holds = _Holds()


def _wanted(value: torch.Tensor) -> bool:
    return value.numel() <= LARGEST and value.is_cpu and value.layout is torch.strided


def _look(value: Any, kind: type, found: dict[int, torch.Tensor]) -> None:
    """Add the tensors that a list, tuple or dict holds."""
    members: Any
    if kind is dict:
        if len(value) > MEMBERS:
            return
        members = value.values()
    else:
        members = value if len(value) <= MEMBERS else value[-LAST:]
    for member in members:
        if _holds[type(member)] == _TENSOR and _wanted(member):
            found[id(member)] = member


def _tensors(frame: FrameType) -> list[torch.Tensor]:
    found: dict[int, torch.Tensor] = {}
    seen: set[int] = set()
    for one in _frames(frame):
        variables = variables_of(one)
        own = variables.get("self")
        _look_through(list(variables.values()), found)
        if own is not None and id(own) not in seen and not isinstance(own, torch.nn.Module):
            seen.add(id(own))
            _look_through(list(getattr(own, "__dict__", {}).values()), found)
    return list(found.values())


def _look_through(values: list[Any], found: dict[int, torch.Tensor]) -> None:
    """Add the tensors among variables, and those that they hold."""
    for value in values:
        kind = type(value)
        what = _holds[kind]
        if what == _MEMBERS:
            _look(value, kind, found)
        elif what == _TENSOR and _wanted(value):
            found[id(value)] = value


def collect(frame: FrameType) -> bytes:
    """The content of all carried tensors, for the log: their number, for each whether its content
    is known, and the contents."""
    tensors = _tensors(frame)
    known = [type(tensor) is torch.Tensor for tensor in tensors]
    parts = [
        memory.content(tensor) if real else bytes(memory.size(tensor))
        for tensor, real in zip(tensors, known, strict=True)
    ]
    return b"".join([len(tensors).to_bytes(4, "little"), bytes(known), *parts])


def restore(
    frame: FrameType, payload: bytes, quiet: AbstractContextManager[None]
) -> tuple[str | None, list[torch.Tensor]]:
    """Fill the carried tensors with logged content.

    Args:
        quiet: for work on tensors, where there is some.

    Returns:
        What does not fit, or None; and the tensors that have their content now.
    """
    tensors = _tensors(frame)
    count = int.from_bytes(payload[:4], "little")
    size = sum(map(memory.size, tensors))
    at = 4 + count
    if count != len(tensors) or size != len(payload) - at:
        return (
            f"the script holds {len(tensors)} small tensors ({size} bytes) at this boundary, the "
            f"log has {count} ({len(payload) - at} bytes)",
            [],
        )
    if (
        payload[4:at] == b"\1" * count
        and all(map(memory.lies_here, tensors))
        and payload[at:] == b"".join(map(memory.content, tensors))
    ):
        return None, tensors  # mostly so
    with quiet:
        return None, _fill(tensors, payload, at)


def _fill(tensors: list[torch.Tensor], payload: bytes, at: int) -> list[torch.Tensor]:
    """Fill `tensors` with what is in the log from `at` on; returns those whose content it has."""
    filled = []
    for tensor, known in zip(tensors, payload[4:at], strict=True):
        length = memory.size(tensor)
        if not known:  # to the dead worker neither: it stays what the replay makes of it
            at += length
            continue
        filled.append(tensor)
        if length:
            logged = payload[at : at + length]
            at += length
            if memory.content(tensor) != logged and not memory.fill(tensor, logged):
                fresh = torch.frombuffer(bytearray(logged), dtype=tensor.dtype)
                tensor.data.copy_(fresh.reshape(tensor.shape))
    return filled
