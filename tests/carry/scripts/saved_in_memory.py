"""Checksums of weights that are saved into memory. Argument: steps (40)."""

import hashlib
import io

import torch
from common import batch, begin, leave, length, mse, net, shown
from torch.nn.parallel import DistributedDataParallel as DDP

rank, world = begin()
model = DDP(net())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
torch.manual_seed(rank)
history = []
for step in range(length(40)):
    x, y = batch(step, rank)
    optimizer.zero_grad()
    mse(model(x), y).backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save(model.module.state_dict(), file)
    history.append(hashlib.sha256(file.getvalue()).hexdigest())
    shown(step + 1)
leave(model=model.state_dict(), optimizer=optimizer.state_dict(), history=history)
