"""In-place recovery with CUDA: ranks that share a card over gloo, and one rank per card over NCCL.

The survivors keep their processes and their contexts: NVML lists the same processes on the device
before and after. Weights, optimizer state, losses and random states are compared bit for bit, with
dropout drawn on the device. Skipped where there is no card, or only one.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.jobs import Job, job
from tests.test_recovery import digest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STEPS, AT = 120, 60
ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # deterministic kernels

TRAIN = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

backend, steps = sys.argv[1], int(sys.argv[2])
torch.use_deterministic_algorithms(True)
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) if backend == "nccl" else 0)
torch.cuda.set_device(device)
dist.init_process_group(backend)
torch.manual_seed(7)
model = DistributedDataParallel(torch.nn.Sequential(
    torch.nn.Linear(16, 256), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(256, 4),
).to(device))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
torch.manual_seed(100 + RANK)  # also the device's generator: dropout differs between ranks
losses, norms = [], []
for step in range(steps):
    x = torch.randn(8, 16).to(device)
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
    optimizer.step()
    losses.append(loss.item())
    tell("step", step=step + 1)
torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(),
            "losses": losses, "norms": norms, "random": torch.get_rng_state(),
            "device": torch.cuda.get_rng_state(device)}, f"{os.environ['OUT']}/rank{RANK}.pt")
dist.destroy_process_group()
"""


def on_the_devices() -> set[int]:
    """Processes that hold a context, by NVML (as this namespace numbers them)."""
    pynvml = pytest.importorskip("pynvml", reason="needs the extra gpu (nvidia-ml-py)")
    pynvml.nvmlInit()
    try:
        return {
            process.pid
            for index in range(pynvml.nvmlDeviceGetCount())
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(
                pynvml.nvmlDeviceGetHandleByIndex(index)
            )
        }
    finally:
        pynvml.nvmlShutdown()


def pid_of(running: Job, rank: int) -> int:
    return int([e for e in list(running.events) if e["rank"] == rank][-1]["pid"])


def results(out: Path, ranks: int) -> dict[str, str]:
    return {
        f"rank {rank}, {name}": digest(value)
        for rank in range(ranks)
        for name, value in torch.load(
            out / f"rank{rank}.pt", map_location="cpu", weights_only=True
        ).items()
    }


def train(folder: Path, name: str, backend: str, ranks: int, recovery: str) -> tuple[Any, Path]:
    out = folder / f"out-{name}"
    out.mkdir()
    running = job(
        folder, TRAIN, f"--nproc-per-node={ranks}", args=[backend, str(STEPS)],
        env={"OUT": str(out), **ENVIRONMENT}, name=name, recovery=recovery,
    )  # fmt: skip
    return running, out


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_the_survivors_keep_their_contexts(tmp_path: Path, backend: str, victim: int) -> None:
    ranks = 3 if backend == "gloo" else torch.cuda.device_count()
    if ranks < 2:
        pytest.skip("NCCL needs a card per rank, and there is one")
    started, undisturbed = train(tmp_path, "undisturbed", backend, ranks, "off")
    with started as running:
        assert running.ended() == 0, running.describe()
    started, out = train(tmp_path, "struck", backend, ranks, "in-place")
    with started as running:
        for rank in range(ranks):
            running.await_told("step", step=AT, rank=rank)
        before = {rank: pid_of(running, rank) for rank in range(ranks)}
        listed = on_the_devices()
        os.kill(before[victim], signal.SIGKILL)
        running.await_told("step", step=AT + 30, rank=victim)
        after = {rank: pid_of(running, rank) for rank in range(ranks)}
        survivors = {pid for rank, pid in before.items() if rank != victim}
        assert on_the_devices() & survivors == listed & survivors
        assert running.ended() == 0, running.describe()
    assert {r: p for r, p in after.items() if r != victim} == {
        r: p for r, p in before.items() if r != victim
    }
    assert after[victim] != before[victim]
    assert "no step lost" in running.err
    assert results(out, ranks) == results(undisturbed, ranks), running.err
