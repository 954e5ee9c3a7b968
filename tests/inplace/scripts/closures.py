"""Steps that evaluate a closure; the script reads its value after them. Arguments: way, rounds."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

way, rounds = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
model = DDP(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
if way.startswith("sgd") or way == "turns":
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
else:
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
torch.manual_seed(rank)
history = []
for _ in range(rounds):
    x = torch.randn(8, 4)

    def closure(x=x, optimizer=optimizer):
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        if "mean" in way:
            loss = loss.detach().clone()
            dist.all_reduce(loss)
            loss /= world
        return [loss, loss * 2] if "several" in way else loss

    if way == "turns" and len(history) == 2:
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    value = optimizer.step(closure)
    history.append([float(v) for v in value] if "several" in way else value.item())
saved = {
    "model": model.state_dict(), "optimizer": optimizer.state_dict(), "history": history,
}  # fmt: skip
torch.save(saved, os.path.join(os.environ["OUT"], f"rank{rank}.pt"))
dist.destroy_process_group()
