"""Generators and counters that live in variables of the script and change in forward, in hooks, in
a dataset and in an optimizer's step. Argument: epochs of 8 steps (6)."""

import itertools
import random

import numpy as np
import torch
from common import begin, leave, length, mse, net, shown
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

rank, world = begin()
noise = torch.Generator().manual_seed(10 + rank)
crops = np.random.default_rng(20 + rank)
flips = random.Random(30 + rank)
numbers = itertools.count()
calls = {"forward": 0, "hook": [0]}
seen = np.zeros(4, dtype=np.int64)


class Data(Dataset):
    def __len__(self):
        return 64 * world

    def __getitem__(self, i):
        seen[i % 4] += 1
        x = torch.from_numpy(crops.normal(size=16).astype(np.float32)) + i / 64
        return x, x[:1] * flips.random() + next(numbers) / 1000


class Net(nn.Module):
    total = 0

    def __init__(self):
        super().__init__()
        self.body, self.skip = net(1), nn.Linear(16, 1)

    def forward(self, x):
        calls["forward"] += 1
        Net.total += len(x)
        return self.body(x + 0.1 * torch.randn(x.shape, generator=noise)) + self.skip(x)


class Noisy(torch.optim.Optimizer):
    """Plain descent with noise; it counts for itself."""

    def __init__(self, params, rate, generator):
        super().__init__(params, {"rate": rate})
        self.generator, self.count = generator, 0

    @torch.no_grad()
    def step(self):
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["rate"] / self.count**0.5)
                p.add_(1e-4 * torch.randn(p.shape, generator=self.generator))


def hook(module, args, out):
    calls["hook"][0] += 1


def main():
    model = DDP(Net())
    model.module.skip.register_forward_hook(hook)
    optimizer = Noisy(model.parameters(), 0.02, torch.Generator().manual_seed(5))
    data = Data()
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
    torch.manual_seed(rank)
    step, history = 0, []
    for epoch in range(length(6)):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = mse(model(x), y)
            loss.backward()
            optimizer.step()
            history.append((loss.item(), calls["forward"], calls["hook"][0], Net.total))
            step += 1
            shown(step)
    leave(
        model=model.state_dict(), history=history, noise=noise.get_state(), count=optimizer.count,
        crops=repr(crops.bit_generator.state), flips=flips.getstate(), seen=seen.tolist(),
        next=next(numbers),
    )  # fmt: skip


main()
