"""The training script of recovery.py: an ordinary one that resumes from its own checkpoint.

It appends one line per completed step to ``OUT/steps.RANK``: step, wall-clock time. The time from
its first line to its loop is in ``OUT/setup.RANK``.
"""

import os
import time

begin = time.time()

import argparse  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset  # noqa: E402

parser = argparse.ArgumentParser()
parser.add_argument("out")
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--save-every", type=int, default=100)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--trainer", action="store_true", help="a loop as trainers have")
options = parser.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
width = options.width
model = DistributedDataParallel(
    nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 1))
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
data = TensorDataset(torch.randn(3072, width), torch.randn(3072, 1))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
checkpoint = os.path.join(options.out, "checkpoint.pt")
step = epoch = 0
if os.path.exists(checkpoint):
    saved = torch.load(checkpoint)
    step, epoch = saved["step"], saved["epoch"]
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
torch.manual_seed(1 + rank)
with open(f"{options.out}/setup.{rank}", "a") as file:
    file.write(f"{time.time() - begin}\n")
file = open(f"{options.out}/steps.{rank}", "a", buffering=1)  # noqa: SIM115
file.write(f"pid {os.getpid()}\n")
batch = next(iter(loader))
history = []


def done() -> None:
    global step
    step += 1
    file.write(f"{step} {time.time()}\n")
    if rank == 0 and step % options.save_every == 0:
        states = {
            "step": step, "epoch": epoch, "model": model.module.state_dict(),
            "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),
        }  # fmt: skip
        torch.save(states, checkpoint + ".new")
        os.replace(checkpoint + ".new", checkpoint)


while step < options.steps:
    if not options.trainer:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch[0]), batch[1]).backward()
        optimizer.step()
        done()
        continue
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        history.append((loss.item(), scheduler.get_last_lr()[0]))
        done()
        if step == options.steps:
            break
    epoch += 1
dist.destroy_process_group()
