"""Functional collectives for which C++ does not ask a Python process group.

torch 2.13 (csrc/distributed/c10d/PyProcessGroup.hpp) has no trampoline for ``all_gather_single``
and ``reduce_scatter_single``, so ``_c10d_functional``'s kernels for these (Functional.cpp, one for
all backends: CompositeExplicitAutograd) look for a C++ backend in our group and fail. Kernels for
CPU and CUDA stand before those; these do the same by the group's Python methods, which groups that
are not ours have as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d

_NAMESPACE = "_c10d_functional"
_KEYS = ("CPU", "CUDA")
_c10d: Any = distributed_c10d
_Library: Any = torch.library.Library
_kept: list[Any] = []  # a library that nobody holds takes its kernels out again


def _group(name: Any) -> Any:
    if isinstance(name, str):
        return _c10d._resolve_process_group(name)
    return c10d.ProcessGroup.unbox(name)


def _reduction(name: str) -> Any:
    found = getattr(c10d.ReduceOp, name.upper(), None)
    if found is None:
        raise ValueError(f"unrecognized reduce_op: {name}")
    return found


def _registered(output: torch.Tensor, work: Any) -> torch.Tensor:
    """``wait_tensor`` finds the work by its output, which keeps the Python half of it alive."""
    register: Any = c10d._register_work
    register(output, work)
    kept: Any = output
    kept._flashrun_work = work
    return output


def all_gather_into_tensor_out(
    input: torch.Tensor, group_size: int, group_name: Any, *, out: torch.Tensor
) -> torch.Tensor:
    return _registered(out, _group(group_name)._allgather_base(out, input.contiguous()))


def all_gather_into_tensor(input: torch.Tensor, group_size: int, group_name: Any) -> torch.Tensor:
    if input.dim() == 0:
        input = input.unsqueeze(0)
    out = input.new_empty((input.shape[0] * group_size, *input.shape[1:]))
    return all_gather_into_tensor_out(input, group_size, group_name, out=out)


def all_gather_into_tensor_coalesced(
    inputs: list[torch.Tensor], group_size: int, group_name: Any
) -> list[torch.Tensor]:
    return [all_gather_into_tensor(tensor, group_size, group_name) for tensor in inputs]


def reduce_scatter_tensor_out(
    input: torch.Tensor, reduce_op: str, group_size: int, group_name: Any, *, out: torch.Tensor
) -> torch.Tensor:
    options = c10d.ReduceScatterOptions()
    options.reduceOp = _reduction(reduce_op)
    group = _group(group_name)
    return _registered(out, group._reduce_scatter_base(out, input.contiguous(), options))


def reduce_scatter_tensor(
    input: torch.Tensor, reduce_op: str, group_size: int, group_name: Any
) -> torch.Tensor:
    if input.shape[0] % group_size:
        raise ValueError(
            f"reduce_scatter: the first dimension of {tuple(input.shape)} is not divisible by"
            f" {group_size} ranks"
        )
    out = input.new_empty((input.shape[0] // group_size, *input.shape[1:]))
    return reduce_scatter_tensor_out(input, reduce_op, group_size, group_name, out=out)


def reduce_scatter_tensor_coalesced(
    inputs: list[torch.Tensor], reduce_op: str, group_size: int, group_name: Any
) -> list[torch.Tensor]:
    return [reduce_scatter_tensor(tensor, reduce_op, group_size, group_name) for tensor in inputs]


def install() -> Callable[[], None]:
    """Register the kernels; returns what takes them out again."""
    library = _Library(_NAMESPACE, "IMPL")
    _kept.append(library)
    for kernel in (
        all_gather_into_tensor,
        all_gather_into_tensor_out,
        all_gather_into_tensor_coalesced,
        reduce_scatter_tensor,
        reduce_scatter_tensor_out,
        reduce_scatter_tensor_coalesced,
    ):
        for key in _KEYS:
            library.impl(kernel.__name__, kernel, key)

    def undo() -> None:
        _kept.remove(library)
        library._destroy()

    return undo
