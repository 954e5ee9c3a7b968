"""In-place recovery through the launcher: whoever is killed, whenever, the final weights, optimizer
state and histories of every rank are bit for bit those of an undisturbed run, and the survivors
keep their processes.

The pieces have tests of their own: tests/inplace (the machine and the live half in a small harness)
and tests/replay (the catch-up).
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import helpers
from tests.jobs import Job, job

RANKS = 3
STEPS = 150
SLOW = pytest.mark.slow  # more of the same; tests/carry strikes at random moments as well

TRAIN = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

steps = int(sys.argv[1])
dist.init_process_group("gloo")
torch.manual_seed(7)
data = TensorDataset(torch.randn(96, 8), torch.randn(96, 1))
sampler = DistributedSampler(data, seed=3)
loader = DataLoader(data, batch_size=4, sampler=sampler)
model = DistributedDataParallel(torch.nn.Sequential(
    torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(32, 1)))
torch.manual_seed(100 + RANK)  # dropout differs between ranks
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
losses, step, epoch = [], 0, 0
while step < steps:
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        step += 1
        tell("step", step=step)
        if step == steps:
            break
    epoch += 1
    total = torch.tensor(losses[-1])
    dist.all_reduce(total)
    losses.append(total.item())
def save():
    torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(), "losses": losses, "epoch": epoch,
                "random": torch.get_rng_state()}, f"{os.environ['OUT']}/rank{RANK}.pt")
save()
tell("saved")
dist.destroy_process_group()
tell("destroyed")
"""


def digest(value: Any) -> str:
    """One hash over a nest of tensors and plain values, bit for bit."""
    hashed = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            hashed.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        elif isinstance(value, dict):
            for key in value:
                hashed.update(repr(key).encode())
                add(value[key])
        elif isinstance(value, (list, tuple)):
            hashed.update(str(len(value)).encode())
            for item in value:
                add(item)
        else:
            hashed.update(repr(value).encode())

    add(value)
    return hashed.hexdigest()


def results(folder: Path) -> dict[str, str]:
    """``"rank 0, model"`` -> hash."""
    return {
        f"rank {rank}, {name}": digest(value)
        for rank in range(RANKS)
        for name, value in torch.load(folder / f"rank{rank}.pt", weights_only=True).items()
    }


class Run:
    """One training job; ``kill`` hits the present process of a rank."""

    def __init__(self, job: Job, out: Path) -> None:
        self.job = job
        self.out = out

    def pid(self, rank: int) -> int:
        told: list[dict[str, Any]] = [e for e in list(self.job.events) if e["rank"] == rank]
        return int(told[-1]["pid"])

    def kill(self, rank: int, number: int = signal.SIGKILL) -> int:
        pid = self.pid(rank)
        os.kill(pid, number)
        return pid

    def await_step(self, step: int, rank: int) -> None:
        self.job.await_told("step", step=step, rank=rank)


@pytest.fixture
def train(tmp_path: Path) -> Any:
    def start(
        *flags: str, steps: int = STEPS, name: str = "j", body: str = TRAIN,
        fifos: Sequence[str] = (),
    ) -> Any:  # fmt: skip
        out = tmp_path / f"out-{name}"
        out.mkdir()
        return job(
            tmp_path, body, f"--nproc-per-node={RANKS}", *flags, args=[str(steps)],
            env={"OUT": str(out)}, name=name, forked=True, recovery="in-place", fifos=fifos,
        ), out  # fmt: skip

    return start


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What every rank has after a run that nobody disturbs, under ``--recovery=off``."""
    folder = tmp_path_factory.mktemp("undisturbed")
    out = folder / "out"
    out.mkdir()
    with job(folder, TRAIN, f"--nproc-per-node={RANKS}", args=[str(STEPS)],
             env={"OUT": str(out)}, recovery="off", forked=True) as run:  # fmt: skip
        assert run.ended() == 0, run.describe()
    return results(out)


def pids(run: Run) -> dict[int, set[int]]:
    """Processes that have spoken for each rank."""
    found: dict[int, set[int]] = {}
    for event in run.job.events:
        found.setdefault(event["rank"], set()).add(event["pid"])
    return found


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=SLOW), pytest.param(3, marks=SLOW)])
def test_a_random_rank_at_a_random_step(train: Any, undisturbed: dict[str, str], seed: int) -> None:
    print(f"seed {seed}")
    draw = random.Random(seed)
    rank, step = draw.randrange(RANKS), draw.randrange(3, STEPS - 3)
    started, out = train()
    with started as running:
        run = Run(running, out)
        run.await_step(step, rank)
        run.kill(rank)
        assert running.ended() == 0, running.describe()
    assert results(out) == undisturbed, running.err
    assert {r: len(p) for r, p in pids(run).items()} == {
        r: 1 + (r == rank) for r in range(RANKS)
    }, "survivors keep their processes"
    for words in ("recovery: in place, 3 replicas", f"rank {rank} lost (SIGKILL)",
                  "no step lost", "catch-up"):  # fmt: skip
        assert words in running.err
    said = [line for line in running.err.splitlines() if line.startswith("flashrun: ")]
    first = next(i for i, line in enumerate(said) if "ended: signal SIGKILL" in line)
    assert "recovery: done in" in said[first + 3], "four lines, of which one is the sum"
    assert "Traceback" not in running.err


def test_one_after_the_other_each_rank_once(train: Any, undisturbed: dict[str, str]) -> None:
    started, out = train()
    with started as running:
        run = Run(running, out)
        for rank, step in ((0, 20), (2, 60), (1, 110)):
            run.await_step(step, rank)
            run.kill(rank)
        assert running.ended() == 0, running.describe()
    assert results(out) == undisturbed, running.err
    assert running.err.count("recovery: done in") == 3


def test_two_at_once(train: Any, undisturbed: dict[str, str]) -> None:
    started, out = train()
    with started as running:
        run = Run(running, out)
        run.await_step(40, 1)
        run.kill(0)
        run.kill(2)
        assert running.ended() == 0, running.describe()
    assert results(out) == undisturbed, running.err


def test_the_replacement_is_killed_too(train: Any, undisturbed: dict[str, str]) -> None:
    started, out = train()
    with started as running:
        run = Run(running, out)
        run.await_step(70, 1)
        first = run.kill(1)
        running.await_output("rank 1 lost", "err")
        # It speaks while it catches up, so it is hit in the middle of that.
        running._await(lambda: run.pid(1) != first, "a word of the replacement", 60)
        run.kill(1)
        assert running.ended() == 0, running.describe()
    assert results(out) == undisturbed, running.err


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGSEGV,
        pytest.param(signal.SIGABRT, marks=SLOW),
        pytest.param(signal.SIGBUS, marks=SLOW),
    ],
)
def test_other_signals(train: Any, undisturbed: dict[str, str], number: signal.Signals) -> None:
    started, out = train()
    with started as running:
        run = Run(running, out)
        run.await_step(15, 2)
        run.kill(2, number)
        assert running.ended() == 0, running.describe()
    assert results(out) == undisturbed, running.err
    assert f"rank 2 lost ({number.name})" in running.err


def test_an_error_of_a_device(train: Any, undisturbed: dict[str, str]) -> None:
    """Whose exception it is: not the script's own."""
    error = "CUDA error: an illegal memory access was encountered"
    first = 'RANK == 1 and os.environ["FLASHRUN_INCARNATION"] == "0"'
    dies = f'{first}: raise RuntimeError("{error}")'
    at = "        step += 1"
    started, out = train(body=TRAIN.replace(at, f"        if step == 20 and {dies}\n{at}"))
    with started as running:
        run = Run(running, out)
        assert running.ended() == 0, running.describe()
    assert results(out) == undisturbed, running.err
    assert f"rank 1 lost (RuntimeError: {error}); replacing it in place" in running.err
    assert {r: len(p) for r, p in pids(run).items()} == {0: 1, 1: 2, 2: 1}


@pytest.mark.parametrize("word", ["saved", "destroyed"])
def test_at_the_end(train: Any, undisturbed: dict[str, str], word: str) -> None:
    """During the last lines of the script, and after them: some ranks have finished by then."""
    started, out = train()
    with started as running:
        run = Run(running, out)
        running.await_told(word, rank=1)
        run.kill(1)
        assert running.ended() == 0, running.describe()
    assert results(out) == undisturbed, running.err


def test_the_agent_is_killed_and_then_a_worker(train: Any, undisturbed: dict[str, str]) -> None:
    started, out = train()
    with started as running:
        run = Run(running, out)
        run.await_step(10, 0)
        running.kill_helper("agent")
        run.await_step(20, 0)
        run.kill(0)
        assert running.ended() == 0, running.describe()
    assert results(out) == undisturbed, running.err


def test_agent_and_worker_at_once(train: Any, undisturbed: dict[str, str]) -> None:
    """The agent had read nothing of what the worker had said: it stood still."""
    waits = 'tell("built")\nif RANK == 0: await_release("go")\nlosses, step, epoch'
    started, out = train(body=TRAIN.replace("losses, step, epoch", waits, 1), fifos=("go",))
    with started as running:
        run = Run(running, out)
        running.await_told("built", rank=0)
        agent = running.helper("agent")
        helpers.freeze(agent)
        running.release("go")
        run.await_step(30, 2)
        os.kill(agent, signal.SIGKILL)
        run.kill(2)
        assert running.ended() == 0, running.describe()
    assert results(out) == undisturbed, running.err
    assert "restart 1" not in running.err


def test_the_zygote_is_killed_with_a_worker(train: Any, undisturbed: dict[str, str]) -> None:
    started, out = train()
    with started as running:
        run = Run(running, out)
        run.await_step(30, 2)
        os.kill(running.helper("zygote"), signal.SIGKILL)
        run.kill(2)
        assert running.ended() == 0, running.describe()
    assert results(out) == undisturbed, running.err


def test_all_at_once_is_a_restart(train: Any, undisturbed: dict[str, str]) -> None:
    """Nobody is left who has the state: torchrun's rules, with the reason."""
    started, out = train("--max-restarts=1")
    with started as running:
        run = Run(running, out)
        run.await_step(30, 2)
        targets = [run.pid(rank) for rank in range(RANKS)]
        for pid in targets:
            os.kill(pid, signal.SIGKILL)
        assert running.ended() == 0, running.describe()
    assert results(out) == undisturbed, running.err
    assert "no survivor holds the state" in running.err
    assert "restart 1 of at most 1" in running.err


def test_code_that_was_edited_meanwhile(train: Any, undisturbed: dict[str, str]) -> None:
    """People work on while a job trains: a replacement runs what the others run."""
    body = """
sys.path.insert(0, os.environ["OUT"])
import mine  # before torch
""" + TRAIN.replace("torch.nn.functional.mse_loss(", "mine.loss_of(")
    started, out = train(body=body)
    code = out / "mine.py"
    code.write_text("import torch\nloss_of = torch.nn.functional.mse_loss\n")
    with started as running:
        run = Run(running, out)
        run.await_step(20, 1)
        code.write_text("import torch\nloss_of = lambda a, b: a.sum()\n")
        script = Path(running.command[-2])
        script.write_text(script.read_text().replace("Dropout(0.2)", "Dropout(0.9)"))
        run.kill(1)
        assert running.ended() == 0, running.describe()
    assert results(out) == undisturbed, running.err
    assert "no step lost" in running.err


def test_a_scripts_own_exception_is_not_replaced(tmp_path: Path) -> None:
    body = TRAIN.replace(
        'tell("step", step=step)',
        'tell("step", step=step)\n        if step == 20 and RANK == 1: raise ValueError("mine")',
    )
    with job(tmp_path, body, f"--nproc-per-node={RANKS}", args=["100"],
             env={"OUT": str(tmp_path)}, forked=True, recovery="in-place") as running:  # fmt: skip
        assert running.ended() == 1
    assert "ValueError: mine" in running.err
    assert "replacing it in place" not in running.err
    assert "rank      : 1 (local_rank: 1)" in running.err


def test_an_interrupt_in_a_recovery_tells_nothing_of_it(tmp_path: Path) -> None:
    with job(tmp_path, TRAIN, f"--nproc-per-node={RANKS}", "--shutdown-timeout=1",
             args=["9999"], env={"OUT": str(tmp_path)}, forked=True,
             recovery="in-place") as running:  # fmt: skip
        run = Run(running, tmp_path)
        run.await_step(20, 1)
        first = run.kill(1)
        running._await(lambda: run.pid(1) != first, "a word of the replacement", 60)
        helpers.freeze(run.pid(1))  # the others wait for it
        running.signal(signal.SIGINT)
        assert running.ended() == 1
    assert running.err.count("]: KeyboardInterrupt") == 2, running.err
    assert "another exception" not in running.err, running.err
    shown = re.findall(r"flashrun/worker/(\S+)\"", running.err)
    assert not {"rejoining.py", "communicator.py", "oplog.py"} & set(shown), running.err
    assert "threading.py" not in running.err, running.err


def test_retries_without_progress_end_the_job(tmp_path: Path) -> None:
    """A rank that dies again and again at the same place is not replaced for ever."""
    body = TRAIN.replace(
        'tell("step", step=step)',
        'tell("step", step=step)\n'
        '        if step == 20 and RANK == 1: os.kill(os.getpid(), signal.SIGKILL)',
    )  # fmt: skip
    events = tmp_path / "events"
    flags = (f"--nproc-per-node={RANKS}", "--max-retries=2", f"--events={events}")
    with job(tmp_path, body, *flags, args=["100"],
             env={"OUT": str(tmp_path)}, forked=True, recovery="in-place") as running:  # fmt: skip
        assert running.ended() == 1
    assert running.err.count("2 times in a row without progress") == 1  # not in each line about it
    assert "cannot go on in place, see above (give --max-restarts" in running.err
    (end,) = [e for e in map(json.loads, events.open()) if e["event"] == "finish"]
    assert "2 times in a row without progress" in end["reason"]  # a record has nothing above it


def test_replicas_that_differ_are_told_and_not_replaced(tmp_path: Path) -> None:
    body = TRAIN.replace("DistributedDataParallel(torch.nn.Sequential(", "torch.nn.Sequential(")
    body = body.replace("torch.nn.Linear(32, 1)))", "torch.nn.Linear(32, 1))")
    body = body.replace("model.module", "model").replace(
        "torch.manual_seed(7)", "torch.manual_seed(7 + RANK)"
    )
    with job(tmp_path, body, f"--nproc-per-node={RANKS}", args=["60"],
             env={"OUT": str(tmp_path)}, forked=True, recovery="in-place") as running:  # fmt: skip
        run = Run(running, tmp_path)
        run.await_step(30, 1)
        run.kill(1)
        assert running.ended() == 1
    assert "recovery: restart only:" in running.err
    assert "differs between ranks" in running.err
    assert "(model not wrapped in DDP?)" in running.err


def test_a_killed_worker_leaves_no_folder_of_multiprocessing(tmp_path: Path) -> None:
    body = """
import torch, torch.distributed as dist
from multiprocessing import util

dist.init_process_group("gloo")
tell("folder", path=util.get_temp_dir())  # as a DataLoader with workers does
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(400):
    optimizer.zero_grad()
    model(torch.ones(1, 2)).mean().backward()
    optimizer.step()
    if step == 10 and RANK == 1:
        tell("there")
dist.destroy_process_group()
"""
    with job(tmp_path, body, "--nproc-per-node=2", forked=True, recovery="in-place") as running:
        running.await_told("there", 1)
        (told,) = running.told("there")
        os.kill(told["pid"], signal.SIGKILL)
        assert running.ended() == 0, running.describe()
    folders = {event["path"] for event in running.told("folder")}
    assert not [folder for folder in folders if os.path.exists(folder)]
    assert not [name for name in running.left_in_tmp if name.startswith("pymp-")]
