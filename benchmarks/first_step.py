"""The training script of launch.py: tells when its first optimizer step is done, then goes on."""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

out, steps = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
torch.manual_seed(0)
width = 256
layers = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
model = DistributedDataParallel(layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.randn(64, width)
times = []
for _ in range(steps):
    begin = time.monotonic()
    optimizer.zero_grad()
    model(data).square().mean().backward()
    optimizer.step()
    end = time.monotonic()
    if not times:
        with open(os.path.join(out, f"first.{dist.get_rank()}"), "w") as file:
            file.write(str(time.time()))
    times.append(end - begin)
if steps > 1:
    with open(os.path.join(out, f"steps.{dist.get_rank()}"), "w") as file:
        file.write(" ".join(f"{t:.9f}" for t in times[10:]))
dist.barrier()  # one that leaves at once can break the group of one that is still on its way
if len(sys.argv) > 3:  # stay until told to go, so that the memory of the tree can be read
    while not os.path.exists(sys.argv[3]):
        time.sleep(0.05)
dist.destroy_process_group()
