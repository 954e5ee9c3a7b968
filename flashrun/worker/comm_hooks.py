"""DDP's communication hooks, and whether they keep something from step to step.

What such a hook keeps is each rank's own and changes inside of backward, which a replay skips: a
rank with one can't be replaced in place. PowerSGD's is known and carried (see `hook_state`).

Relied on in torch 2.13: ``DistributedDataParallel.register_comm_hook`` (nn/parallel/distributed.py:
2178) is the one way in; torch's built-in C++ hooks keep nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
import torch.distributed as dist

from flashrun.worker import hook_state

# Of torch's own mixed precision: refers to its module and streams only.
_STATELESS = ("torch.distributed.algorithms.ddp_comm_hooks.mixed_precision_hooks",)
REMEDY = "hooks without state (fp16_compress_hook, bf16_compress_hook) and PowerSGD are carried"


def what_is_kept(hook: Any, state: Any = None) -> str | None:
    """What `hook` may keep from step to step; None: nothing."""
    if getattr(hook, "__module__", "") in _STATELESS:
        return None
    if not (state is None or isinstance(state, (dist.ProcessGroup, type, FunctionType))):
        return type(state).__name__
    if isinstance(hook, functools.partial):
        for value in (*hook.args, *hook.keywords.values()):
            if (kept := what_is_kept(None, value)) is not None:
                return kept
        return what_is_kept(hook.func)
    if isinstance(hook, FunctionType):
        for cell in hook.__closure__ or ():
            inner = cell.cell_contents
            if isinstance(inner, (int, float, str, torch.dtype)):
                continue  # a number that is closed over can't change without `nonlocal`: below
            kept = what_is_kept(inner) if callable(inner) else what_is_kept(None, inner)
            if kept is not None:
                return kept
        if hook.__closure__ and _assigns(hook):
            return "variables that it changes"
        return None
    if hook is None or isinstance(hook, (BuiltinFunctionType, type)):
        return None
    return type(getattr(hook, "__self__", hook)).__name__


def _assigns(function: FunctionType) -> bool:
    """Whether it sets variables of the function around it."""
    import dis

    free = set(function.__code__.co_freevars)
    return any(
        i.opname == "STORE_DEREF" and i.argval in free for i in dis.get_instructions(function)
    )


def install(
    tell: Callable[[Mapping[str, Any]], None], carry: Callable[[object], None]
) -> Callable[[], None]:
    """Look at every hook that is registered; returns the undo.

    Args:
        tell: takes the event that this job can only be restarted.
        carry: takes a state that can be carried.
    """
    ddp: Any = torch.nn.parallel.DistributedDataParallel
    original = ddp.register_comm_hook

    @functools.wraps(original)
    def register_comm_hook(self: Any, state: object, hook: Callable[..., Any]) -> None:
        kept = what_is_kept(hook, state)
        if hook_state.can_be_carried(state) and what_is_kept(hook) is None:
            carry(state)
        elif kept is not None:
            name = getattr(hook, "__qualname__", type(hook).__name__)
            reason = (
                f"DDP's communication hook {name} keeps state ({kept}), which is each rank's own"
                " and not carried"
            )
            tell(
                {
                    "event": "recovery-class",
                    "class": "restart-only",
                    "reason": reason,
                    "remedy": REMEDY,
                }
            )
        original(self, state, hook)

    ddp.register_comm_hook = register_comm_hook

    def undo() -> None:
        ddp.register_comm_hook = original

    return undo
