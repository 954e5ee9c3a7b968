"""No optimizer: the update is written out, so there is no boundary. Argument: steps (30)."""

import torch
from common import batch, begin, leave, length, mse, net, shown
from torch.nn.parallel import DistributedDataParallel as DDP

rank, world = begin()
model = DDP(net())
momenta = [torch.zeros_like(p) for p in model.parameters()]
torch.manual_seed(rank)
history = []
for step in range(length(30)):
    x, y = batch(step, rank)
    model.zero_grad()
    loss = mse(model(x), y)
    loss.backward()
    with torch.no_grad():
        for p, momentum in zip(model.parameters(), momenta, strict=True):
            momentum.mul_(0.9).add_(p.grad)
            p.sub_(momentum, alpha=1e-2)
    history.append(loss.item())
    shown(step + 1)
leave(model=model.state_dict(), momenta=momenta, history=history)
