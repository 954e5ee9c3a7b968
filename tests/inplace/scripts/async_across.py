"""A metric that is all-reduced while the optimizer steps, read a step later. Arguments: steps."""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank = dist.get_rank()
torch.manual_seed(7)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
metrics = []
work = None
for step in range(int(sys.argv[1])):
    generator = torch.Generator().manual_seed(step * 10 + rank)
    optimizer.zero_grad()
    model(torch.randn(8, 4, generator=generator)).pow(2).mean().backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    if work is not None:
        work.wait()
        metrics.append(metric.tolist())  # noqa: F821
    metric = torch.full((3,), float(rank + step))
    work = dist.all_reduce(metric, async_op=True)
    optimizer.step()
work.wait()
metrics.append(metric.tolist())
result = {"model": model.state_dict(), "metrics": metrics}
torch.save(result, os.path.join(os.environ["OUT"], f"rank{rank}.pt"))
dist.destroy_process_group()
