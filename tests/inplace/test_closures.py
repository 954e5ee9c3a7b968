"""Optimizers whose step calls back into the script, or waits for others: the values that it
returns, and what is said beforehand."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch

from flashrun.control.replicas import SPLITS, amount, promise
from tests.inplace.harness import Job, Outcome, same
from tests.inplace.test_turns import struck

torch.set_num_threads(1)  # before the forks: OpenMP does not survive them

TIMEOUT = 200.0  # s; never met on the way to success


@cache
def undisturbed(way: str) -> Outcome:
    outcome = Job("closures.py", 2, (way, "6"), timeout=TIMEOUT).run()
    assert outcome.end == "done", outcome.output
    return outcome


@pytest.mark.parametrize("late", [False, True], ids=["after", "before"])
@pytest.mark.parametrize(
    "way",
    [
        "lbfgs-mean",
        *(pytest.param(way, marks=pytest.mark.slow)
          for way in ("lbfgs", "sgd", "sgd-mean", "sgd-several-mean")),
    ],
)  # fmt: skip
def test_the_value_that_a_step_returns(way: str, late: bool) -> None:
    """The ranks' mean in it is the result of a collective, which the replay has not."""
    outcome = struck("closures.py", 2, (way, "6"), 3, late, timeout=TIMEOUT)
    assert outcome.end == "done", (outcome.reason, outcome.lines, outcome.output)
    assert outcome.incarnations == [0, 1]
    assert not same(undisturbed(way).results, outcome.results), outcome.lines


@pytest.mark.parametrize(
    ("script", "arguments", "says"),
    [
        ("closures.py", ("lbfgs", "6"), [f"2 replicas, … each, no step lost; but {SPLITS}"]),
        ("closures.py", ("sgd", "6"), ["2 replicas, … each, no step lost"]),
        # Its collectives come before it changes anything.
        ("own_step.py", (), ["2 replicas, … each, no step lost"]),
        # Another optimizer at first.
        (
            "closures.py",
            ("turns", "6"),
            ["2 replicas, … each, no step lost", f"but from now on {SPLITS}"],
        ),
    ],
    ids=["lbfgs", "sgd", "own_step", "later"],
)
def test_what_is_promised(script: str, arguments: tuple[str, ...], says: list[str]) -> None:
    outcome = Job(script, 2, arguments, timeout=TIMEOUT).run()
    assert outcome.end == "done", outcome.output
    lines = [re.sub(r"[\d.]+ \w+ each", "… each", line) for line in outcome.lines]
    assert lines == [f"recovery: in place, {text}" for text in says]
    found = [e for e in outcome.events if e["event"] == "recovery-class"]
    assert [e["splits"] for e in found] == [SPLITS in says[0]]


@pytest.mark.parametrize(
    ("size", "text"),
    [(7, "7 bytes"), (53_848, "53.8 KB"), (2_500_000, "2.5 MB"), (12e8, "1.2 GB")],
)
def test_bytes_for_people(size: float, text: str) -> None:
    assert amount(size) == text


def test_the_line_at_the_start() -> None:
    start = "recovery: in place, 4 replicas, 1.2 GB each, no step lost"
    only = "; but only one rank has: b on rank 1, a on rank 2 (its loss restarts all)"
    assert promise(4, 1_200_000_000, False, {}, ["norm"], 1) == start
    assert promise(4, 1_200_000_000, True, {}, [], 1) == f"{start}; but {SPLITS}"
    assert promise(4, 1_200_000_000, False, {"2": "a", "1": "b"}, [], 2) == start + only
    all_of_it = promise(4, 1_200_000_000, True, {"2": "a", "1": "b"}, ["norm", "more"], 2)
    assert all_of_it.startswith(f"{start}{only}; but {SPLITS}; but each rank has its own norm (and")
