"""The state of a ``GradScaler`` (torch 2.13, ``torch/amp/grad_scaler.py``): its scale, how long it
has not been changed, and what was found in the gradients of each optimizer since its last
``update`` (which comes after the step, so it is there at a boundary)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

PREFIX = "scaler "  # of the names of scalers


def tensors_of(
    head: str, scaler: Any, optimizers: list[tuple[str, torch.optim.Optimizer]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors.

    Args:
        head: the scaler's own name.
        optimizers: all, with their names.
    """
    for name in ("_scale", "_growth_tracker"):
        tensor = getattr(scaler, name, None)
        if tensor is not None:
            yield f"{PREFIX}{head}/{name}", tensor
    states = scaler._per_optimizer_states
    for name, optimizer in optimizers:
        if id(optimizer) in states:
            for device, found in states[id(optimizer)]["found_inf_per_device"].items():
                yield f"{PREFIX}{head}/found/{name}/{device}", found


def put(
    head: str,
    scaler: Any,
    optimizers: list[tuple[str, torch.optim.Optimizer]],
    tensors: dict[str, torch.Tensor],
) -> None:
    """Set what this rank's scaler has not got yet; what it has was filled in place."""
    for name in ("_scale", "_growth_tracker"):
        found = tensors.get(f"{PREFIX}{head}/{name}")
        if found is not None and getattr(scaler, name, None) is None:
            setattr(scaler, name, found.to(scaler._device))
    for name, optimizer in optimizers:
        start = f"{PREFIX}{head}/found/{name}/"
        for key, tensor in tensors.items():
            if key.startswith(start):
                device = torch.device(key.removeprefix(start))
                state = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
                state.setdefault(device, tensor.to(device))
