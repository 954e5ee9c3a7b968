"""A thread reads metrics and the loop goes on with what it found. Argument: steps (40)."""

import queue
import threading

import torch
from common import batch, begin, leave, length, mse, net, shown
from torch.nn.parallel import DistributedDataParallel as DDP

rank, world = begin()
asked, found = queue.Queue(), []


def read():
    for value in iter(asked.get, None):
        found.append(value.item())
        asked.task_done()


thread = threading.Thread(target=read, daemon=True)
thread.start()
model = DDP(net())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
torch.manual_seed(rank)
for step in range(length(40)):
    x, y = batch(step, rank)
    optimizer.zero_grad()
    mse(model(x), y).backward()
    optimizer.step()
    with torch.no_grad():
        asked.put(sum(p.norm() for p in model.parameters()))
    asked.join()
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 / (1 + found[-1])
    shown(step + 1)
asked.put(None)
thread.join()
leave(model=model.state_dict(), optimizer=optimizer.state_dict(), found=found)
