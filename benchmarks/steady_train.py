"""The training script of ``recovery.py cost``: a loop in blocks of steps, each when it is told.

    steady_train.py FOLDER WIDTH ROWS STEPS BLOCKS

Each rank reads a byte from the pipe ``FOLDER/turn.RANK`` before a block and writes one to
``FOLDER/done.RANK`` after it, so that two jobs take turns on the same cores.
"""

import json
import os
import resource
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

out = sys.argv[1]
width, rows, steps, blocks = map(int, sys.argv[2:6])
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(
    nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
data = torch.randn(rows, width)
turn, done = (os.open(f"{out}/{name}.{dist.get_rank()}", os.O_RDWR) for name in ("turn", "done"))


def processor() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


medians, used = [], []
for _block in range(blocks + 1):  # the first one warms up
    os.read(turn, 1)
    times = []
    before = processor()
    for _step in range(steps):
        begin = time.monotonic()
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
        times.append(time.monotonic() - begin)
    used.append((processor() - before) / steps)
    medians.append(statistics.median(times))
    os.write(done, b"x")
runtime = sys.modules.get("flashrun.worker.runtime")
retained = 0.0
if runtime is not None and runtime._installed is not None:
    gradients = sum(p.numel() * p.element_size() for p in model.parameters())
    retained = runtime._installed.retention.peak / gradients
with open(f"{out}/steady.{dist.get_rank()}", "w") as file:
    json.dump({"step": medians[1:], "processor": used[1:], "retained": retained}, file)
dist.barrier()
dist.destroy_process_group()
