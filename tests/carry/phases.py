"""Faults in each phase of a run and of a recovery, several in one run.

Each function here strikes at one moment; what it needs of the script is the lines it prints
("validates", "saves", "saved", "done").
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable

from tests import helpers
from tests.carry.harness import Watched

Phase = Callable[[Watched, random.Random], None]
RANKS = 3
GAP = 4  # steps between two of them: the recovery is over


def _two(draw: random.Random) -> tuple[int, int]:
    one, two = draw.sample(range(RANKS), 2)
    return one, two


def _later(run: Watched, draw: random.Random) -> None:
    run.await_step(draw.randrange(RANKS), run.last() + GAP, 60)


def before_the_first_step(run: Watched, draw: random.Random) -> None:
    victim = draw.randrange(RANKS)
    run.await_said(f"^rank {victim} step 0 begins")
    run.kill([victim])


def in_a_validation(run: Watched, draw: random.Random) -> None:
    run.await_said("^rank 0 validates")
    _later(run, draw)  # whoever else validates has said so
    victim = draw.randrange(RANKS)
    seen = victim if f"\nrank {victim} validates" in run.job.out else 0
    run.await_said(f"^rank {seen} validates", again=True)
    run.kill([victim])


def in_a_save(run: Watched, draw: random.Random) -> None:
    run.await_said("^rank 0 saves", again=True)
    run.kill([draw.randrange(RANKS)])


def rank_0_in_a_save(run: Watched, draw: random.Random) -> None:
    run.await_said("^rank 0 saves", again=True)
    run.kill([0])


def all_but_one(run: Watched, draw: random.Random) -> None:
    _later(run, draw)
    run.kill(_two(draw))


def again_in_the_hold(run: Watched, draw: random.Random) -> None:
    _later(run, draw)
    one, two = _two(draw)
    (pid,) = run.kill([one])
    run.await_said(f"pid {pid}.* ended", "err")
    run.kill([two])


def the_replacement(run: Watched, draw: random.Random) -> None:
    _later(run, draw)
    one, _ = _two(draw)
    (pid,) = run.kill([one])
    run.await_replacement(one, pid)
    run.kill([one])


def a_donor(run: Watched, draw: random.Random) -> None:
    _later(run, draw)
    one, two = _two(draw)
    (pid,) = run.kill([one])
    run.await_replacement(one, pid)
    run.kill([two])


def again_at_any_time(run: Watched, draw: random.Random) -> None:
    _later(run, draw)
    one, two = _two(draw)
    run.kill([one])
    until = time.perf_counter() + draw.uniform(0, 0.3)  # hold, catch-up, rebuild, or just after
    while time.perf_counter() < until:
        pass
    run.kill([two])


def the_agent(run: Watched, draw: random.Random) -> None:
    _later(run, draw)
    before = run.present(range(RANKS))
    agent = run.job.helper("agent")
    helpers.freeze(run.job.pid)  # the supervisor: nobody starts another agent
    os.kill(agent, signal.SIGKILL)
    run.agents += 1
    for rank in range(RANKS):  # training goes on
        run.await_step(rank, run.last() + GAP, 60)
    # An agent takes as long to start as some hundred steps, on a busy machine: the others wait for
    # one rank meanwhile, in their collective.
    waited_for = before[draw.randrange(RANKS)]
    helpers.freeze(waited_for)
    os.kill(run.job.pid, signal.SIGCONT)
    run.await_said("the new agent has taken over 3 running workers", "err")
    os.kill(waited_for, signal.SIGCONT)
    # Killed before it had read what proves the replicas, it is told again; only then is a loss
    # carried in place.
    run.await_said("recovery: in place, 3 replicas", "err")
    _later(run, draw)
    assert run.present(range(RANKS)) == before


def the_agent_in_a_recovery(run: Watched, draw: random.Random) -> None:
    _later(run, draw)
    (pid,) = run.kill([draw.randrange(RANKS)])
    agent = run.job.helper("agent")
    run.await_said(f"pid {pid}.* ended", "err")
    os.kill(agent, signal.SIGKILL)
    run.agents += 1


def in_the_last_step(run: Watched, draw: random.Random, last: int) -> None:
    """Another rank stands still in the last step, so that nobody gets past it."""
    other, victim = _two(draw)
    pid = run.present([other])[other]
    run.await_step(other, last - 1, 60)
    helpers.freeze(pid)
    run.await_step(victim, last - 1, 60)
    run.kill([victim])
    run.present([victim])
    os.kill(pid, signal.SIGCONT)


def after_some_have_finished(run: Watched, draw: random.Random, last: int) -> None:
    victim = draw.choice([1, 2])
    pid = _the_unfinished(run)
    run.kill([victim])
    run.present([victim])
    os.kill(pid, signal.SIGCONT)


def the_unfinished_one(run: Watched, draw: random.Random, last: int) -> None:
    _the_unfinished(run)
    run.kill([0])


def _the_unfinished(run: Watched) -> int:
    """Rank 0's process, which stands still after the last step; the others' scripts have ended."""
    pid = run.present([0])[0]
    run.await_said("^rank 0 evaluates")
    helpers.freeze(pid)
    run.await_said("^rank 1 done")
    run.await_said("^rank 2 done")
    return pid
