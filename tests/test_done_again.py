"""A rank dies in the middle of what it does to files in a step. Its replacement does that step
again, and finds what the lost rank had found there, not what that one has made."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from tests import jobs
from tests.test_recovery import TRAIN
from tests.test_shared_files import LETHAL_POINT

# Rank 0 dies right after the POINT-th of the things that it does to files at step 40.
CREATING = TRAIN.replace(
    "losses, step, epoch = [], 0, 0\n",
    LETHAL_POINT
    + """
import json
(out / "runs").mkdir(exist_ok=True)
def save():
    global points
    points = 0
    version = len([n for n in os.listdir(out / "runs") if n.startswith("version_")])
    new = out / "runs" / f"version_{version}"
    while new.exists():
        version += 1
        new = new.with_name(f"version_{version}")
    os.makedirs(new)
    point()
    assert new.is_dir() and not (new / "losses.json").exists()
    with open(new / "losses.json", "w") as file: json.dump(losses, file)
    point()
    number = 0
    while os.path.exists(out / f"best-{number}.pt"): number += 1
    torch.save(model.module.state_dict(), out / "best.tmp")
    os.replace(out / "best.tmp", out / f"best-{number}.pt")
    point()
    written = json.loads((new / "losses.json").read_text())
    losses.extend([float(version), float(number), float(len(written))])
    torch.load(out / f"best-{number}.pt", weights_only=True)
    point()
    count = out / "count.json"
    past = json.loads(count.read_text()) if count.exists() else []
    count.write_text(json.dumps([*past, step]) + PAD * " ")
    point()
""",
).replace(
    'tell("step", step=step)',
    'tell("step", step=step)\n        if RANK == 0 and step % 20 == 0: save()',
)


def run(folder: Path, point: int, body: str) -> tuple[jobs.Job, int]:
    with jobs.job(folder, body, "--nproc-per-node=2", args=["60"],
                  env={"OUT": str(folder), "POINT": str(point)}, forked=True,
                  recovery="in-place") as job:  # fmt: skip
        status = job.ended()
    return job, status


@pytest.mark.parametrize(
    "point", [pytest.param(p, marks=pytest.mark.slow if p != 5 else ()) for p in range(1, 6)]
)
def test_what_was_made_is_not_there_yet(tmp_path: Path, point: int) -> None:
    job, status = run(tmp_path, point, CREATING.replace("PAD", "1"))
    assert status == 0 and job.err.count("no step lost") == 2, job.describe()
    names = {p.name for p in (*tmp_path.iterdir(), *(tmp_path / "runs").iterdir())}
    made = {n for n in names if n.startswith(("version", "best"))}
    assert made == {f"version_{i}" for i in range(3)} | {f"best-{i}.pt" for i in range(3)}, names
    losses = torch.load(tmp_path / "rank0.pt", weights_only=True)["losses"]
    written = json.loads((tmp_path / "runs/version_1/losses.json").read_text())
    assert losses[: len(written) + 3] == [*written, 1.0, 1.0, float(len(written))]
    assert json.loads((tmp_path / "count.json").read_text()) == [20, 40, 60]


@pytest.mark.slow
def test_a_large_file_that_was_changed_is_not_read_again(tmp_path: Path) -> None:
    """It held something else the first time."""
    job, status = run(tmp_path, 5, CREATING.replace("PAD", "100_000"))
    assert status != 0, job.describe()
    assert re.search(r"cannot go on in place.*the script reads \S*/count\.json", job.err), job.err
