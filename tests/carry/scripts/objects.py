"""Seeds and folder names from rank 0; objects gathered and scattered on the way.
Argument: steps (60)."""

import json
import os
import random

import torch
import torch.distributed as dist
from common import batch, begin, guarded, leave, length, mse, net, shown
from torch.nn.parallel import DistributedDataParallel as DDP

rank, world = begin()
random.seed(77 if rank == 0 else None)
told = [{"seed": random.randrange(2**31), "folder": f"run-{random.randrange(10**6)}"}]
told = told if rank == 0 else [None]
dist.broadcast_object_list(told, src=0)
seed, folder = told[0]["seed"], told[0]["folder"]
if rank == 0:
    os.makedirs(folder)
dist.barrier()
model = DDP(net(seed))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
torch.manual_seed(seed + rank)
history = []
for step in range(length(60)):
    x, y = batch(step, rank)
    optimizer.zero_grad()
    loss = mse(model(x), y)
    loss.backward()
    optimizer.step()
    shown(step + 1)
    if step % 6 == 5:
        every = [None] * world
        mine = {"rank": rank, "loss": loss.item(), "draw": torch.rand(1).item()}
        with guarded():
            dist.all_gather_object(every, mine)
        history.append(every)
        collected = [None] * world if rank == 0 else None
        dist.gather_object((rank, step), collected, dst=0)
        if rank == 0:
            with open(f"{folder}/step{step}.json", "w") as file:
                json.dump([every, collected], file)
        share = [None]
        shares = [f"{step}/{r}" for r in range(world)] if rank == 0 else None
        with guarded():
            dist.scatter_object_list(share, shares)
        history.append(share)
leave(model=model.state_dict(), optimizer=optimizer.state_dict(), history=history, told=told)
