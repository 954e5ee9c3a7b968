"""What differs between ranks without any effect on the result. Arguments: what, steps.

layers   gradients are ready in another order on rank 1 (DDP gives rank 0's buckets to all)
line     rank 1 steps in another line
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

what, steps = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(7)


class Heads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(3))

    def forward(self, x, order):
        for i in order:
            x = self.heads[i](x)
        return x


model = DistributedDataParallel(Heads())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
order = [0, 2, 1] if rank == 1 and what == "layers" else [0, 1, 2]
for step in range(steps):
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step * 100 + rank))
    optimizer.zero_grad()
    model(x, order).square().mean().backward()
    if rank == 1 and what == "line":
        optimizer.step()
    else:
        optimizer.step()
torch.save(model.state_dict(), os.path.join(os.environ["OUT"], f"rank{rank}.pt"))
dist.destroy_process_group()
