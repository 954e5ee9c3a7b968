"""An accelerate job: prepared model, optimizer, loader and scheduler, accumulation, gathered
metrics, saved states."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from common import leave, mse, net, shown
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
set_seed(9)
data = TensorDataset(torch.randn(240, 16), torch.randn(240, 1))
held_out = TensorDataset(torch.randn(50, 16), torch.randn(50, 1))
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 80)
model, optimizer, loader, check, scheduler = accelerator.prepare(
    model, optimizer, DataLoader(data, batch_size=8, shuffle=True),
    DataLoader(held_out, batch_size=8), scheduler,
)  # fmt: skip
set_seed(9, device_specific=True)
history, step = [], 0
for epoch in range(10):
    model.train()
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = mse(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        step += 1
        shown(step)
    model.eval()
    losses = []
    for x, y in check:
        with torch.no_grad():
            errors = (model(x) - y).square()
        losses.append(accelerator.gather_for_metrics(errors))
    history.append(torch.cat(losses).mean().item())
    if epoch % 4 == 3:
        accelerator.save_state(f"state{epoch}")
leave(
    model=model.state_dict(), optimizer=optimizer.state_dict(), scheduler=scheduler.state_dict(),
    history=history, step=step,
)  # fmt: skip
