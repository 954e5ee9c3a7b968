"""DDP whose gradients are one bucket that is too large to be copied as a result. Arguments:
steps."""

import os
import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, 256))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
torch.manual_seed(rank)
for _ in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.randn(2, 256)).square().mean().backward()
    optimizer.step()
saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
torch.save(saved, os.path.join(os.environ["OUT"], f"rank{rank}.pt"))
dist.destroy_process_group()
