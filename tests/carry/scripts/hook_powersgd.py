"""DDP with PowerSGD, whose error memory differs between ranks."""

import torch
from common import batch, begin, leave, mse, net, shown
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.nn.parallel import DistributedDataParallel as DDP

rank, world = begin()
model = DDP(net())
state = powersgd.PowerSGDState(
    None, matrix_approximation_rank=1, start_powerSGD_iter=5, min_compression_rate=0.5
)
model.register_comm_hook(state, powersgd.powerSGD_hook)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
torch.manual_seed(rank)
history = []
for step in range(60):
    x, y = batch(step, rank)
    optimizer.zero_grad()
    loss = mse(model(x), y)
    loss.backward()
    optimizer.step()
    history.append(loss.item())
    shown(step + 1)
leave(
    model=model.state_dict(), optimizer=optimizer.state_dict(), iterations=state.iter,
    history=history, step=step,
)  # fmt: skip
