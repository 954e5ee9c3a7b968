"""torch.compile sees the script's own code, not flashrun's around it."""

from __future__ import annotations

import sys
from typing import Any

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
