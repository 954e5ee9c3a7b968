"""A DataLoader with two persistent workers that augment at random; a batch is fetched ahead.
Argument: epochs of 8 steps (8)."""

import random

import torch
from common import begin, leave, length, mse, net, shown
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

rank, world = begin()


class Pictures(Dataset):
    def __init__(self):
        self.data = torch.randn(120, 16, generator=torch.Generator().manual_seed(4))

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        x = self.data[i] + 0.1 * torch.randn(16)
        if random.random() < 0.5:
            x = x.flip(0)
        return x, x.sum().reshape(1)


data = Pictures()
sampler = DistributedSampler(data)
torch.manual_seed(rank)
loader = DataLoader(data, batch_size=5, sampler=sampler, num_workers=2, persistent_workers=True)
model = DDP(net())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
torch.manual_seed(rank)
step, history = 0, []
for epoch in range(length(8)):
    sampler.set_epoch(epoch)
    batches = iter(loader)
    ahead = next(batches)
    while ahead is not None:
        x, y = ahead
        ahead = next(batches, None)
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        step += 1
        history.append(loss.item())
        shown(step)
leave(model=model.state_dict(), optimizer=optimizer.state_dict(), history=history)
