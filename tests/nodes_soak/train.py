"""A user's script that trains until a file is there or a step is reached.

Arguments: the folder for the results, the file, the step, seconds that a forward takes.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

RANK = int(os.environ["RANK"])
EVERY = 4  # steps between two looks for the end

out, stop, last, pace = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])


class Slow(nn.Module):
    """Stands for a larger model."""

    def forward(self, x):
        time.sleep(pace)
        return x


dist.init_process_group("gloo")
torch.manual_seed(7)
data = TensorDataset(torch.randn(192, 8), torch.randn(192, 1))
sampler = DistributedSampler(data, seed=3)
loader = DataLoader(data, batch_size=4, sampler=sampler)
model = DistributedDataParallel(
    nn.Sequential(Slow(), nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
)
torch.manual_seed(100 + RANK)  # dropout differs between ranks
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9999)
losses, step, epoch, over = [], 0, 0, False
while not over:
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        step += 1
        told = f"rank {RANK} step {step} pid {os.getpid()} loss {losses[-1].hex()}"
        print(f"{told}\n", end="", flush=True)
        if step % EVERY == 0:
            ends = torch.tensor(float(RANK == 0 and (step >= last or os.path.exists(stop))))
            dist.all_reduce(ends)
            over = bool(ends.item())
        if over:
            break
    epoch += 1
torch.save(
    {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(),
     "scheduler": scheduler.state_dict(), "losses": losses, "step": step, "epoch": epoch,
     "random": torch.get_rng_state()},
    f"{out}/rank{RANK}.pt",
)  # fmt: skip
print(f"rank {RANK} saved {step}\n", end="", flush=True)
dist.destroy_process_group()
