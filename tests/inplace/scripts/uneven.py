"""DDP under Join, each rank with its own number of batches. Arguments: kind, batches of each rank
in an epoch (with commas), epochs."""

import contextlib
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

kind = sys.argv[1]
counts = [int(count) for count in sys.argv[2].split(",")]
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(7)
middle = nn.BatchNorm1d(8) if kind == "norm" else nn.ReLU()
model = DDP(nn.Sequential(nn.Linear(4, 8), middle, nn.Dropout(0.2), nn.Linear(8, 1)),
            find_unused_parameters=kind == "unused")  # fmt: skip
parameters = list(model.parameters())
if kind == "zero":
    from torch.distributed.optim import ZeroRedundancyOptimizer

    optimizers = [ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.05)]
elif kind == "two":
    optimizers = [torch.optim.SGD([p], lr=0.05) for p in parameters[:2]]
else:
    optimizers = [(torch.optim.Adam if kind == "adam" else torch.optim.SGD)(parameters, lr=0.05)]
every = 2 if kind in ("accumulate", "no_sync") else 1
torch.manual_seed(rank)
history = []


def block():
    if kind == "zero":
        return Join([model, *optimizers])
    return model.join(divide_by_initial_world_size=kind != "active",
                      throw_on_early_termination=kind == "throw")  # fmt: skip


def train(epoch):
    with block():
        for i in range(counts[rank]):
            g = torch.Generator().manual_seed(epoch * 1000 + i * 10 + rank)
            x = torch.randn(6, 4, generator=g)
            steps = (i + 1) % every == 0
            with contextlib.nullcontext() if steps or kind != "no_sync" else model.no_sync():
                loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
                loss.backward()
            if steps:
                for optimizer in optimizers:
                    optimizer.step()
                for optimizer in optimizers:
                    optimizer.zero_grad()
            history.append(loss.item())


for epoch in range(int(sys.argv[3])):
    if kind == "throw":
        try:
            train(epoch)
        except RuntimeError as error:
            history.append(str(error))
    else:
        train(epoch)
    total = sum(p.detach().double().sum() for p in parameters)
    dist.all_reduce(total)
    history.append(total.item())

out = {"model": model.state_dict(), "history": history, "random": torch.get_rng_state()}
if kind != "zero":
    out["optimizers"] = [optimizer.state_dict() for optimizer in optimizers]
torch.save(out, f"{os.environ['OUT']}/rank{rank}.pt")
