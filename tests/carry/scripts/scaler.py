"""GradScaler with skipped steps, and bf16 autocast. Argument: steps (70)."""

import torch
from common import begin, leave, length, mse, net, shown
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

rank, world = begin()
torch.manual_seed(8)
X, Y = torch.randn(world, 64, 16)[rank], torch.randn(world, 64, 1)[rank]
model = DDP(net())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, growth_interval=4)
torch.manual_seed(20 + rank)
scales, skipped = [], 0
for step in range(length(70)):
    index = torch.randint(64, (8,))
    x = X[index] * float("inf") if step % 9 == 4 else X[index]  # a bad batch now and then
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = mse(model(x), Y[index].bfloat16())
    scaler.scale(loss.float()).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    if scaler.get_scale() < before:
        skipped += 1
    else:
        scheduler.step()
    scales.append((before, float(norm)))
    shown(step + 1, f"scale {before:.0f}")
leave(
    model=model.state_dict(), optimizer=optimizer.state_dict(), scaler=scaler.state_dict(),
    scheduler=scheduler.state_dict(), scales=scales, skipped=skipped,
)  # fmt: skip
