"""Ways in which DDP's reductions come about in backward. Arguments: way, steps."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

way, steps = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
rank = dist.get_rank()


class Net(nn.Module):
    """The first layers, whose gradients come last, may be checkpointed (backward in backward)."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
        self.head = nn.Linear(64, 8)
        self.unused = nn.Linear(64, 8)

    def forward(self, x):
        if way in ("reentrant", "checkpoint"):
            x = checkpoint(self.body, x, use_reentrant=way == "reentrant")
        else:
            x = self.body(x)
        return self.head(x) + (self.unused(x) if rank == 5 or way != "unused" else 0)


torch.manual_seed(3)
model = DDP(
    Net(),
    bucket_cap_mb=0.01,  # several
    static_graph=way in ("static", "reentrant", "checkpoint"),
    find_unused_parameters=way == "unused",
    gradient_as_bucket_view=way == "view",
)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
norms = []
for step in range(steps):
    torch.manual_seed(100 * step + rank)
    x = torch.randn(4, 64, requires_grad=True)
    optimizer.zero_grad()
    if way == "accumulated" and step % 2:
        with model.no_sync():
            model(torch.randn(4, 64)).square().mean().backward()
    model(x).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if way == "later":
        optimizer.step()
    norms.append(norm.item())
    if way != "later":
        optimizer.step()
saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "norms": norms}
torch.save(saved, os.path.join(os.environ["OUT"], f"rank{rank}.pt"))
dist.destroy_process_group()
