"""Gradients averaged by plain all-reduces, without DDP; weights broadcast at the beginning.
Argument: steps (60)."""

import torch
import torch.distributed as dist
from common import batch, begin, leave, length, mse, net, shown

rank, world = begin()
model = net(seed=rank)
for p in model.parameters():
    dist.broadcast(p.data, 0)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
history = []
torch.manual_seed(rank)
for step in range(length(60)):
    x, y = batch(step, rank)
    optimizer.zero_grad()
    loss = mse(model(x), y)
    loss.backward()
    works = [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]
    for work, p in zip(works, model.parameters(), strict=True):
        work.wait()
        p.grad /= world
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    history.append(mean.item() / world)
    optimizer.step()
    shown(step + 1)
leave(model=model.state_dict(), optimizer=optimizer.state_dict(), history=history)
