"""However DDP's reductions come about: they end, and a worker lost among them is replaced."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from flashrun import messages
from flashrun.worker import reductions
from flashrun.worker.replay import boundaries
from tests.inplace.harness import Job, same
from tests.inplace.test_trouble import dies_in_interval

torch.set_num_threads(1)  # before the forks: OpenMP does not survive them

STEPS = "9"


@pytest.mark.parametrize(
    "way", ["plain", "static", "reentrant", "checkpoint", "unused", "view", "accumulated"]
)
def test_a_worker_lost_in_backward(way: str) -> None:
    undisturbed = Job("backwards.py", 3, (way, STEPS)).run()
    assert undisturbed.end == "done", (undisturbed.reason, undisturbed.output)
    outcome = Job("backwards.py", 3, (way, STEPS), in_child=dies_in_interval(1, 6)).run()
    assert outcome.end == "done", (outcome.reason, outcome.lines, outcome.output)
    assert outcome.incarnations == [0, 1, 0]
    assert not same(undisturbed.results, outcome.results), outcome.lines


def test_a_wait_that_nobody_knew_of_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reducer waits before the end of backward, which is to complete what it waits for."""
    monkeypatch.setattr(reductions, "install", lambda: None)
    outcome = Job("backwards.py", 3, ("static", "3"), environ={messages.HEARTBEAT: "0.2"}).run()
    assert outcome.end == "done", (outcome.reason, outcome.lines, outcome.output)


@pytest.mark.parametrize("name", ["BOUNDARY", "CARRY"])
def test_a_worker_lost_while_it_logs_a_boundary(name: str) -> None:
    """Just before the record; the others are at that boundary, and the norm is read after it."""

    def prepare(rank: int, incarnation: int) -> None:
        log, pid = boundaries.log, os.getpid()

        def logged(session, randomness, b):  # type: ignore[no-untyped-def]
            append = session.append

            def appended(kind, *record):  # type: ignore[no-untyped-def]
                if kind == getattr(boundaries.kinds, name):
                    os.kill(pid, signal.SIGKILL)
                append(kind, *record)

            if (rank, incarnation, b) == (1, 0, 6):
                session.append = appended
            log(session, randomness, b)

        boundaries.log = logged

    undisturbed = Job("backwards.py", 3, ("later", STEPS)).run()
    outcome = Job("backwards.py", 3, ("later", STEPS), in_child=prepare).run()
    assert outcome.end == "done", (outcome.reason, outcome.lines, outcome.output)
    assert outcome.incarnations == [0, 1, 0]
    assert not same(undisturbed.results, outcome.results), outcome.lines
