"""EMA copies on all ranks: by hand, and torch's AveragedModel. Argument: steps (60)."""

import copy

import torch
from common import batch, begin, leave, length, mse, net, shown
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

rank, world = begin()
model = DDP(net())
ema = copy.deepcopy(model.module).requires_grad_(False)
averaged = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.95))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
torch.manual_seed(rank)
history = []
for step in range(length(60)):
    x, y = batch(step, rank)
    optimizer.zero_grad()
    mse(model(x), y).backward()
    optimizer.step()
    with torch.no_grad():
        for mean, p in zip(ema.parameters(), model.module.parameters(), strict=True):
            mean.mul_(0.9).add_(p, alpha=0.1)
    averaged.update_parameters(model.module)
    if step % 10 == 9:
        ema.eval()
        with torch.no_grad():
            history.append(mse(ema(x), y).item())
    shown(step + 1)
leave(
    model=model.state_dict(), optimizer=optimizer.state_dict(), ema=ema.state_dict(),
    averaged=averaged.state_dict(), history=history,
)  # fmt: skip
