"""A small but real training job: a classifier of two interleaved half moons, trained with DDP.

    flashrun --standalone --nproc-per-node=2 examples/train_ddp.py

Nothing in it knows of flashrun; ``torchrun`` runs the same file.
"""

import argparse
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def moons(points: int, seed: int) -> TensorDataset:
    """``points`` samples of shape (2,) with labels 0 or 1: two half circles, noisy, interleaved."""
    generator = torch.Generator().manual_seed(seed)
    angle = torch.rand(points, generator=generator) * math.pi
    label = torch.arange(points) % 2
    side = 1 - 2 * label
    place = torch.stack((angle.cos() * side + label, angle.sin() * side + 0.5 * label), dim=1)
    place += 0.1 * torch.randn(points, 2, generator=generator)
    return TensorDataset(place, label)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--points", type=int, default=4096)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = moons(options.points, seed=1)
    sampler = DistributedSampler(data, seed=2)
    loader = DataLoader(data, batch_size=64, sampler=sampler)
    model = DistributedDataParallel(
        nn.Sequential(
            nn.Linear(2, 64),
            nn.Tanh(),
            nn.Linear(64, 64),
            nn.Tanh(),
            nn.Dropout(0.05),
            nn.Linear(64, 2),
        )
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)

    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        model.train()
        total = torch.zeros(2)
        for place, label in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(place), label)
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item(), 1.0])
        scheduler.step()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {total[0] / total[1]:.4f}", flush=True)

    model.eval()
    with torch.no_grad():
        place, label = moons(1024, seed=3).tensors
        right = (model(place).argmax(1) == label).float().mean()
    if dist.get_rank() == 0:
        print(f"accuracy on unseen points: {right:.1%}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
