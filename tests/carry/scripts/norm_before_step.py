"""The gradients' norm or the loss is read between backward and the step, where rank 1 is killed
once. Argument: what is read: norm, loss, scale, objects (the norm, after objects were gathered)."""

import os
import signal
import sys

import torch
import torch.distributed as dist
from common import batch, begin, leave, mse, net, shown
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

what = sys.argv[1]
# Told apart from its replacement by what the launcher gives; only so that the strike has its place.
strikes = os.environ.get("FLASHRUN_INCARNATION") == "0" and os.environ["RANK"] == "1"
rank, world = begin()
model = DDP(net())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5)
torch.manual_seed(rank)
history = []
for step in range(40):
    x, y = batch(step, rank)
    optimizer.zero_grad()
    if what == "objects":
        named = [None] * world
        dist.all_gather_object(named, {"rank": rank, "step": step})
        history.append(named)
    loss = mse(model(x), y)
    (scaler.scale(loss) if what == "scale" else loss).backward()
    if strikes and step == 20:
        os.kill(os.getpid(), signal.SIGKILL)
    if what in ("norm", "objects"):
        history.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
    elif what == "loss":
        history.append(loss.item())
    if what == "scale":
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        history.append(scaler.get_scale())
    else:
        optimizer.step()
    shown(step + 1)
leave(model=model.state_dict(), optimizer=optimizer.state_dict(), history=history)
