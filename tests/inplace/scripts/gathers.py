"""An evaluation gathers much before the fourth step. Arguments: steps."""

import os
import sys

import torch
import torch.distributed as dist

from flashrun.worker import runtime

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
torch.manual_seed(rank)
found, held = 0.0, 0
for step in range(int(sys.argv[1])):
    if step == 3:
        for i in range(80):
            parts = [torch.empty(20_000) for _ in range(world)]
            dist.all_gather(parts, torch.full((20_000,), float(rank + i)))
            found += parts[-1][0].item()
            held = max(held, runtime._installed.retention.held)
    optimizer.zero_grad()
    model(torch.randn(2, 16)).square().mean().backward()
    optimizer.step()
saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "found": found}
torch.save({**saved, "held": held}, os.path.join(os.environ["OUT"], f"rank{rank}.pt"))
dist.destroy_process_group()
