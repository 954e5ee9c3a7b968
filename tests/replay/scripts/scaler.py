# ruff: noqa: B007
"""GradScaler with skipped steps, and bf16 autocast."""
import torch
from torch import nn

torch.manual_seed(8)
X, Y = torch.randn(32, 8), torch.randint(0, 4, (32,))
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=4)
scales, skipped = [], 0
for step in range(50):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(X), Y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    skipped += int(scaler.get_scale() < before)
    if scaler.get_scale() >= before:
        scheduler.step()
    scales.append((before, float(norm)))
at_end()  # noqa: F821  (given by the driver)
