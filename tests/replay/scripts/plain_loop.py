"""Dropout, Adam, a per-step scheduler, a DataLoader; a history of losses."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(7)
data = TensorDataset(torch.randn(100, 8), torch.randint(0, 3, (100,)))
loader = DataLoader(data, batch_size=16, shuffle=True)
model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 3))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
history = []
running = torch.zeros(())
step = 0
for epoch in range(8):
    correct = 0
    for x, y in loader:
        optimizer.zero_grad()
        out = model(x)
        loss = criterion(out, y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        running += loss.detach()
        correct += int((out.argmax(1) == y).sum())
        history.append(loss.item())
        step += 1
    if epoch % 2:
        history.append(float(running) / step)
at_end()  # noqa: F821  (given by the driver)
