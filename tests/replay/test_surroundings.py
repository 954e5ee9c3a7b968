"""What a look at the script's variables sees (`flashrun.worker.replay.surroundings`)."""

import random
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from flashrun.worker.replay import surroundings
from flashrun.worker.replay.surroundings import look


@pytest.fixture(autouse=True)
def no_other_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' own (``before``) are not to be seen."""
    monkeypatch.setattr(surroundings, "_variables", lambda: iter(()))


def draws_of_the_process() -> None:
    torch.rand(1)
    random.random()
    np.random.rand()


@pytest.mark.parametrize("thing", [torch, random, np, torch.default_generator])
def test_generators_of_the_process_are_followed_elsewhere(thing: Any) -> None:
    before = look([thing])
    draws_of_the_process()
    assert look([thing]) == before  # else every model with dropout would always run


def test_modules_are_not_gone_through() -> None:
    module = ModuleType("library")
    module.__dict__["count"] = 1
    before = look([module])
    module.__dict__["count"] = 2
    assert look([module]) == before


@pytest.mark.parametrize(
    ("thing", "change"),
    [
        (own := torch.Generator(), lambda: torch.rand(1, generator=own)),
        (mine := random.Random(1), lambda: mine.random()),
        (numpys := np.random.default_rng(1), lambda: numpys.random()),
        (counts := {"seen": 1}, lambda: counts.update(seen=2)),
        (losses := [0.5], lambda: losses.append(0.25)),
    ],
)
def test_what_the_script_keeps_is_seen(thing: Any, change: Any) -> None:
    before = look([thing])
    change()
    assert look([thing]) != before
