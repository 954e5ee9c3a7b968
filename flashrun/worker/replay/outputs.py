"""Outputs of modules near the target, which may be used after the join."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from flashrun.worker.replay import standins

if TYPE_CHECKING:
    from flashrun.worker.replay.session import Session

Optimizer = torch.optim.Optimizer


@dataclass
class Output:
    """An output near the target: if it lives at the join, it may be used after it."""

    module: torch.nn.Module
    call: Callable[[], Any]
    inputs: list[torch.Tensor]
    random_states: bytes
    slot: standins.Slot
    leaves: list[weakref.ref[torch.Tensor]]
    steps: dict[int, int]  # of the optimizers of its parameters, at the time of the call
    training: bool


class Undisturbed:
    """A forward that leaves buffers as they are and issues no collective of DDP's."""

    def __init__(self, module: torch.nn.Module, training: bool) -> None:
        self._module, self._training = module, training

    def __enter__(self) -> None:
        self._buffers = [(b, b.detach().clone()) for b in self._module.buffers()]
        self._was = self._module.training
        self._module.training = self._training
        self._sync = getattr(self._module, "require_forward_param_sync", None)
        if self._sync is not None:
            self._module.require_forward_param_sync = False  # type: ignore[assignment]
        self._grad = torch.enable_grad()
        self._grad.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._grad.__exit__(*exception)
        self._module.training = self._was
        if self._sync is not None:
            self._module.require_forward_param_sync = self._sync
        with torch.no_grad():
            for buffer, content in self._buffers:
                buffer.copy_(content)


class Outputs:
    """The outputs of the last intervals of a replay.

    Args:
        optimizers: all that there are.
    """

    def __init__(self, session: Session, optimizers: Iterable[Optimizer]) -> None:
        self._session = session
        self._optimizers = optimizers
        self._outputs: list[Output] = []
        self._steps: Mapping[Optimizer, int] = {}

    def add(
        self,
        call: Callable[[], Any],
        module: torch.nn.Module,
        inputs: Any,
        random_states: bytes,
        slot: standins.Slot,
        leaves: list[torch.Tensor],
        steps: Mapping[Optimizer, int],
    ) -> None:
        """Remember an output as long as it lives.

        Args:
            steps: per optimizer, its steps so far; changes as it goes on.
        """
        self._steps = steps
        self._outputs = [o for o in self._outputs if any(ref() is not None for ref in o.leaves)]
        self._outputs.append(
            Output(
                module,
                call,
                standins.differentiable(inputs),
                random_states,
                slot,
                [weakref.ref(leaf) for leaf in leaves],
                self._steps_of(module),
                module.training,
            )
        )

    def _steps_of(self, module: torch.nn.Module) -> dict[int, int]:
        mine = {id(p) for p in module.parameters()}
        return {
            id(optimizer): self._steps.get(optimizer, 0)
            for optimizer in self._optimizers
            if any(id(p) in mine for group in optimizer.param_groups for p in group["params"])
        }

    def after_state(self) -> list[torch.Tensor]:
        """Compute the outputs that are still alive and whose weights have not been stepped since
        they were made (a GAN's fake batch between the two optimizers), with the weights that have
        come from the peers, and lead what flows back into them.

        Returns:
            The outputs that are right now, with their graphs.

        Raises:
            Divergence: computing one of them takes collectives of its own.
        """
        session = self._session
        randomness = session.randomness
        if randomness is None:
            return []
        whole = randomness.whole()
        stale: set[int] = set()
        right: list[torch.Tensor] = []
        for output in self._outputs:
            leaves = [reference() for reference in output.leaves]
            if all(leaf is None for leaf in leaves):
                continue
            if (
                not output.steps
                or output.steps != self._steps_of(output.module)
                or any(id(tensor) in stale for tensor in output.inputs)
            ):
                output.slot.real = None  # stale for the script as well, or not known (a loss)
                stale.update(id(leaf) for leaf in leaves if leaf is not None)
                continue
            if any(isinstance(m, torch.nn.SyncBatchNorm) for m in output.module.modules()):
                raise session.diverged(
                    f"an output of {type(output.module).__name__} from before the boundary is "
                    "still in use, and computing it again takes collectives (SyncBatchNorm)"
                )
            randomness.restore_whole(output.random_states)
            with Undisturbed(output.module, output.training):
                real = standins.differentiable(output.call())
            output.slot.real = real
            for leaf, value in zip(leaves, real, strict=True):
                if leaf is not None:
                    leaf.detach().copy_(value.detach())
                    right.append(leaf)
        self._outputs.clear()
        randomness.restore_whole(whole)
        return right
