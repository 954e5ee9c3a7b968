"""What the scripts of this folder share, as one user's scripts would: how they begin, the line they
print for a step, and what they leave at the end."""

import os
import sys
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

RANK = int(os.environ.get("RANK", "0"))


def begin():
    """Form the group and give (rank, world size)."""
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def length(default):
    """How long to train: the first argument."""
    return int(sys.argv[1]) if len(sys.argv) > 1 else default


def shown(step, text=""):
    """Say where this rank is."""
    print(f"rank {RANK} step {step} {text}\n", end="", flush=True)


@contextmanager
def guarded():
    """A script's own handler: whatever is raised in the block goes into a file."""
    try:
        yield
    except BaseException as error:
        with open(f"raised{RANK}.txt", "a") as file:
            file.write(f"{error!r}\n")
        raise


def leave(**results):
    """The rank's results, with its random state."""
    results["random"] = torch.get_rng_state()
    torch.save(results, f"rank{RANK}.pt")
    print(f"rank {RANK} saved\n", end="", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()
    print(f"rank {RANK} done\n", end="", flush=True)


def net(seed=7, width=32, out=1):
    """A small model with dropout, the same on every rank."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(16, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, out),
    )  # fmt: skip


def batch(number, rank, rows=8):
    """The batch of that number for that rank, from a generator of its own."""
    generator = torch.Generator().manual_seed(number * 1000 + rank)
    x = torch.randn(rows, 16, generator=generator)
    return x, x.sin().sum(1, keepdim=True)


mse = nn.functional.mse_loss
