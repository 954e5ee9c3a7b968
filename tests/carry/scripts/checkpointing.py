"""Activation checkpointing under DDP with static_graph. Argument: steps (60)."""

import torch
from common import batch, begin, leave, length, mse, net, shown
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

rank, world = begin()


class Checked(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = net(out=16), nn.Linear(16, 1)

    def forward(self, x):
        return self.head(checkpoint(self.body, x, use_reentrant=False))


model = DDP(Checked(), static_graph=True)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
torch.manual_seed(rank)
history = []
for step in range(length(60)):
    x, y = batch(step, rank)
    optimizer.zero_grad()
    loss = mse(model(x), y)
    loss.backward()
    optimizer.step()
    history.append(loss.item())
    shown(step + 1)
leave(
    model=model.state_dict(), optimizer=optimizer.state_dict(), history=history,
    step=step,
)  # fmt: skip
