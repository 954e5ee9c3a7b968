# ruff: noqa: B007
"""Two optimizers in turn."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(12)
loader = DataLoader(TensorDataset(torch.randn(48, 4)), batch_size=8, shuffle=True)
G = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 4))
D = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(), nn.Dropout(0.3), nn.Linear(16, 1))
opt_g = torch.optim.Adam(G.parameters(), lr=1e-3)
opt_d = torch.optim.Adam(D.parameters(), lr=1e-3)
bce = nn.BCEWithLogitsLoss()
history = []
for epoch in range(5):
    for (real,) in loader:
        one, zero = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        fake = G(torch.randn(len(real), 2))
        opt_d.zero_grad()
        loss_d = bce(D(real), one) + bce(D(fake.detach()), zero)
        loss_d.backward()
        opt_d.step()
        opt_g.zero_grad()
        loss_g = bce(D(fake), one)
        loss_g.backward()
        opt_g.step()
        history.append((loss_d.item(), loss_g.item()))
at_end()  # noqa: F821  (given by the driver)
