"""Early stopping on an all-reduced metric, with ReduceLROnPlateau and best-so-far.
Argument: epochs of 6 steps, none too bad to go on (60, stopped after 6 bad ones)."""

import torch
import torch.distributed as dist
from common import begin, leave, length, mse, net, shown
from torch.nn.parallel import DistributedDataParallel as DDP

rank, world = begin()
torch.manual_seed(11)
X, Y = torch.randn(world, 48, 16)[rank], torch.randn(world, 48, 1)[rank]
VX, VY = torch.randn(world, 32, 16)[rank], torch.randn(world, 32, 1)[rank]
model = DDP(net(width=48))
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.5)
torch.manual_seed(rank)
epochs, patience = length(60), length(6)
best, best_epoch, bad, history, step = float("inf"), -1, 0, [], 0
for epoch in range(epochs):
    model.train()
    for i in range(0, 48, 8):
        optimizer.zero_grad()
        loss = mse(model(X[i : i + 8]), Y[i : i + 8])
        loss.backward()
        optimizer.step()
        step += 1
        shown(step)
    model.eval()
    with torch.no_grad():
        metric = mse(model.module(VX), VY)
    dist.all_reduce(metric)
    metric = metric.item() / world
    plateau.step(metric)
    history.append((epoch, metric, optimizer.param_groups[0]["lr"]))
    if metric < best:
        best, best_epoch, bad = metric, epoch, 0
    else:
        bad += 1
        if bad >= patience:
            break
leave(
    model=model.state_dict(), optimizer=optimizer.state_dict(), plateau=plateau.state_dict(),
    history=history, best=(best, best_epoch), step=step,
)  # fmt: skip
