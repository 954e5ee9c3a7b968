# ruff: noqa: B007
"""The same with two workers (persistent ones, unless ``REPLAY_WORKERS`` says otherwise), batch
fetched one ahead."""
import os
import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

if True:
    torch.manual_seed(9)
random.seed(9)
np.random.seed(9)


class Pictures(Dataset):
    def __init__(self):
        self.data = torch.randn(60, 4)

    def __len__(self):
        return 60

    def __getitem__(self, i):
        x = self.data[i] + 0.1 * torch.randn(4)
        if random.random() < 0.5:
            x = x.flip(0)
        return x, 1.0


which = os.environ.get("REPLAY_WORKERS", "persistent")
if which == "stateful":
    from torchdata.stateful_dataloader import StatefulDataLoader as DataLoader
loader = DataLoader(
    Pictures(), batch_size=7, shuffle=True, num_workers=2, persistent_workers=which == "persistent"
)
model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.1), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters())
kept = []
seen = 0
for epoch in range(6):
    for x, y in loader:
        noise = random.gauss(0, 1)
        optimizer.zero_grad()
        loss = (model(x).squeeze(1) - y.float()).pow(2).mean() * (1 + 0.01 * noise)
        loss.backward()
        optimizer.step()
        seen += len(x)
        if seen % 5 == 0:
            kept.append((x, y))  # batches that live on
at_end()  # noqa: F821  (given by the driver)
