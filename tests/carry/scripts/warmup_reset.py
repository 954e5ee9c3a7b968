"""A warm-up takes optimizer steps; then model and optimizer are reset and the run begins."""

import copy

import torch
from common import batch, begin, leave, mse, net, shown
from torch.nn.parallel import DistributedDataParallel as DDP

rank, world = begin()
model = DDP(net())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
torch.manual_seed(rank)


def train(number):
    x, y = batch(number, rank)
    optimizer.zero_grad()
    loss = mse(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


first, first_optimizer = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
for step in range(12):
    train(step)
    shown(step + 1, "warm-up")
model.load_state_dict(first)
optimizer.load_state_dict(first_optimizer)
history = []
for step in range(50):
    history.append(train(step))
    shown(step + 13)
leave(model=model.state_dict(), optimizer=optimizer.state_dict(), history=history)
