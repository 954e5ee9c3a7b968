"""A node's workers stand still with all that they have started, and go on or are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import psutil
import pytest

from flashrun.control.cut_off import come_back
from flashrun.control.plan_book import PREFIX, PlanBook
from flashrun.control.records import Member, Plan
from flashrun.node import pausing
from flashrun.node.heartbeats import Heartbeats
from flashrun.node.pausing import Processes, hold, let_go
from flashrun.node.process_tree import TAG_VARIABLE
from flashrun.rendezvous.kv import MemoryKeyValue
from tests import helpers
from tests.test_plan_book import running

TAG = "0123456789abcdef:0-------:00--"
# A worker with a child of its session, one of a session of its own, and one that has emptied its
# environment; each says its pid and counts.
WORKER = """
import os, sys, time
def count():
    number = 0
    while True:
        number += 1
        time.sleep(0.01)
for kind in ("child", "setsid", "emptied"):
    if os.fork() == 0:
        if kind == "setsid":
            os.setsid()
        if kind == "emptied":
            os.execve(sys.executable, [sys.executable, "-c", "import time; time.sleep(999)"], {})
        count()
print("ready", flush=True)
count()
"""


@pytest.fixture
def worker() -> Iterator[Processes]:
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER], stdout=subprocess.PIPE, start_new_session=True,
        env={**os.environ, TAG_VARIABLE: TAG},
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.readline()
    workers = Processes([process.pid], frozenset([TAG]))
    helpers.wait_until(lambda: len(workers.all()) == 4, "the worker's children", 20)
    yield workers
    for pid in workers.all():
        os.kill(pid, signal.SIGKILL)
    process.communicate()


def states(workers: Processes) -> list[str]:
    return [psutil.Process(pid).status() for pid in sorted(workers.all())]


def await_standstill(workers: Processes) -> None:
    """All are stopped: the signal was sent, and takes effect when the kernel next looks at them."""
    stopped = [psutil.STATUS_STOPPED] * 4
    helpers.wait_until(lambda: states(workers) == stopped, "all to stand still", 20)


def test_all_that_a_worker_has_started(worker: Processes) -> None:
    mine = psutil.Process().status()
    hold(worker)
    await_standstill(worker)
    assert mine == psutil.STATUS_RUNNING
    hold(worker)  # as of the next agent
    let_go(worker)
    assert psutil.STATUS_STOPPED not in states(worker)


def test_one_that_somebody_continues_is_stopped_again(
    worker: Processes, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pausing, "_AGAIN_S", 0.0)
    monkeypatch.setattr(Processes, "of", classmethod(lambda cls, group: worker))
    still = pausing.Standstill()
    still.tick(None)
    assert psutil.STATUS_STOPPED not in states(worker) and still.timeout() is None
    still.since = time.monotonic()
    still.begin(None, "etcd is out of reach")
    os.kill(worker.pids[0], signal.SIGCONT)
    assert still.timeout() is not None
    still.tick(None)
    await_standstill(worker)
    still.end(None, "it is back", 2.0)
    still.tick(None)
    assert psutil.STATUS_STOPPED not in states(worker)
    shown = capfd.readouterr().err
    assert shown.count("its workers are paused, since the others may go on without it") == 1
    assert shown.count("it is back; the workers go on after 2.0 s") == 1


def test_a_paused_worker_does_not_hang(worker: Processes, tmp_path: Any) -> None:
    paused = True
    beats = Heartbeats(str(tmp_path), 1.0, 2.0, lambda: paused)
    beats._see = lambda rank, pid: pausing_sight  # type: ignore[method-assign]
    from flashrun.node.heartbeats import Sight

    pausing_sight = Sight(3, "T")
    pids = {0: worker.pids[0], 1: os.getpid()}
    assert [beats.look(pids, os.getpid(), float(now)) for now in range(5)] == [[]] * 5
    assert not beats.suspended
    paused = False
    beats._see = lambda rank, pid: Sight(3, "R" if rank else "T")  # type: ignore[method-assign]
    looks = [beats.look(pids, os.getpid(), float(now)) for now in range(3)]
    assert looks == [[], [], [0]], "with all of its time, once it is to go on"


# --- whether the ranks are still ours ------------------------------------------------------------


class Gate:
    """Stands for the fence."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def go_on(self, why: str) -> None:
        self.said.append(why)


ME = Member("b", 2, 2, "r", "10.0.0.2", state="running", round=3)


@pytest.mark.parametrize(
    ("plan", "me", "lost", "ours"),
    [
        (running(3), ME, False, True),
        (running(3), replace(ME, state="failed"), False, True),
        (running(3), ME, True, False),
        (running(4), ME, False, False),  # another round
        (running(3), replace(ME, node="c"), False, False),  # another has its place
        (replace(running(3), phase="stopping"), ME, False, False),
        (Plan(serial=9, phase="finished"), ME, False, False),
        (running(4), replace(ME, state="stopped"), False, True),  # nothing runs here
    ],
)
def test_who_may_go_on(plan: Plan, me: Member, lost: bool, ours: bool) -> None:
    kv, gate = MemoryKeyValue(), Gate()
    book = PlanBook(kv, PREFIX)
    book.read()
    assert book.write(plan, "w")
    if lost:
        kv.put(f"{PREFIX}lost/2", b"no answer")
    come_back(gate, kv, PlanBook(kv, PREFIX), me)  # type: ignore[arg-type]
    assert bool(gate.said) == ours
    assert book.read() == plan, "what is planned is the same"


def test_what_is_decided_at_that_moment_comes_too_late() -> None:
    """Who leads has seen the node silent, and is about to give its ranks away."""
    kv, gate = MemoryKeyValue(), Gate()
    leader = PlanBook(kv, PREFIX)
    leader.read()
    assert leader.write(running(3), "w")
    leader.read()
    come_back(gate, kv, PlanBook(kv, PREFIX), ME)  # type: ignore[arg-type]
    assert gate.said
    assert not leader.write(running(4), "the node is lost")
    assert kv.counter(f"{PREFIX}losses") == 1, "it looks at the heartbeats before it decides again"


class Raced(MemoryKeyValue):
    """Somebody else writes a plan right before each compare-and-swap."""

    def compare_and_swap(self, key: str, expected: bytes | None, value: bytes) -> bool:
        self.put(key, b"another")
        return super().compare_and_swap(key, expected, value)


def test_what_was_decided_a_moment_before_counts() -> None:
    kv, gate = MemoryKeyValue(), Gate()
    book = PlanBook(kv, PREFIX)
    book.read()
    assert book.write(running(3), "w")
    raced = Raced()
    for key in kv.list_keys(""):
        raced.put(key, kv.get(key) or b"")
    come_back(gate, raced, PlanBook(raced, PREFIX), ME)  # type: ignore[arg-type]
    assert not gate.said
