"""Several models of which some come late, or are trained in a way of their own: a WGAN with a
penalty on gradients, a model that joins, is wrapped, frozen or unfrozen after the others have
trained for a while. Arguments: way, rounds."""

import copy
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

way, rounds = sys.argv[1], int(sys.argv[2])
LATE = 4  # round
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


def net(seed, out=1, normed=False):
    torch.manual_seed(seed)
    layers = [nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, out)]
    if normed:
        layers.insert(1, nn.BatchNorm1d(32))
    return nn.Sequential(*layers)


def ddp(model, **options):
    return DDP(model, bucket_cap_mb=0.001, **options)


class Critic(nn.Module):
    """Convolutions."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.conv = nn.Conv1d(1, 4, 3, padding=1)
        self.more = nn.Conv1d(4, 4, 3, padding=1)
        self.end = nn.Linear(64, 1)

    def forward(self, x):
        x = self.conv(x[:, None]).relu()
        return self.end(self.more(x).relu().flatten(1))


class Branched(nn.Module):
    """Its second head is asked for later."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.trunk, self.head, self.aux = nn.Linear(16, 16), nn.Linear(16, 1), nn.Linear(16, 1)
        self.both = False

    def forward(self, x, both=False):
        x = self.trunk(x).relu()
        return self.head(x) + self.aux(x) if both or self.both else self.head(x)


class Together(nn.Module):
    """A module that holds models of DDP."""

    def __init__(self, *models):
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, x):
        for model in self.models:
            x = model(x)
        return x


def adam(*models):
    return torch.optim.Adam([p for m in models for p in m.parameters()], lr=1e-3)


def noise():
    return torch.randn(8, 16)


def end(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())


def penalty(x):
    """Of the critic's slope."""
    x.requires_grad_()
    y = critic.module(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


def train_critic():
    with torch.no_grad():
        made = generator(noise())
    real = noise().sin()
    loss = critic(made).mean() - critic(real).mean()
    end(of_critic, loss + 10 * penalty((made + real) / 2))


def train_generator():
    end(of_generator, -critic.module(generator(noise())).mean())
    for mine, its in zip(average.parameters(), generator.parameters(), strict=True):
        mine.data.lerp_(its.data, 0.1)


def wgan(n):
    """As many steps of the critic before each of the generator."""
    for _ in range(n):
        train_critic()
    train_generator()


def every():
    """Detached where torch allows no_grad as well; the generator every third time."""
    made, real = generator(noise()).detach(), noise().sin()
    loss = critic(made).mean() - critic(real).mean()
    end(of_critic, loss + penalty((made + real) / 2))
    if number % 3 == 2:
        train_generator()


def frozen():
    """The critic needs no gradients in the generator's step."""
    for _ in range(2):
        train_critic()
    critic.requires_grad_(False)
    train_generator()
    critic.requires_grad_(True)


def joins():
    """The generator is trained by itself at first, then with the critic."""
    if number < LATE:
        x = noise()
        end(of_generator, (generator(x) - x).square().mean())
    else:
        wgan(2)


def attacked():
    """A step of the inputs along their gradients."""
    x = noise().requires_grad_()
    critic(x).square().mean().backward()
    near = (x + 0.1 * x.grad.sign()).detach()
    of_critic.zero_grad()
    (far,) = torch.autograd.grad(critic.module(x).mean(), x)
    end(of_critic, critic(near).square().mean() + (x + far).detach().mean())
    if number >= LATE:
        train_generator()


def wrapped():
    """Another model is made after a while."""
    global other, of_other
    wgan(1)
    if number == LATE:
        other = ddp(net(9, 16))
        of_other = adam(other)
    if number >= LATE:
        end(of_other, (critic.module(other(generator(noise()).detach())) - 1).square().mean())


def thawed():
    """The first layers are trained from then on, in the optimizer that has them all along."""
    global other
    if number == 0:
        other[0].requires_grad_(False)
        other = ddp(other)
    if number == LATE:
        other.module[0].requires_grad_(True)
        other = ddp(other.module)
    end(of_other, other(noise()).square().mean())
    train_critic()


def added():
    """Parameters come to an optimizer late."""
    global other
    if number == 0:
        other = ddp(net(9, 16))
    if number == LATE:
        of_critic.add_param_group({"params": list(other.parameters()), "lr": 1e-4})
    if number >= LATE:
        made, real = other(generator(noise()).detach()), noise()
        end(of_critic, critic(made).mean() - critic(real).mean() + penalty(real))
    else:
        wgan(1)


def branched():
    """The branch comes by an argument."""
    end(of_other, other(noise(), number >= LATE).square().mean())
    train_critic()


def switched():
    """The branch comes by an attribute."""
    other.module.both = number >= LATE
    end(of_other, other(noise()).square().mean())
    train_critic()


def within():
    """A DDP model is used within another module, and joins late."""
    wgan(1)
    if number >= LATE:
        end(of_other, together(noise()).square().mean())


def plain():
    """No DDP: what joins late reduces its gradients by itself."""
    if number < LATE:
        loss = critic(generator(noise()).detach()).square().mean()
        first, second = of_critic, critic
    else:
        loss = -critic(generator(noise())).mean()
        first, second = of_generator, generator
        if number % 2:
            first, second = of_critic, critic
    first.zero_grad()
    loss.backward()
    for p in second.parameters():
        dist.all_reduce(p.grad)
    first.step()
    history.append(loss.item())


history = []
generator, critic = net(1, 16, normed=way == "normed"), net(2)
if way == "conv":
    critic = Critic()
other = net(3, 16)
if way in ("branched", "switched"):
    other = ddp(Branched(), find_unused_parameters=True)
average = copy.deepcopy(generator)
if way != "plain":
    generator, critic = ddp(generator), ddp(critic)
together = Together(other := ddp(other)) if way == "within" else None
of_generator, of_critic, of_other = adam(generator), adam(critic), adam(other)
torch.manual_seed(rank)
for number in range(rounds):  # noqa: B007  # the ways read it
    if way[:1].isdigit():
        wgan(int(way))
    elif way in ("normed", "conv"):
        wgan(3)
    else:
        globals()[way]()
saved = {
    "models": [m.state_dict() for m in (generator, critic, other, average)],
    "optimizers": [o.state_dict() for o in (of_generator, of_critic, of_other)],
    "history": history, "random": torch.get_rng_state(),
}  # fmt: skip
torch.save(saved, os.path.join(os.environ["OUT"], f"rank{rank}.pt"))
dist.destroy_process_group()
