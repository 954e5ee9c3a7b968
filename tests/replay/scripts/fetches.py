"""A map-style dataset that counts, outside of itself, what is read of it."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(9)
fetched = 0


class Rows(Dataset):
    def __init__(self):
        self.data = torch.randn(60, 4)

    def __len__(self):
        return 60

    def __getitem__(self, i):
        global fetched
        fetched += 1
        return self.data[i]


loader = DataLoader(Rows(), batch_size=6, shuffle=True)
model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.1), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters())
for _ in range(6):
    for x in loader:
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
print("fetched", fetched)
at_end()  # noqa: F821  (given by the driver)
