"""Local SGD: replicas differ on purpose between averagings."""

import torch
import torch.distributed as dist
from common import batch, begin, leave, mse, net, shown

rank, world = begin()
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
torch.manual_seed(rank)
history = []
for step in range(60):
    x, y = batch(step, rank)
    optimizer.zero_grad()
    loss = mse(model(x), y)
    loss.backward()
    optimizer.step()
    if step % 4 == 3:
        for p in model.parameters():
            dist.all_reduce(p.data)
            p.data /= world
    history.append(loss.item())
    shown(step + 1)
leave(
    model=model.state_dict(), optimizer=optimizer.state_dict(), history=history,
    step=step,
)  # fmt: skip
