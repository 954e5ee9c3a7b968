# ruff: noqa: B007
"""Own counters in a while loop, batches from the global generator that dropout draws from too,
gradient accumulation, the next batch fetched ahead."""
import torch
from torch import nn

torch.manual_seed(1337)
data = torch.randn(500, 8)


def get_batch():
    at = torch.randint(490, (6,))
    return torch.stack([data[i : i + 8].mean(0) for i in at]), data[at].sum(1, keepdim=True)


model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
best_val_loss = 1e9
iter_num = 0
local_iter_num = 0
running_mfu = -1.0
lr = 0.0
X, Y = get_batch()
while True:
    lr = 1e-2 * min(1.0, (iter_num + 1) / 10)
    for group in optimizer.param_groups:
        group["lr"] = lr
    if iter_num % 10 == 0:
        model.eval()
        losses = torch.zeros(4)
        with torch.no_grad():
            for k in range(4):
                x, y = get_batch()
                losses[k] = nn.functional.mse_loss(model(x), y).item()
        model.train()
        val = losses.mean()
        if val < best_val_loss:
            best_val_loss = val
        print(f"step {iter_num}: val {val:.4f}")
    for micro_step in range(3):
        logits = model(X)
        loss = nn.functional.mse_loss(logits, Y) / 3
        X, Y = get_batch()
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    lossf = loss.item() * 3
    if local_iter_num >= 5:
        running_mfu = lossf if running_mfu == -1.0 else 0.9 * running_mfu + 0.1 * lossf
    iter_num += 1
    local_iter_num += 1
    if iter_num > 50:
        break
at_end()  # noqa: F821  (given by the driver)
