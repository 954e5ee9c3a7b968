"""One rank prepares files for all, in the job in which they are read; then a rank is lost. It is
replaced in place, and its script finds what the lost one has found, at each look."""

from __future__ import annotations

import os
import random
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests import jobs
from tests.test_recovery import TRAIN
from tests.test_recovery_nodes import STEPS as NODE_STEPS
from tests.test_recovery_nodes import Start, results, start

__all__ = ["start"]  # the fixture

# How often a rank polls is its own: it draws from a generator, which the replay compares.
PREPARING = """
import json, pathlib, time
import numpy as np
out, maker = pathlib.Path(os.environ["OUT"]) / "data", int(os.environ["MAKER"])
ready, meta = out / "ready", str(out / "meta.json")
dist.barrier()
found = [float(out.exists())]
dist.barrier()
if RANK == maker:
    out.mkdir()
    generator = torch.Generator().manual_seed(5)
    np.save(out / "x.npy", torch.randn(96, 8, generator=generator).numpy())
    torch.save(torch.randn(96, 1, generator=generator), out / "y.pt")
    for shard in range(3):
        (out / "shards" / f"{shard}").mkdir(parents=True)
        (out / "shards" / f"{shard}" / "part").write_text("a" * shard)
    time.sleep(0.05)
    ready.touch()
while not ready.exists():
    np.random.rand()
    time.sleep(0.002)
dist.barrier()
os.makedirs(out / "shards", exist_ok=True)
os.makedirs(out / f"own-{RANK}", exist_ok=True)
found += [os.path.getsize(out / "x.npy"), len(os.listdir(out / "shards"))]
found += [p.stat().st_size for p in sorted((out / "shards").glob("*/part"))]
try:
    (out / "first").touch(exist_ok=False)
    first = 1.0
except FileExistsError:
    first = 0.0
np.random.seed(int(first) + 3)
for number in range(3):
    if RANK == maker:
        with open(meta, "w") as file: json.dump({"number": number, "pad": "-" * 9 * number}, file)
    dist.barrier()
    with open(meta) as file: found.append(float(json.load(file)["number"]))
    found.append(os.path.getsize(meta))
    dist.barrier()
if RANK == maker:
    os.unlink(ready)
dist.barrier()
found.append(float(ready.exists()))
x = torch.from_numpy(np.load(out / "x.npy", mmap_mode="r" if RANK else None).copy())
y = torch.load(out / "y.pt", weights_only=True, mmap=True if RANK else None)
def status():
    if RANK == maker:
        with open(out / "new", "w") as file: file.write(f"{step}")
        os.replace(out / "new", out / f"step-{step}")
        if step > 20: os.unlink(out / f"step-{step - 20}")
        (out / "status").write_text(f"{step}")
    dist.barrier()
    losses.extend([float((out / "status").read_text()), len(os.listdir(out))])
    losses.append(float((out / f"step-{step}").read_text()))
    losses.append(float((out / f"step-{step - 20}").exists()))
    dist.barrier()
"""
BODY = (
    TRAIN.replace("torch.manual_seed(7)\n", f"{PREPARING}torch.manual_seed(7)\n", 1)
    .replace("TensorDataset(torch.randn(96, 8), torch.randn(96, 1))", "TensorDataset(x, y)")
    .replace("losses, step, epoch = [], 0, 0\n", "losses, step, epoch = [*found], 0, 0\n")
    .replace('tell("step", step=step)', "if step % 10 == 0: status()\n" + 8 * " "
             + 'tell("step", step=step)')
)  # fmt: skip
STEPS = 60


def run(folder: Path, maker: int, *kills: tuple[int, int], body: str = BODY, **options: Any) -> Any:
    """Kill ranks at steps; gives the results and what was said."""
    out = folder / "out"
    out.mkdir(parents=True)
    ranks, steps = options.pop("ranks", 2), options.pop("steps", STEPS)
    with jobs.job(folder, body, f"--nproc-per-node={ranks}", args=[str(steps)],
                  env={"OUT": str(out), "MAKER": str(maker)}, forked=True,
                  **{"recovery": "in-place", **options}) as job:  # fmt: skip
        for step, rank in kills:
            job.await_told("step", step=step, rank=rank)
            os.kill(job.told("step", rank=rank)[-1]["pid"], signal.SIGKILL)
        assert job.ended() == 0, job.describe()
    return results(out, ranks), job.err


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    found, _ = run(tmp_path_factory.mktemp("wanted"), 0, recovery="off")
    return dict(found)


@pytest.mark.parametrize("maker", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_prepared_by_one_rank(tmp_path: Path, wanted: dict[str, str], maker: int) -> None:
    """The others are lost, then the rank itself, then another one again."""
    found, told = run(tmp_path, maker, (15, 1 - maker), (33, maker), (41, 1 - maker))
    assert told.count("no step lost") == 4, told
    assert found == wanted, told


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 4))
def test_at_random_moments(tmp_path: Path, wanted: dict[str, str], seed: int) -> None:
    print(f"seed {seed}")
    draw = random.Random(seed)
    kills = [(step, draw.randrange(2)) for step in sorted(draw.sample(range(3, STEPS - 3), 5))]
    found, told = run(tmp_path, 0, *kills)
    assert "cannot go on in place" not in told, told
    assert found == wanted, told


# What a loader's processes read was prepared as well.
FETCHING = BODY.replace(
    "TensorDataset(x, y)",
    """Rows()
""",
).replace(
    "def status():",
    """targets = y
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 96
    def __getitem__(self, i):
        return torch.from_numpy(np.load(out / "rows" / f"{i}.npy")), targets[i]
if RANK == maker:
    (out / "rows").mkdir()
    for i in range(96): np.save(out / "rows" / f"{i}.npy", x[i].numpy())
    time.sleep(0.1)
dist.barrier()
def status():""",
).replace("batch_size=4,", "batch_size=4, num_workers=WORKERS, persistent_workers=WORKERS > 0,")


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_fetched(tmp_path: Path, workers: int) -> None:
    body = FETCHING.replace("WORKERS", str(workers))
    wanted, _ = run(tmp_path / "w", 0, body=body, recovery="off")
    found, told = run(tmp_path / "t", 0, (15, 1), (33, 0), body=body)
    assert told.count("no step lost") == 3, told
    assert found == wanted, told


# A large file that all read is written anew after that.
REWRITTEN = BODY.replace(
    'y = torch.load(out / "y.pt"',
    """table = np.load(out / "x.npy")
dist.barrier()
if RANK == maker: np.save(out / "big.npy", np.zeros(20_000))
dist.barrier()
found.append(float(np.load(out / "big.npy").sum()))
dist.barrier()
if RANK == maker: np.save(out / "big.npy", np.ones(20_000))
dist.barrier()
y = torch.load(out / "y.pt\"""",
)


@pytest.mark.slow
def test_what_is_not_kept_restarts_all(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with jobs.job(tmp_path, REWRITTEN, "--nproc-per-node=2", args=[str(STEPS)],
                  env={"OUT": str(out), "MAKER": "0"}, forked=True,
                  recovery="in-place") as job:  # fmt: skip
        job.await_told("step", step=15, rank=1)
        os.kill(job.told("step", rank=1)[-1]["pid"], signal.SIGKILL)
        assert job.ended() != 0
    assert re.search(r"cannot go on in place.*big\.npy, which was made or changed.*not kept",
                     job.err), job.err  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("maker", [0, 3])
def test_several_nodes(start: Start, tmp_path: Path, maker: int) -> None:
    """Prepared on the same node, and on another one."""
    wanted, _ = run(tmp_path / "wanted", maker, ranks=4, steps=NODE_STEPS, recovery="off")
    with start(2, body=BODY, env={"MAKER": str(maker)}) as nodes:
        nodes.await_step(15, 3)
        nodes.kill(3)
        nodes.await_step(33, 0)
        nodes.kill(0, 2)
        nodes.ended()
    assert results(nodes.out, 4) == wanted, nodes.describe()
    assert "cannot go on in place" not in nodes.describe()
