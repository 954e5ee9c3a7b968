"""Two models with an optimizer each, in turn."""

import torch
from common import batch, begin, leave, net, shown
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

rank, world = begin()
generator, critic = DDP(net(1, out=16)), DDP(net(2))
opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3)
opt_d = torch.optim.RMSprop(critic.parameters(), lr=1e-3)
bce = nn.BCEWithLogitsLoss()
torch.manual_seed(rank)
history = []
for step in range(40):
    real, _ = batch(step, rank)
    one, zero = torch.ones(len(real), 1), torch.zeros(len(real), 1)
    fake = generator(torch.randn(len(real), 16))
    opt_d.zero_grad()
    loss_d = bce(critic(torch.cat([real, fake.detach()])), torch.cat([one, zero]))
    loss_d.backward()
    opt_d.step()
    for p in critic.parameters():
        p.data.clamp_(-0.5, 0.5)
    opt_g.zero_grad()
    loss_g = bce(critic(fake), one)
    loss_g.backward()
    opt_g.step()
    history.append((loss_d.item(), loss_g.item()))
    shown(step + 1)
leave(
    generator=generator.state_dict(), critic=critic.state_dict(), opt_g=opt_g.state_dict(),
    opt_d=opt_d.state_dict(), history=history,
)  # fmt: skip
