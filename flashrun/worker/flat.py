"""Tensors side by side in one piece of memory, with a description in front: one copy for all."""

from __future__ import annotations

import json
from typing import Any

import torch

from flashrun.worker.state import as_bytes

_ALIGNED = 16  # bytes


class Flat:
    """Room for the contents of some tensors.

    Attributes:
        content: description and contents, as bytes.
    """

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._kinds = _kinds(tensors)
        described: list[list[Any]] = []
        places, at = [], 0
        for name, tensor in tensors.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            described.append([name, dtype, list(tensor.shape), at])
            places.append(at)
            at += -(-tensor.numel() * tensor.element_size() // _ALIGNED) * _ALIGNED
        text = json.dumps(described).encode()
        text += b" " * (-(len(text) + 4) % _ALIGNED)
        start = len(text) + 4
        whole = torch.zeros(start + at, dtype=torch.uint8)
        self.content = as_bytes(whole)
        self.content[:start] = len(text).to_bytes(4, "little") + text
        self._views = [
            whole[start + place : start + place + tensor.numel() * tensor.element_size()]
            .view(tensor.dtype)
            .reshape(tensor.shape)
            for place, tensor in zip(places, tensors.values(), strict=True)
        ]

    def fits(self, tensors: dict[str, torch.Tensor]) -> bool:
        """Whether these are of the same names, shapes and types."""
        return self._kinds == _kinds(tensors)

    def fill(self, tensors: dict[str, torch.Tensor]) -> memoryview:
        """Take their contents; returns `content`."""
        if self._views:
            with torch.no_grad():
                torch._foreach_copy_(self._views, list(tensors.values()))
        return self.content


def _kinds(tensors: dict[str, torch.Tensor]) -> list[Any]:
    return [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]


def unpack(content: bytes) -> dict[str, torch.Tensor]:
    """The tensors that `Flat.content` held."""
    start = int.from_bytes(content[:4], "little") + 4
    found = {}
    for name, dtype_name, shape, at in json.loads(content[4:start]):
        dtype: torch.dtype = getattr(torch, dtype_name)
        size = torch.Size(shape).numel() * dtype.itemsize
        if size:
            part = bytearray(content[start + at : start + at + size])
            found[name] = torch.frombuffer(part, dtype=dtype).reshape(shape)
        else:
            found[name] = torch.empty(shape, dtype=dtype)
    return found
