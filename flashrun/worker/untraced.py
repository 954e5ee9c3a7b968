"""Dynamo leaves our frames alone.

What the script compiles calls into flashrun where the graph breaks, with Dynamo's frame evaluation
still on: it would try to compile our methods, and a process group is an object that it may not look
into (an error, not a break). The C half of Dynamo is asked to skip a code object and all that it
calls (2.13: csrc/dynamo/extra_state.h, ``FrameExecStrategy``); the attributes are those of
``torch.compiler.disable`` (_dynamo/decorators.py:139), read where Dynamo would inline a call.
Neither imports ``torch._dynamo``, which takes longer than the rest of torch. The replay's wrappers
of torch's functions are skipped alone, not what they call: that is the script's own, which Dynamo
may compile; where it would inline one it takes the original (``_torchdynamo_inline``,
replay/patching.py). Otherwise a model under DDP would be compiled from another frame than by torch
alone, and draw other random numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

import torch


def leave_alone(owner: type) -> None:
    """Mark all functions of a class."""
    c: Any = torch._C
    dynamo = c._dynamo.eval_frame
    skip = dynamo._FrameAction.SKIP
    for value in vars(owner).values():
        code = getattr(value, "__code__", None)
        if code is not None:
            dynamo.set_code_exec_strategy(code, dynamo._FrameExecStrategy(skip, skip))
            value._torchdynamo_disable = True
            value._torchdynamo_disable_msg = "a collective under flashrun"


def leave_all_alone() -> None:
    """Mark the code of all modules of flashrun that are loaded now."""
    c: Any = torch._C
    dynamo = c._dynamo.eval_frame
    skip, default = dynamo._FrameAction.SKIP, dynamo._FrameAction.DEFAULT
    for name, module in list(sys.modules.items()):
        if name.startswith("flashrun."):
            called = default if name.startswith("flashrun.worker.replay.") else skip
            strategy = dynamo._FrameExecStrategy(skip, called)
            for code in _codes(vars(module), name):
                dynamo.set_code_exec_strategy(code, strategy)


def _codes(names: Mapping[str, Any], module: str) -> Iterator[CodeType]:
    """The code of the functions and methods that were defined in ``module``."""
    for value in list(names.values()):
        if isinstance(value, type):
            if value.__module__ == module:
                yield from _codes(vars(value), module)
            continue
        function = getattr(value, "__func__", getattr(value, "fget", value))
        if isinstance(function, FunctionType) and function.__module__ == module:
            yield from _nested(function.__code__)


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)
