"""An EMA copy on rank 0 only."""

import copy

import torch
from common import batch, begin, leave, mse, net, shown
from torch.nn.parallel import DistributedDataParallel as DDP

rank, world = begin()
model = DDP(net())
ema = copy.deepcopy(model.module).requires_grad_(False) if rank == 0 else None
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
torch.manual_seed(rank)
history = []
for step in range(60):
    x, y = batch(step, rank)
    optimizer.zero_grad()
    loss = mse(model(x), y)
    loss.backward()
    optimizer.step()
    if ema is not None:
        with torch.no_grad():
            for mean, p in zip(ema.parameters(), model.module.parameters(), strict=True):
                mean.mul_(0.9).add_(p, alpha=0.1)
    history.append(loss.item())
    shown(step + 1)
leave(
    model=model.state_dict(), optimizer=optimizer.state_dict(), ema=ema.state_dict() if ema else {},
    history=history, step=step,
)  # fmt: skip
