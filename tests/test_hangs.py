"""Workers that hang: found, replaced in place and named; and those that only seem to."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from flashrun.beats import Beat
from flashrun.control.commands import Command, Kill, Log, RestartAll, Spawn
from flashrun.control.recovery import FAULT, SCRIPT, RecoveryMachine
from flashrun.node.heartbeats import Heartbeats, Sight, judge
from flashrun.node.inplace import classify
from flashrun.worker.heartbeat import Heartbeat
from tests import helpers
from tests.inplace import harness
from tests.jobs import Job, job
from tests.test_recovery import RANKS, TRAIN, Run, pids, results

STEPS = 60
FAST = ("--heartbeat-interval=0.1", "--detection-timeout=0.3")


def alive(beat: int = 5, state: str = "S") -> Sight:
    return Sight(beat, state)


STOPPED = Sight(5, "T")


@pytest.mark.parametrize(
    ("what", "before", "now", "supervisor", "missed"),
    [
        ("beats", alive(4), alive(5), "S", 0),
        ("sleeps with the GIL held", alive(), alive(), "S", 0),
        ("computes with the GIL held", alive(5, "R"), alive(5, "R"), "S", 0),
        ("waits for a disk with the GIL held", alive(5, "D"), alive(5, "D"), "S", 0),
        ("is held by a debugger", alive(5, "t"), alive(5, "t"), "S", 0),
        ("has ended, which is seen elsewhere", alive(5, "Z"), alive(5, "Z"), "S", 0),
        ("was stopped just now", alive(), STOPPED, "S", 0),
        ("was continued in between", Sight(4, "T"), STOPPED, "S", 0),
        ("has not begun to beat", Sight(-1, "T"), Sight(-1, "T"), "S", 0),
        ("is new", None, STOPPED, "S", 0),
        ("is stopped", STOPPED, STOPPED, "S", 3),
        ("is stopped, and the launcher too", STOPPED, STOPPED, "T", 0),
    ],
)
def test_who_misses_a_look(
    what: str, before: Sight | None, now: Sight, supervisor: str, missed: int
) -> None:
    seen: Mapping[int, Sight] = {} if before is None else {1: before}
    peers = {0: alive(8), 2: alive(8)}
    counts = judge({1: 2}, {**peers, **seen}, {**peers, 1: now}, supervisor)
    assert counts == {0: 0, 1: missed, 2: 0}, what


def test_a_job_that_was_stopped_as_a_whole_does_not_hang() -> None:
    everybody = dict.fromkeys(range(3), STOPPED)
    assert set(judge({}, everybody, everybody, "S").values()) == {0}
    # and who is continued last has the full time
    some = {**everybody, 0: alive(6, "R")}
    assert judge(dict.fromkeys(range(3), 0), everybody, some, "S") == {0: 0, 1: 1, 2: 1}


def test_looks_are_counted_and_not_seconds(tmp_path: Path) -> None:
    """An agent that was stopped itself, or a machine that slept, has not looked."""
    stopped = helpers_child()
    try:
        helpers.freeze(stopped)
        beat = Heartbeat(tmp_path, 0, 1000, lambda: (7, "live"))
        beat._pid = stopped
        beat.beat()
        seen = Beat.read(tmp_path, 0)
        assert seen is not None and (seen.boundary, seen.phase, seen.pid) == (7, "live", stopped)
        beats = Heartbeats(str(tmp_path), 5, 15)
        workers = {0: stopped, 1: os.getpid()}
        hung = [beats.look(workers, os.getpid(), now) for now in (0, 3600, 3605, 3610)]
        assert hung == [[], [], [], [0]]
    finally:
        os.kill(stopped, signal.SIGKILL)
        os.waitpid(stopped, 0)


def helpers_child() -> int:
    pid = os.fork()
    if not pid:
        while True:
            signal.pause()
    return pid


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("undisturbed")
    with job(folder, TRAIN, f"--nproc-per-node={RANKS}", args=[str(STEPS)],
             env={"OUT": str(folder)}, forked=True, recovery="off") as running:  # fmt: skip
        assert running.ended() == 0, running.describe()
    return results(folder)


def train(folder: Path, body: str = TRAIN, *flags: str):  # type: ignore[no-untyped-def]
    return job(
        folder, body, f"--nproc-per-node={RANKS}", *FAST, *flags, args=[str(STEPS)],
        env={"OUT": str(folder)}, forked=True, recovery="in-place",
    )  # fmt: skip


def check(running: Job, folder: Path, undisturbed: dict[str, str], lost: set[int]) -> None:
    assert results(folder) == undisturbed, running.err
    processes = {rank: len(seen) for rank, seen in pids(Run(running, folder)).items()}
    assert processes == {r: 1 + (r in lost) for r in range(RANKS)}, running.err


def test_a_stopped_worker_is_replaced(
    tmp_path: Path, undisturbed: dict[str, str], seed: int
) -> None:
    draw = random.Random(seed)
    rank, step = draw.randrange(RANKS), draw.randrange(5, STEPS - 5)
    with train(tmp_path) as running:
        run = Run(running, tmp_path)
        run.await_step(step, rank)
        run.kill(rank, signal.SIGSTOP)
        assert running.ended() == 0, running.describe()
    check(running, tmp_path, undisturbed, {rank})
    assert f"rank {rank} lost (stopped answering for 0.3 s); replacing it in place" in running.err


BUSY = """tell("step", step=step)
        if step == 20 and RANK == 1 and ATTEMPT == 0:
            import ctypes
            ctypes.PyDLL(None).usleep(900_000)  # the GIL is held: no beat
            pow(3, 1_200_000)  # likewise, and it computes
            tell("was busy")
"""


def test_a_worker_that_holds_the_gil_is_left_alone(
    tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    body = TRAIN.replace('tell("step", step=step)\n', BUSY)
    assert body != TRAIN
    with train(tmp_path, body) as running:
        running.await_told("was busy", rank=1)
        assert running.ended() == 0, running.describe()
    check(running, tmp_path, undisturbed, set())
    assert "stopped answering" not in running.err


def test_a_job_that_is_suspended_goes_on_without_a_fault(
    tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    with train(tmp_path) as running:
        run = Run(running, tmp_path)
        run.await_step(5, 1)
        # Ctrl-Z: as under torchrun, workers have sessions of their own and train on.
        helpers.freeze(running.pid)
        run.await_step(15, 1)
        running.signal(signal.SIGCONT)
        # All workers, one after the other.
        workers = [run.pid(rank) for rank in range(RANKS)]
        helpers.freeze(*workers)
        running.await_output("the job was stopped and waits to be continued", "err")
        for pid in workers:
            os.kill(pid, signal.SIGCONT)
        run.await_step(30, 1)
        # Everything, and the agent is the first to be continued.
        agent = running.helper("agent")
        everybody = [running.pid, running.helper("zygote"), running.helper("store"), *workers]
        helpers.freeze(*everybody, agent)
        time.sleep(0.5)  # longer than the detection timeout, while nobody can say anything
        for pid in (agent, *everybody):
            os.kill(pid, signal.SIGCONT)
        assert running.ended() == 0, running.describe()
    check(running, tmp_path, undisturbed, set())


LATE = {"what": "barrier 7 of group 0.0", "seconds": 4.0, "ranks": [0, 1, 2]}


def held(machine: RecoveryMachine, rank: int, now: float) -> list[Command]:
    check: dict[str, Any] = {"groups": {}, "site": "", "buckets": [], "state": ""}
    message = {
        "op": "held", "generation": machine.generation, "boundary": 5, "state": True,
        "finished": False, "groups": {}, "check": check,
    }  # fmt: skip
    return machine.message(rank, 0, message, now)


def late(machine: RecoveryMachine, ranks: list[int]) -> list[Command]:
    """Ranks wait for longer than the timeout of their group."""
    for rank in ranks:
        suspect = {"op": "suspect", "generation": machine.generation, "error": "", "late": LATE}
        machine.message(rank, 0, suspect, 0.0)
    return machine.tick(1.0)


def test_who_does_not_come_within_the_groups_timeout_is_found_hung() -> None:
    machine = RecoveryMachine(4)
    (log,) = [c for c in late(machine, [0, 2]) if isinstance(c, Log)]
    assert "barrier 7 of group 0.0 took longer than 4 s, its group's timeout" in log.line
    held(machine, 0, 1.5)
    held(machine, 2, 1.5)
    assert machine.wake_at() == 5.0, "as long again to come to any collective"
    # rank 3 is no member, so it may be busy
    cause = "did not come to barrier 7 of group 0.0 within 4 s"
    assert machine.tick(5.0) == [Kill(1, 0, cause)]
    commands = machine.exited(1, 0, FAULT, cause, 5.1)
    assert [c.rank for c in commands if isinstance(c, Spawn)] == [1]


def test_a_timeout_with_everybody_there_is_tried_once_more() -> None:
    machine = RecoveryMachine(2)
    for attempt in range(2):
        late(machine, [0, 1])
        commands = [*held(machine, 0, 2.0), *held(machine, 1, 2.0)]
        restarts = [c.reason for c in commands if isinstance(c, RestartAll)]
        if not attempt:
            assert not restarts
            for rank in range(2):
                machine.message(rank, 0, {"op": "built", "generation": machine.generation}, 3.0)
            assert machine.phase == "live"
    assert "in the same order?" in restarts[0]


MISSING = TRAIN.replace(
    "losses, step, epoch = [], 0, 0",
    """losses, step, epoch = [], 0, 0
from datetime import timedelta
short = dist.new_group(timeout=timedelta(seconds=2))""",
).replace(
    'tell("step", step=step)\n',
    """tell("step", step=step)
        if step == 20:
            if RANK == 1 and os.environ["FLASHRUN_INCARNATION"] == "0":
                forever()
            dist.barrier(group=short)
""",
)


def test_a_rank_that_sleeps_for_ever_is_replaced_when_its_peers_have_waited_long_enough(
    tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    with train(tmp_path, MISSING) as running:
        assert running.ended() == 0, running.describe()
    check(running, tmp_path, undisturbed, {1})
    cause = r"rank 1 lost \(did not come to barrier \d+ of group .* within 2 s"
    assert re.search(cause, running.err)


@pytest.mark.parametrize("caught", ["caught", "raised"])
def test_monitored_barrier_names_the_missing_ranks(caught: str) -> None:
    """As torch's does; and nobody is replaced for what the script was told."""
    torch.set_num_threads(1)  # before the forks
    outcome = harness.Job("missing.py", 3, (caught,)).run()
    text = "[Rank 0]: Ranks 1 failed to pass monitoredBarrier in 500 ms"
    (line,) = [line for line in outcome.lines if "restart only" in line]
    assert "monitored_barrier failed in the script: " in line
    if caught == "raised":
        assert outcome.end == "script", (outcome.lines, outcome.output)
        facts = {"exception": True, "error": f"RuntimeError: {text} gloo/transport/tcp"}
        assert classify(1, facts)[0] == SCRIPT
        return
    assert outcome.end == "done", (outcome.reason, outcome.lines, outcome.output)
    assert outcome.results[0] == text, outcome.results
    assert outcome.results[1] == ""
    assert outcome.results[2].startswith("Rank 2 successfully reached monitoredBarrier, but")


@pytest.mark.slow
def test_detailed_debugging_and_a_fault(tmp_path: Path, undisturbed: dict[str, str]) -> None:
    """torch's own checks of each collective are left out, which is said, and nothing else is."""
    with job(
        tmp_path, TRAIN, f"--nproc-per-node={RANKS}", args=[str(STEPS)], forked=True,
        recovery="in-place", env={"OUT": str(tmp_path), "TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
    ) as running:  # fmt: skip
        run = Run(running, tmp_path)
        run.await_step(20, 1)
        run.kill(1)
        assert running.ended() == 0, running.describe()
    check(running, tmp_path, undisturbed, {1})
    assert "TORCH_DISTRIBUTED_DEBUG=DETAIL" in running.err
