"""Where a script holds something: paths like ``best['0.weight']`` from its variables."""

from __future__ import annotations

import types
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch

from flashrun.worker.replay.carried import _frames

DEEPEST = 6
MOST = 200_000  # things that are looked at
_SKIPPED = (
    types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type, str, bytes, int, float,
    bool, complex, type(None), range,
)  # fmt: skip


def _text(key: Any) -> str:
    return repr(key) if isinstance(key, (str, int)) else type(key).__name__


def _members(thing: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, dict):
        yield from ((f"{path}[{_text(key)}]", value) for key, value in list(thing.items()))
    elif isinstance(thing, (list, tuple, set, frozenset)):
        yield from ((f"{path}[{i}]", value) for i, value in enumerate(thing))
    elif isinstance(thing, types.CellType):
        yield path, thing.cell_contents
    else:
        own = getattr(thing, "__dict__", None)
        if isinstance(own, dict):
            yield from ((f"{path}.{key}", value) for key, value in list(own.items()))


def _is_entered(thing: Any) -> bool:
    """Whether what `thing` holds is the script's: a module's forward sets its own attributes."""
    return not (
        isinstance(thing, (*_SKIPPED, torch.Tensor, torch.nn.Module))
        or type(thing).__module__.startswith("flashrun.")
    )


def _roots(frame: FrameType) -> Iterator[tuple[str, Any]]:
    seen: set[int] = set()
    for one in _frames(frame):
        yield from one.f_locals.items()
        if id(one.f_globals) not in seen and one.f_globals is not one.f_locals:
            seen.add(id(one.f_globals))
            yield from one.f_globals.items()


def locate(frame: FrameType, wanted: set[int]) -> dict[int, str]:
    """Find tensors that containers or objects in reach of the script hold.

    Args:
        frame: where to start.
        wanted: the identities of tensors.

    Returns:
        Identity -> path, without those that only plain variables hold.
    """
    found: dict[int, str] = {}
    seen: set[int] = set()
    level = [
        (name, value)
        for name, value in _roots(frame)
        if _is_entered(value)
    ]
    for _ in range(DEEPEST):
        following = []
        for path, thing in level:
            if id(thing) in seen or len(seen) > MOST:
                continue
            seen.add(id(thing))
            for name, member in _members(thing, path):
                if isinstance(member, torch.Tensor):
                    if id(member) in wanted:
                        found.setdefault(id(member), name)
                elif _is_entered(member):
                    following.append((name, member))
        level = following
    return found
