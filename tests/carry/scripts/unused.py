"""find_unused_parameters: each step uses one of two branches, drawn alike on all ranks.
Argument: steps (60)."""

import random

import torch
from common import batch, begin, leave, length, mse, net, shown
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

rank, world = begin()


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = net(1), net(2)

    def forward(self, x, which):
        return self.one(x) if which else self.two(x)


model = DDP(Two(), find_unused_parameters=True)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
torch.manual_seed(rank)
random.seed(1)
history = []
for step in range(length(60)):
    x, y = batch(step, rank)
    optimizer.zero_grad()
    loss = mse(model(x, random.random() < 0.5), y)
    loss.backward()
    optimizer.step()
    history.append(loss.item())
    shown(step + 1)
leave(
    model=model.state_dict(), optimizer=optimizer.state_dict(), history=history,
    step=step,
)  # fmt: skip
