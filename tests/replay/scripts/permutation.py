# ruff: noqa: B007
"""An epoch's permutation from the global generator, after dropout has drawn from it."""
import torch
from torch import nn

torch.manual_seed(3)
X, Y = torch.randn(60, 5), torch.randn(60, 1)
model = nn.Sequential(nn.Linear(5, 40), nn.Dropout(0.5), nn.Linear(40, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
total = torch.zeros(())
for epoch in range(9):
    order = torch.randperm(len(X))
    for i in range(0, len(X), 10):
        index = order[i : i + 10]
        loss = nn.functional.mse_loss(model(X[index]), Y[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
at_end()  # noqa: F821  (given by the driver)
