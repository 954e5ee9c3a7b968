# ruff: noqa: B007
"""An iterable dataset that draws, with a last short batch, with or without a worker process."""
import os
import random

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

torch.manual_seed(10)
random.seed(10)


class Stream(IterableDataset):
    def __init__(self):
        self.epoch = 0

    def __iter__(self):
        self.epoch += 1
        state = torch.zeros(3)
        for i in range(25):
            state = 0.5 * state + torch.randn(3)
            if random.random() < 0.9:
                yield {"x": state, "n": i}


stream = Stream()
loader = DataLoader(stream, batch_size=4, num_workers=int(os.environ.get("REPLAY_WORKERS", "0")))
model = nn.Sequential(nn.Linear(3, 16), nn.Dropout(0.1), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
counts = []
for epoch in range(8):
    n = 0
    for batch in loader:
        optimizer.zero_grad()
        model(batch["x"]).pow(2).mean().backward()
        optimizer.step()
        n += int(batch["n"].sum())
    counts.append(n)
at_end()  # noqa: F821  (given by the driver)
