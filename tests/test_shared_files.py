"""Nodes that share a file system, and a script that looks there for its own checkpoints when it
begins: whoever is lost, final weights and files are bit for bit those of an undisturbed run.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import jobs
from tests.test_lost_node import ended, lose
from tests.test_recovery import TRAIN
from tests.test_recovery_nodes import FOREVER, STEPS, Nodes, Start, digest, results, start

__all__ = ["start"]  # the fixture

# Each epoch (of 6 steps) one rank saves: a file that is replaced, and a folder of its own, which is
# written under another name, renamed, and removed two epochs later. All write to one log.
SAVING = """
from pathlib import Path
import glob, logging, shutil
out, saver = Path(os.environ["OUT"]), int(os.environ["SAVER"])
logging.basicConfig(filename=out / "log.txt", level=logging.INFO)
(out / "epochs").mkdir(exist_ok=True)
found = sorted(glob.glob(str(out / "epochs" / "epoch-*")), key=lambda p: int(p.rpartition("-")[2]))
if (out / "latest.pt").exists():
    loaded = torch.load(out / "latest.pt", weights_only=True)
    model.module.load_state_dict(loaded["model"])
    step, epoch = loaded["step"], loaded["epoch"]
    losses.append(float(len(os.listdir(out / "epochs"))))
    if found:
        losses.append(torch.load(Path(found[-1]) / "loss.pt", weights_only=True).item())
tell("began", step=step)
def snapshot():
    logging.info("rank %d: epoch %d, loss %r", RANK, epoch, losses[-1])
    if RANK != saver:
        return
    torch.save({"model": model.module.state_dict(), "step": step, "epoch": epoch}, out / "new.pt")
    os.replace(out / "new.pt", out / "latest.pt")
    new = out / "epochs" / f"new-{epoch}"
    new.mkdir()
    torch.save(torch.tensor(losses[-1]), new / "loss.pt")
    os.rename(new, out / "epochs" / f"epoch-{epoch}")
    for folder in sorted((out / "epochs").iterdir()):
        if int(folder.name.rpartition("-")[2]) < epoch - 1:
            shutil.rmtree(folder)
    tell("snapshot", epoch=epoch)
"""
BODY = TRAIN.replace(
    "losses, step, epoch = [], 0, 0\n", f"losses, step, epoch = [], 0, 0\n{SAVING}"
).replace(
    "    losses.append(total.item())\n", "    losses.append(total.item())\n    snapshot()\n"
)


def older(out: Path) -> None:
    """What an earlier run has left."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(32, 1)
    )
    torch.save({"model": model.state_dict(), "step": 12, "epoch": 2}, out / "latest.pt")
    for epoch in (1, 2):
        (out / "epochs" / f"epoch-{epoch}").mkdir(parents=True)
        torch.save(torch.tensor(float(epoch)), out / "epochs" / f"epoch-{epoch}" / "loss.pt")


def files(out: Path) -> dict[str, str]:
    """Those that are the same however often a rank was replaced (a log has lines twice)."""
    found = {}
    for path in sorted(out.rglob("*.pt")):
        name = str(path.relative_to(out))
        if not name.startswith("rank"):
            found[name] = digest(torch.load(path, weights_only=True))
    return found


Run = Callable[..., Any]


@pytest.fixture
def run(start: Start, tmp_path: Path) -> Run:
    @contextmanager
    def make(
        nodes: int = 2, *flags: str, saver: int = 0, before: Callable[[Path], None] | None = None,
        **options: Any,
    ) -> Iterator[Nodes]:  # fmt: skip
        env = {"SAVER": str(saver)}
        body = options.pop("body", BODY)
        with start(nodes, *flags, body=body, env=env, before=before, **options) as made:
            yield made

    return make


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, str]]:
    """Results and files of a run that nobody disturbs, on one node, under ``--recovery=off``."""
    known: dict[Any, dict[str, str]] = {}

    def of(before: Callable[[Path], None] | None = None) -> dict[str, str]:
        if before not in known:
            folder = tmp_path_factory.mktemp("wanted")
            out = folder / "out"
            out.mkdir()
            if before is not None:
                before(out)
            with jobs.job(folder, BODY, "--nproc-per-node=4", args=[str(STEPS)],
                          env={"OUT": str(out), "SAVER": "0"}, forked=True,
                          recovery="off") as job:  # fmt: skip
                assert job.wait(180) == 0, job.err
            known[before] = {**results(out, 4), **files(out)}
        return known[before]

    return of


def check(nodes: Nodes, wanted: dict[str, str]) -> None:
    """In place, with the same result."""
    told = nodes.describe()
    assert {**results(nodes.out, 4), **files(nodes.out)} == wanted, told
    assert "cannot go on in place" not in told, told


def after_snapshots(nodes: Nodes, number: int) -> None:
    nodes.jobs[0]._await(
        lambda: len([s for j in nodes.jobs for s in j.told("snapshot")]) >= number,
        f"{number} snapshots", 120,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("lost", "saver", "before"),
    [
        pytest.param(3, 0, None, id="the-other-node", marks=pytest.mark.slow),
        pytest.param(3, 0, older, id="the-other-node-resumed"),
        pytest.param(1, 0, older, id="the-node-that-saves", marks=pytest.mark.slow),
        pytest.param(0, 0, None, id="the-rank-that-saves", marks=pytest.mark.slow),
        pytest.param(0, 3, older, id="rank-0-while-3-saves", marks=pytest.mark.slow),
    ],
)
def test_one_rank(run: Run, wanted: Any, lost: int, saver: int, before: Any) -> None:
    with run(saver=saver, before=before) as nodes:
        after_snapshots(nodes, 3)
        nodes.kill(lost)
        nodes.ended()
    check(nodes, wanted(before))
    assert nodes.processes() == {r: 1 + (r == lost) for r in range(4)}, "survivors stay"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
def test_at_random_moments(run: Run, wanted: Any, seed: int) -> None:
    print(f"seed {seed}")
    draw = random.Random(seed)
    before = draw.choice([None, older])
    with run(before=before) as nodes:
        step = 15
        while step < STEPS - 3:
            nodes.await_step(step, draw.randrange(4))
            nodes.kill(*draw.sample(range(4), draw.choice([1, 1, 2])))
            step += draw.randint(6, 20)
        nodes.ended()
    check(nodes, wanted(before))


@pytest.mark.slow
@pytest.mark.parametrize("saver", [0, 3], ids=["the-other-saves", "the-lost-one-saved"])
def test_a_lost_node(run: Run, wanted: Any, saver: int) -> None:
    """And then a worker of the node that is left, which asks the spare."""
    gates = TRAIN_GATES
    body = BODY.replace('tell("step", step=step)', 'tell("step", step=step)\n' + WAITS)
    with run(2, *FOREVER, saver=saver, before=older, spares=1, body=body, fifos=gates) as nodes:
        nodes.await_step(40, 0)
        (spare,) = nodes.await_spares()
        lost = nodes.of(3)
        nodes.await_copied(28, 2, 3)  # it went on at step 12
        lose(lost)
        nodes.of(0).release("go40")
        nodes.await_step(60, 0)
        nodes.kill(1)
        nodes.of(0).release("go60")
        ended(nodes, lost)
    check(nodes, wanted(older))
    assert nodes.processes() == {0: 1, 1: 2, 2: 2, 3: 2}, "survivors keep their processes"
    assert {e["rank"] for e in spare.told("saved")} == {2, 3}


WAITS = (
    "        if step in (40, 60) and RANK == 0 and ATTEMPT == 0:"
    ' await_release(f"go{step}")'
)
TRAIN_GATES = ["go40", "go60"]


# Each node has a folder of its own at the same path, and rank 0 changes what is in its node's.
LOCAL = TRAIN.replace(
    "losses, step, epoch = [], 0, 0\n",
    """losses, step, epoch = [], 0, 0
mine = os.environ["LOCAL"]
losses.append(float(open(f"{mine}/scale").read()))
losses.append(float(os.path.exists(f"{mine}/seen")))
""",
).replace(
    "    losses.append(total.item())\n",
    """    losses.append(total.item())
    if RANK == 0 and epoch == 2:
        with open(f"{mine}/scale", "w") as file: file.write("99")
        with open(f"{mine}/seen", "w") as file: file.write("99")
    if RANK == 0 and epoch == 3:
        os.rename(f"{mine}/scale", f"{mine}/other")
        os.unlink(f"{mine}/seen")
""",
)


def test_a_folder_that_is_each_nodes_own(run: Run, tmp_path: Path) -> None:
    mine = tmp_path / "local"
    mine.mkdir()
    probe = ["unshare", "-m", "mount", "-t", "tmpfs", "own", str(mine)]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("no mount namespaces here (needs root)")

    def within(node: int) -> list[str]:
        make = f"mount -t tmpfs own {mine} && echo {node}.5 > {mine}/scale && exec \"$@\""
        return ["unshare", "-m", "sh", "-c", make, "sh"]

    with run(body=LOCAL.replace('os.environ["LOCAL"]', repr(str(mine))), within=within) as nodes:
        nodes.await_step(30, 3)
        nodes.kill(3)
        nodes.await_step(60, 0)
        nodes.kill(1)
        nodes.ended()
    told = nodes.describe()
    assert nodes.processes() == {0: 1, 1: 2, 2: 1, 3: 2}, told
    losses = [torch.load(nodes.out / f"rank{r}.pt", weights_only=True)["losses"] for r in range(4)]
    assert [found[:2] for found in losses] == [[0.5, 0.0], [0.5, 0.0], [1.5, 0.0], [1.5, 0.0]], told


# All ranks have the log open; rank 1 has nothing to say, rank 0 says something in each step.
LOGGING = TRAIN.replace(
    "losses, step, epoch = [], 0, 0\n",
    """losses, step, epoch = [], 0, 0
log = open(os.path.join(os.environ["OUT"], "log.txt"), "a", buffering=1)
""",
).replace(
    'tell("step", step=step)',
    'tell("step", step=step)\n        if RANK == 0: log.write(f"{step}\\n")',
)


def test_a_log_that_others_write_to_stays(tmp_path: Path) -> None:
    """What a replaced rank wrote to a log is cut where it goes on; not what the others wrote."""
    with jobs.job(tmp_path, LOGGING, "--nproc-per-node=2", args=[str(STEPS)],
                  env={"OUT": str(tmp_path)}, forked=True, recovery="in-place") as job:  # fmt: skip
        job.await_told("step", step=30, rank=1)
        os.kill(job.told("step", rank=1)[-1]["pid"], signal.SIGKILL)
        assert job.ended() == 0, job.describe()
    assert "recovery: done in" in job.err
    assert (tmp_path / "log.txt").read_text().split() == [str(s + 1) for s in range(STEPS)]


# Rank 0 dies at step 40 at the POINT-th `point()` since `points` was 0.
LETHAL_POINT = """losses, step, epoch = [], 0, 0
from pathlib import Path
out, lethal, points = Path(os.environ["OUT"]), int(os.environ["POINT"]), 0
def point(first=os.environ["FLASHRUN_INCARNATION"] == "0"):
    global points
    points += 1
    if first and step == 40 and points == lethal: os.kill(os.getpid(), signal.SIGKILL)
"""

# One after each of the things that it does to files after a step.
POINTS = TRAIN.replace(
    "losses, step, epoch = [], 0, 0\n",
    LETHAL_POINT
    + """
import shutil
def save():
    global points
    points = 0
    torch.save(model.module.state_dict(), out / "new.pt")
    point()
    os.replace(out / "new.pt", out / "latest.pt")
    point()
    (out / "new").mkdir()
    point()
    with open(out / "new" / "loss", "x") as file: file.write(repr(losses[-1]))
    point()
    os.rename(out / "new", out / f"step-{step}")
    point()
    if step == 40: shutil.rmtree(out / "step-20")
    point()
    if step > 20: os.unlink(out / "last")
    point()
    os.symlink(f"step-{step}", out / "last")
    point()
""",
).replace(
    'tell("step", step=step)',
    'tell("step", step=step)\n        if RANK == 0 and step % 20 == 0: save()',
)


@pytest.mark.parametrize(
    "point", [pytest.param(p, marks=pytest.mark.slow if p != 5 else ()) for p in range(1, 9)]
)
def test_what_was_done_to_files_is_not_done_twice(tmp_path: Path, point: int) -> None:
    """The replacement does the step again in which the dead worker has done some of it."""
    with jobs.job(tmp_path, POINTS, "--nproc-per-node=2", args=["60"],
                  env={"OUT": str(tmp_path), "POINT": str(point)}, forked=True,
                  recovery="in-place") as job:  # fmt: skip
        assert job.ended() == 0, job.describe()
    assert job.err.count("no step lost") == 2, job.err
    names = {p.name for p in tmp_path.iterdir()}
    assert {"latest.pt", "step-40", "step-60", "last"} <= names, names
    assert not names & {"new", "new.pt", "step-20"}, names
    assert os.readlink(tmp_path / "last") == "step-60"
    assert os.listdir(tmp_path / "step-40") == ["loss"]


# A child of rank 0 saves in the background; whoever begins anew would find that.
FORKED = TRAIN.replace(
    "losses, step, epoch = [], 0, 0\n",
    """losses, step, epoch = [], 0, 0
import multiprocessing
saved = os.path.join(os.environ["OUT"], "saved")
if os.path.exists(saved): losses.append(-1.0)
def save():
    with open(saved, "w") as file: file.write(str(step))
""",
).replace(
    'tell("step", step=step)',
    """tell("step", step=step)
        if RANK == 0 and step % 10 == 0:
            child = multiprocessing.get_context("fork").Process(target=save)
            child.start()
            child.join()""",
)


def test_what_a_forked_child_has_saved(tmp_path: Path) -> None:
    with jobs.job(tmp_path, FORKED, "--nproc-per-node=2", args=["40"],
                  env={"OUT": str(tmp_path)}, forked=True, recovery="in-place") as job:  # fmt: skip
        job.await_told("step", step=15, rank=1)
        os.kill(job.told("step", rank=1)[-1]["pid"], signal.SIGKILL)
        assert job.ended() == 0, job.describe()
    assert "recovery: done in" in job.err
    for rank in range(2):
        losses = torch.load(tmp_path / f"rank{rank}.pt", weights_only=True)["losses"]
        assert losses[0] > 0 and len(losses) == 40 + 4, (rank, losses[:3], len(losses))
