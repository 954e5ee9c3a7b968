"""torch.compile sees the script's own code, not flashrun's around it."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch._dynamo  # before the wrapper: it keeps what nn.Module.__call__ was

from flashrun.worker.replay.patching import Patches


def test_a_wrapped_call_is_compiled_as_one_graph() -> None:
    patches = Patches()

    def make(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            sys._getframe()  # dynamo can't trace it
            return original(*args, **kwargs)

        return call

    patches.wrap(torch.nn.Module, "__call__", make)
    try:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        x = torch.ones(3, 2)
        compiled = torch.compile(lambda x: model(x), backend="eager", fullgraph=True)
        assert torch.equal(compiled(x), model(x))
    finally:
        patches.undo()
        torch._dynamo.reset()


def _found(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(torch.nonzero(a), b)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit.script
def test_a_wrapped_function_is_an_operator_to_torchscript() -> None:
    """torch compiles some of its own so, as it imports ``torch.distributed.optim``."""
    patches = Patches()
    for name in ("equal", "nonzero"):
        patches.wrap(torch, name, lambda original: lambda *args: original(*args))
    try:
        code = torch.jit.script(_found).code
    finally:
        patches.undo()
    assert "torch.equal(torch.nonzero(a), b)" in code
