"""An iterable dataset that draws, with a short last batch.
Argument: epochs of about 7 steps (9)."""

import random

import torch
from common import begin, leave, length, mse, net, shown
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

rank, world = begin()


class Stream(IterableDataset):
    def __init__(self):
        self.epoch = 0

    def __iter__(self):
        self.epoch += 1
        state = torch.zeros(16)
        for i in range(30):
            state = 0.5 * state + torch.randn(16)
            if random.random() < 0.9 or i < 24:
                yield {"x": state, "y": state.sum().reshape(1), "n": i}


stream = Stream()
loader = DataLoader(stream, batch_size=4)
model = DDP(net())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
torch.manual_seed(rank)
random.seed(5)  # the same number of batches everywhere
counts, history, step = [], [], 0
for _ in range(length(9)):
    n = 0
    for x in loader:
        optimizer.zero_grad()
        loss = mse(model(x["x"]), x["y"])
        loss.backward()
        optimizer.step()
        n += int(x["n"].sum())
        step += 1
        history.append(loss.item())
        shown(step)
    counts.append((stream.epoch, n))
leave(
    model=model.state_dict(), optimizer=optimizer.state_dict(), counts=counts, history=history,
    step=step,
)  # fmt: skip
