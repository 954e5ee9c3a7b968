"""A torch.compile'd model under DDP."""

import torch
from common import batch, begin, leave, mse, net, shown
from torch.nn.parallel import DistributedDataParallel as DDP

rank, world = begin()
model = DDP(net())
fast = torch.compile(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
torch.manual_seed(rank)
history = []
for step in range(60):
    x, y = batch(step, rank)
    optimizer.zero_grad()
    loss = mse(fast(x), y)
    loss.backward()
    optimizer.step()
    history.append(loss.item())
    shown(step + 1)
leave(model=model.state_dict(), optimizer=optimizer.state_dict(), history=history)
