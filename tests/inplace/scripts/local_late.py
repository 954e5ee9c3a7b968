"""Gradients are averaged until a step, from then on parameters at every fifth (local SGD).
Arguments: that step, steps."""

import sys

import torch
import torch.distributed as dist

begins, steps = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(rank)
for step in range(steps):
    optimizer.zero_grad()
    model(torch.randn(2, 4)).square().sum().backward()
    dist.all_reduce(torch.ones(1))
    for p in model.parameters():
        if step < begins:
            dist.all_reduce(p.grad)
            p.grad /= world
        elif step % 5 == 4:
            dist.all_reduce(p.data)
            p.data /= world
    optimizer.step()
