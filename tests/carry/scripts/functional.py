"""Gradients averaged by functional collectives. Argument: steps (60)."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from common import batch, begin, leave, length, mse, net, shown

rank, world = begin()
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
torch.manual_seed(rank)
history = []
for step in range(length(60)):
    x, y = batch(step, rank)
    optimizer.zero_grad()
    loss = mse(model(x), y)
    loss.backward()
    for p in model.parameters():
        p.grad = funcol.all_reduce(p.grad, "sum", dist.group.WORLD) / world
    every = funcol.all_gather_tensor(loss.detach().reshape(1), 0, dist.group.WORLD)
    history.append(every.tolist())
    optimizer.step()
    shown(step + 1)
leave(model=model.state_dict(), optimizer=optimizer.state_dict(), history=history)
