"""An epoch's permutation drawn by torch.randperm from the global generator, after dropout has drawn
from it. Argument: epochs of 10 steps (7)."""

import torch
from common import begin, leave, length, mse, net, shown
from torch.nn.parallel import DistributedDataParallel as DDP

rank, world = begin()
torch.manual_seed(3)
X, Y = torch.randn(120, 16), torch.randn(120, 1)
model = DDP(net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
torch.manual_seed(50 + rank)
mean, step, orders = torch.zeros(()), 0, []
for _ in range(length(7)):
    order = torch.randperm(len(X))
    orders.append(order[:3].tolist())
    for i in range(0, len(X), 12):
        index = order[i : i + 12]
        loss = mse(model(X[index]), Y[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean += loss.detach()
        step += 1
        shown(step)
leave(
    model=model.state_dict(), optimizer=optimizer.state_dict(), orders=orders, step=step,
    mean=mean.item(),
)  # fmt: skip
