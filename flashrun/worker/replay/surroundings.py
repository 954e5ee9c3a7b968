"""What a skipped region of the script may change besides tensors: variables and closures.

A forward, a fetch or a step is skipped because nothing of it is missed afterwards. That is not so
where it counts in a global variable, draws from a generator of the script's own, or fills a list in
a hook. So the values in reach of the script (`look`) are compared around the first runs of each
region in a replay, which are real; what changes them is never skipped. Live there is nothing here.
"""

from __future__ import annotations

import functools
import itertools
import random
import sys
import types
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

import numpy as np
import torch

from flashrun.worker.replay import memory
from flashrun.worker.replay.carried import is_script, variables_of

DEEPEST = 5
MOST = 4000  # things that are looked at
MEMBERS = 64  # of a container that is looked through
LAST = 4  # members of a longer one
LARGEST = 1 << 20  # bytes of an array whose content counts
PLAIN = (int, float, str, bool, bytes, complex, type(None))
MODULE_KEYS = frozenset(vars(torch.nn.Module()))  # that every module has
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Their values change by themselves, or are nobody's business here.
_FOREIGN = (
    "torch", "flashrun", "threading", "_thread", "queue", "_queue", "multiprocessing", "asyncio",
    "concurrent", "logging", "weakref", "_weakref", "io", "_io", "socket", "selectors", "pyarrow",
)  # fmt: skip
# (``random`` and ``numpy.random`` have theirs in a name of their own.)
_GLOBAL = (torch.default_generator, random._inst, np.random.mtrand._rand)


def _is_foreign(kind: type) -> bool:
    # (Modules of the script are looked at by themselves, see `_variables`.)
    return kind is types.ModuleType or str(kind.__module__).partition(".")[0] in _FOREIGN


def state_of(value: Any) -> Any:
    """What a generator (or counter) would give next, in a form that can be compared; None for what
    is none, and for those of the process: a replay follows them wherever they are drawn from."""
    if any(value is one for one in _GLOBAL):
        return None
    if isinstance(value, torch.Generator):
        return memory.content(value.get_state())
    if isinstance(value, random.Random):
        return None if isinstance(value, random.SystemRandom) else value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state(legacy=False))
    if isinstance(value, itertools.count):
        return repr(value)
    return None


def _members(thing: Any) -> Iterator[Any]:
    """What is looked at next."""
    kind = type(thing)
    if issubclass(kind, dict):
        pairs = list(dict.items(thing))
        yield from (v for _, v in (pairs if len(pairs) <= MEMBERS else pairs[-LAST:]))
    elif issubclass(kind, (list, tuple)):
        yield from thing if len(thing) <= MEMBERS else thing[-LAST:]
    elif issubclass(kind, deque):
        yield from list(thing) if len(thing) <= MEMBERS else ()
    elif issubclass(kind, types.FunctionType):
        if is_script(thing.__code__.co_filename):
            yield from (cell.cell_contents for cell in thing.__closure__ or () if _is_full(cell))
            yield from thing.__defaults__ or ()
            yield from (thing.__kwdefaults__ or {}).values()
            yield from vars(thing).values()
    elif issubclass(kind, types.MethodType):
        yield from (thing.__self__, thing.__func__)
    elif issubclass(kind, functools.partial):
        yield from (thing.func, thing.args, thing.keywords)
    elif isinstance(thing, type):
        if _is_of_script(thing):
            yield from (v for name, v in list(vars(thing).items()) if not name.startswith("__"))
    elif issubclass(kind, torch.nn.Module):
        for module in thing.modules():
            for name in _HOOKS:
                yield from list(vars(module).get(name, {}).values())
            if not type(module).__module__.startswith("torch."):
                own = list(vars(module).items())
                yield from (v for name, v in own if name not in MODULE_KEYS)
    elif not _is_foreign(kind):
        yield from _attributes(thing)


def _attributes(thing: Any) -> list[Any]:
    """Without running any code of the script (properties, proxies)."""
    try:
        own = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return []
    return list(own.values()) if isinstance(own, dict) else []


def _is_full(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _is_of_script(kind: type) -> bool:
    module = sys.modules.get(str(kind.__module__))
    return module is not None and _is_own(module)


def _is_own(module: types.ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and is_script(file) and "site-packages" not in file


@functools.lru_cache(maxsize=1)
def _own_modules(number: int) -> list[types.ModuleType]:
    """Of the script; looked for anew when there are others."""
    modules = [m for m in list(sys.modules.values()) if isinstance(m, types.ModuleType)]
    main = sys.modules.get("__main__")
    return [m for m in modules if m is main or _is_own(m)]


def _variables() -> Iterator[Any]:
    """Those of the script's functions on the stack, and of its modules."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_script(frame.f_code.co_filename) and frame.f_locals is not frame.f_globals:
            yield from variables_of(frame).values()
        frame = frame.f_back
    for module in _own_modules(len(sys.modules)):
        names = list(vars(module).items())
        yield from (value for name, value in names if not name.startswith("__"))


def look(things: Iterable[Any]) -> list[Any]:
    """The plain values, sizes of containers and states of generators in reach of the script's
    variables and of `things`, in an order that is the same as long as nothing changes."""
    wanted = list(things)
    inner = {id(thing) for thing in wanted}  # modules and optimizers only where they are asked for
    found: list[Any] = []
    seen: set[int] = set()
    level = [*wanted, *_variables()]
    for _ in range(DEEPEST):
        following: list[Any] = []
        for thing in level:
            if isinstance(thing, PLAIN):
                found.append(thing)
                continue
            if id(thing) in seen:
                continue
            seen.add(id(thing))
            if len(seen) > MOST:
                return found
            state = state_of(thing)
            if state is not None:
                found.append(state)
            elif isinstance(thing, np.ndarray):
                if thing.nbytes <= LARGEST and not thing.dtype.hasobject:
                    found.append(zlib.crc32(thing.tobytes()))
            elif isinstance(thing, torch.Tensor) or (
                isinstance(thing, (torch.nn.Module, torch.optim.Optimizer))
                and id(thing) not in inner
            ):
                continue
            else:
                if isinstance(thing, (dict, list, set, deque)):
                    found.append(len(thing))
                if isinstance(thing, torch.optim.Optimizer):
                    following.extend(_own_of(thing))
                else:
                    following.extend(_members(thing))
        level = following
    return found


def _own_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """What an optimizer of the script's keeps besides what its ``state_dict`` has."""
    if type(optimizer).__module__.startswith("torch."):
        return []
    names = list(vars(optimizer).items())
    return [v for name, v in names if name not in ("state", "param_groups", "defaults")]
