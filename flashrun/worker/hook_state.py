"""What DDP's PowerSGD hook keeps from step to step: its memory of errors, its factors, counters.

It is each rank's own and changes inside of backward, which a replay skips, so no peer has it and no
replay gives it. Each rank writes it to a file of the run folder (shared memory) at every boundary,
and a replacement reads what the dead worker had there.

Relied on in torch 2.13: the slots of ``PowerSGDState``
(distributed/algorithms/ddp_comm_hooks/powerSGD_hook.py:204).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flashrun.worker.flat import Flat, unpack
from flashrun.worker.private import LARGEST, Private
from flashrun.worker.state import as_bytes

_KEPT = ("error_dict", "p_memory_dict", "q_memory_dict")
_NUMBERS = (
    "iter", "total_numel_before_compression", "total_numel_after_compression", "next_stats_report",
)  # fmt: skip


def can_be_carried(state: object) -> bool:
    """Whether this is the state of PowerSGD."""
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

    return type(state) is PowerSGDState


def _tensors_of(state: Any) -> dict[str, torch.Tensor]:
    found = {
        f"{name}/{index}": tensor.detach()
        for name in _KEPT
        for index, tensor in getattr(state, name).items()
    }
    numbers: dict[str, Any] = {name: getattr(state, name) for name in _NUMBERS}
    kind, keys, *rest = state.rng.get_state()
    numbers["rng"] = [kind, *rest]
    text = torch.frombuffer(bytearray(json.dumps(numbers).encode()), dtype=torch.uint8)
    found["rng"] = torch.from_numpy(keys.astype(np.int64))
    padded = torch.full((512,), 32, dtype=torch.uint8)  # a length that stays the same
    padded[: len(text)] = text
    found["numbers"] = padded
    return found


def _put(state: Any, tensors: dict[str, torch.Tensor]) -> None:
    for name in _KEPT:
        kept = getattr(state, name)
        kept.clear()
        for key, tensor in tensors.items():
            if key.startswith(f"{name}/"):
                kept[int(key.partition("/")[2])] = tensor.clone()
    numbers = json.loads(bytes(as_bytes(tensors["numbers"])))
    kind, *rest = numbers.pop("rng")
    for name, value in numbers.items():
        setattr(state, name, value)
    keys = np.frombuffer(as_bytes(tensors["rng"]), dtype=np.int64).astype(np.uint32)
    state.rng.set_state((kind, keys, *rest))


class HookStates:
    """Those of one rank.

    Args:
        run_dir: the job's folder on this node.
        fresh: this is the first incarnation.
    """

    def __init__(self, run_dir: Path, rank: int, fresh: bool) -> None:
        self._file = Private(run_dir, rank, fresh, "hooks")
        self._states: list[Any] = []
        self._flat: Flat | None = None

    def add(self, state: object) -> None:
        self._states.append(state)

    def at_boundary(self, b: int) -> str | None:
        """Write what they hold; returns, once, why that can't be done."""
        if not self._states:
            return None
        tensors = {
            f"{i}:{name}": tensor
            for i, state in enumerate(self._states)
            for name, tensor in _tensors_of(state).items()
        }
        if self._flat is None or not self._flat.fits(tensors):
            self._flat = Flat(tensors)
        content = self._flat.fill(tensors)
        if len(content) > LARGEST:
            self._states.clear()
            return f"DDP's PowerSGD hook keeps {len(content) / 1e6:.3g} MB (at most 4 are carried)"
        self._file.write(b, content)
        return None

    def written(self, b: int) -> bool:
        """Whether the dead worker has written all that there was at boundary `b`."""
        return not self._states or self._file.read(b) is not None

    def restore(self, b: int) -> bool:
        """Give them what the dead worker had at boundary `b`; False: it was not written."""
        if not self._states:
            return True
        content = self._file.read(b)
        if content is None:
            return False
        tensors = unpack(content)
        for i, state in enumerate(self._states):
            start = f"{i}:"
            mine = {k.removeprefix(start): t for k, t in tensors.items() if k.startswith(start)}
            if "numbers" not in mine:
                return False
            _put(state, mine)
        return True
