"""A WGAN with gradient penalty: the critic takes several steps before each of the generator, which
has BatchNorm and an average of its weights. Argument: iterations."""

import copy

import torch
from common import batch, begin, leave, length, net, shown
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

N_CRITIC = 3
rank, world = begin()
generator, critic = net(1, out=16), net(2)
generator.insert(1, nn.BatchNorm1d(32))
average = copy.deepcopy(generator)
generator, critic = DDP(generator), DDP(critic)
opt_g = torch.optim.Adam(generator.parameters(), lr=1e-4, betas=(0.0, 0.9))
opt_d = torch.optim.Adam(critic.parameters(), lr=1e-4, betas=(0.0, 0.9))
torch.manual_seed(rank)


def penalty(real, fake):
    share = torch.rand(len(real), 1)
    x = (share * real + (1 - share) * fake).requires_grad_()
    y = critic.module(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return (slope.norm(2, dim=1) - 1).square().mean()


history = []
for step in range(length(14)):
    for i in range(N_CRITIC):
        real, _ = batch(step * N_CRITIC + i, rank)
        fake = generator(torch.randn(len(real), 16)).detach()
        opt_d.zero_grad()
        loss_d = critic(fake).mean() - critic(real).mean() + 10 * penalty(real, fake)
        loss_d.backward()
        opt_d.step()
    opt_g.zero_grad()
    loss_g = -critic.module(generator(torch.randn(8, 16))).mean()
    loss_g.backward()
    opt_g.step()
    for mine, its in zip(average.parameters(), generator.parameters(), strict=True):
        mine.data.lerp_(its.data, 0.05)
    history.append((loss_d.item(), loss_g.item()))
    shown(step + 1)
leave(
    generator=generator.state_dict(), critic=critic.state_dict(), opt_g=opt_g.state_dict(),
    opt_d=opt_d.state_dict(), average=average.state_dict(), history=history,
)  # fmt: skip
