"""Early stopping with ReduceLROnPlateau, best-so-far and a history."""
import copy

import torch
from torch import nn

torch.manual_seed(11)
X, Y = torch.randn(64, 6), torch.randn(64, 1)
VX, VY = torch.randn(64, 6), torch.randn(64, 1)
model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.5)
best, bad, history = float("inf"), 0, []
for epoch in range(40):
    model.train()
    for i in range(0, 64, 16):
        optimizer.zero_grad()
        loss = ((model(X[i : i + 16]) - Y[i : i + 16]) ** 2).mean()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        val = nn.functional.mse_loss(model(VX), VY)
    plateau.step(val)
    history.append((epoch, val.item(), optimizer.param_groups[0]["lr"]))
    if val < best:
        best, bad = float(val), 0
        best_state = copy.deepcopy(model.state_dict())
    else:
        bad += 1
        if bad >= 5:
            break
del best_state
at_end()  # noqa: F821  (given by the driver)
