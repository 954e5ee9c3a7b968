"""BatchNorm buffers, and a normalisation with collectives of its own in forward and backward;
a handler around each step that would see what is raised there. Argument: steps (60)."""

import torch
import torch.distributed as dist
from common import batch, begin, guarded, leave, length, mse, shown
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Sum(torch.autograd.Function):
    """The sum over ranks, differentiable."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class SyncNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x):
        sums = Sum.apply(torch.stack([x.sum(0), (x * x).sum(0)])) / (len(x) * dist.get_world_size())
        mean, var = sums[0], (sums[1] - sums[0] ** 2).clamp_min(0)
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(mean, alpha=0.1)
                self.count += 1
        return (x - mean) * (var + 1e-5).rsqrt() * self.weight + self.bias


rank, world = begin()
torch.manual_seed(7)
model = DDP(nn.Sequential(
    nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), SyncNorm(32), nn.ReLU(),
    nn.Dropout(0.1), nn.Linear(32, 1),
))  # fmt: skip
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
torch.manual_seed(rank)
history = []
for step in range(length(60)):
    x, y = batch(step, rank)
    with guarded():
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
    history.append(loss.item())
    shown(step + 1)
leave(
    model=model.state_dict(), optimizer=optimizer.state_dict(), history=history,
    step=step,
)  # fmt: skip
