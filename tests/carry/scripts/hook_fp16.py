"""DDP with the fp16 communication hook. It reads no value of a tensor, on purpose.
Argument: steps (60)."""

import torch
from common import batch, begin, leave, length, mse, net, shown
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

rank, world = begin()
model = DDP(net())
model.register_comm_hook(None, default_hooks.fp16_compress_hook)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
torch.manual_seed(rank)
for step in range(length(60)):
    x, y = batch(step, rank)
    optimizer.zero_grad()
    mse(model(x), y).backward()
    optimizer.step()
    shown(step + 1)
leave(model=model.state_dict(), optimizer=optimizer.state_dict(), step=step)
