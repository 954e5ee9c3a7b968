"""Several models and optimizers in turn; most ways have a graph that lives on over a step.
Arguments: way, rounds."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

way, rounds = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
PLAIN = way in ("plain", "frozen", "helper", "asked")


def net(seed, out, normed=False):
    torch.manual_seed(seed)
    first = nn.Linear(16, 32)
    if way == "spectral":
        first = nn.utils.parametrizations.spectral_norm(first)
    layers = [first, nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, out)]
    if way == "collective":
        layers.append(Averaged())
    if normed:
        layers.insert(1, nn.BatchNorm1d(32))
    model = nn.Sequential(*layers)
    return model if PLAIN else DDP(model, bucket_cap_mb=0.001)


class Averaged(nn.Module):
    """Of all ranks, in forward."""

    def forward(self, x):
        mean = x.detach().mean(0)
        dist.all_reduce(mean)
        return x - mean / world


class Turn:
    """An optimizer with the models that it steps."""

    def __init__(self, *models):
        self.models = models
        self.parameters = [p for m in models for p in m.parameters()]
        self.optimizer = torch.optim.Adam(self.parameters, lr=1e-3)

    def step(self, loss):
        self.optimizer.zero_grad()
        if way != "helper" and self is first:
            loss.backward()
        else:
            loss.backward()
        if PLAIN:
            for p in self.parameters:
                dist.all_reduce(p.grad)
        norm = nn.utils.clip_grad_norm_(self.parameters, 0.5)
        history.append((norm.item(), loss.item()))
        self.optimizer.step()


def noise():
    return torch.randn(8, 16)


def score(x):
    """What the critic is trained to tell."""
    return critic(x).square().mean()


def opposed(x):
    return (1 - critic(x)).square().mean()


def fake():
    """The batch is made before the critic's step."""
    made = generator(noise())
    second.step(opposed(noise()) + score(made.detach()))
    for p in critic.parameters():
        p.data.clamp_(-0.5, 0.5)
    first.step(opposed(made))


plain = norms = helper = spectral = collective = fake


def recomputed():
    second.step(opposed(noise()) + score(generator(noise()).detach()))
    first.step(opposed(generator(noise())))


def reused():
    """The critic is trained on it three times."""
    made = generator(noise())
    for _ in range(3):
        second.step(opposed(noise()) + score(made.detach()))
    first.step(opposed(made))


def several():
    """Two batches of one model, and a third made of one of them."""
    one, two = generator(noise()), generator(noise())
    three = generator(one)
    second.step(score(torch.cat([one, two, three]).detach()))
    first.step(opposed(one) + score(two) + opposed(three))


def shared():
    """Two heads of one encoder: the critic's step comes first, and trains it alone."""
    code = generator(noise())
    second.step(score(code.detach()))
    first.step(actor(code).square().mean() + opposed(code))


def viewed():
    made = generator(noise()).view(-1)[:64].reshape(4, 16)
    second.step(score(made.detach()))
    first.step(opposed(made))


def changed():
    """In place, by the script."""
    made = generator(noise())
    made.mul_(2)
    second.step(score(made.detach()))
    first.step(opposed(made))


def module():
    """The script's own end of it is a module."""
    made = nn.Tanh()(generator(noise()))
    second.step(score(made.detach()))
    first.step(opposed(made))


def mixed():
    """The generator is trained by what was made before the step and after it."""
    made = generator(noise())
    second.step(score(made.detach()))
    first.step(opposed(made) + opposed(generator(noise())))


def asked():
    """Gradients of the generator are asked for through what was made before."""
    made = generator(noise())
    second.step(score(made.detach()))
    history.append(torch.autograd.grad(opposed(made), first.parameters)[0].norm().item())
    first.step(opposed(generator(noise())))


def autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = generator(noise())
    second.step(score(made.detach().float()))
    first.step(opposed(made.float()))


def frozen():
    """The one that is not trained needs no gradients meanwhile."""
    made = generator(noise())
    generator.requires_grad_(False)
    second.step(score(made.detach()))
    generator.requires_grad_(True)
    critic.requires_grad_(False)
    first.step(opposed(made))
    critic.requires_grad_(True)


def penalty():
    made = generator(noise())
    between = (made.detach() + noise()).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    second.step(score(made.detach()) + (slope.norm(dim=1) - 1).square().mean())
    first.step(opposed(made))


def unsynced():
    """Half of the generator's gradients are of a batch that is not reduced by itself."""
    with generator.no_sync():
        half = generator(noise())
    second.step(score(half.detach()))
    first.optimizer.zero_grad()
    with generator.no_sync():
        opposed(half).backward()
    loss = opposed(generator(noise()))
    loss.backward()
    first.optimizer.step()
    history.append(loss.item())


def outside():
    """What crosses is made of an output by the script itself."""
    made = torch.tanh(generator(noise()))
    second.step(score(made.detach()))
    first.step(opposed(made))


def loss_first():
    made = actor(noise())
    loss = made.square().mean()
    del made
    second.step(score(noise()))
    third.step(loss)


history = []
generator = net(1, 16, normed=way == "norms")
critic, actor = net(2, 1), net(3, 1)
first = Turn(generator, actor) if way == "shared" else Turn(generator)
second = Turn(critic)
third = Turn(actor)
torch.manual_seed(rank)
for _ in range(rounds):
    globals()[way]()
saved = {
    "models": [m.state_dict() for m in (generator, critic, actor)],
    "optimizers": [t.optimizer.state_dict() for t in (first, second, third)],
    "history": history, "random": torch.get_rng_state(),
}  # fmt: skip
torch.save(saved, os.path.join(os.environ["OUT"], f"rank{rank}.pt"))
dist.destroy_process_group()
