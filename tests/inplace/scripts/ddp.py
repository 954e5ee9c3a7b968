"""DDP, DataLoader, dropout, Adam, a scheduler per step. Arguments: steps."""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

steps = int(sys.argv[1])
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1234)
data = TensorDataset(torch.randn(512, 16), torch.randn(512, 1))
sampler = DistributedSampler(data, shuffle=True)
loader = DataLoader(data, batch_size=8, sampler=sampler)
model = DistributedDataParallel(
    torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Dropout(0.3), torch.nn.Linear(64, 1)
    )
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)
done = 0
epoch = 0
rates = []
while done < steps:
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
        done += 1
        if done == steps:
            break
    epoch += 1
torch.save(
    {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rates": rates,
        "random": torch.get_rng_state(),
    },
    os.path.join(os.environ["OUT"], f"rank{rank}.pt"),
)
dist.destroy_process_group()
