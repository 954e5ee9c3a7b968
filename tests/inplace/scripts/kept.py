"""Scripts that keep state in places of their own. Arguments: kind, steps."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

kind, steps = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(7)
model = DDP(nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 4)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
saved = {}


def batch(step):
    g = torch.Generator().manual_seed(step * 100 + rank)
    return torch.randn(4, 8, generator=g)


def train(step):
    optimizer.zero_grad()
    out = model(batch(step))
    out.square().mean().backward()
    return out


class Average:
    """Of weights, as many scripts write it: a plain object with a dict of tensors."""

    def __init__(self, module):
        self.shadow = {n: p.detach().clone() for n, p in module.named_parameters()}
        self.updates = 0

    def update(self, module):
        self.updates += 1
        for name, p in module.named_parameters():
            self.shadow[name] = 0.9 * self.shadow[name] + 0.1 * p.detach()

    def state_dict(self):
        return {"shadow": self.shadow, "updates": self.updates}

    def load_state_dict(self, state):
        self.shadow, self.updates = state["shadow"], state["updates"]


class Confusion(nn.Module):
    """A metric whose counts are plain attributes of a module, each rank's own until the end."""

    def __init__(self):
        super().__init__()
        self.counts = torch.zeros(4, 4, dtype=torch.long)
        self.seen = []

    def update(self, out):
        best = out.argmax(1)
        for i in range(4):
            self.counts[i] += (best == i).sum() * torch.arange(4)
        if len(self.seen) < 3:
            self.seen.append(out.detach().sum(0))


def average():
    """An average of the weights after the step, in a plain object."""
    holder = Average(model)
    for step in range(steps):
        train(step)
        optimizer.step()
        holder.update(model)
    saved["average"] = holder.state_dict()


def large():
    """Likewise in place, and too large for a file."""
    global model, optimizer
    model = DDP(nn.Linear(8, 8000))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    shadow = [p.detach().clone() for p in model.parameters()]
    for step in range(steps):
        train(step)
        optimizer.step()
        torch._foreach_mul_(shadow, 0.9)
        torch._foreach_add_(shadow, [p.detach() for p in model.parameters()], alpha=0.1)
    saved["shadow"] = shadow


def metric():
    """A rank's own counts, between the step and the next forward."""
    confusion = Confusion()
    for step in range(steps):
        out = train(step)
        optimizer.step()
        confusion.update(out)
    saved.update(counts=confusion.counts, seen=confusion.seen)


def best():
    """The best weights so far, by an all-reduced loss, in a variable."""
    import copy

    lowest, kept = float("inf"), None
    for step in range(steps):
        loss = train(step).detach().square().mean()
        dist.all_reduce(loss)
        optimizer.step()
        if loss.item() < lowest:
            lowest, kept = loss.item(), copy.deepcopy(model.state_dict())
    saved.update(best=kept, lowest=lowest)


def swa():
    """torch's own averages of weights, updated with batch statistics in the end."""
    averaged = torch.optim.swa_utils.AveragedModel(model.module)
    scheduler = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.005, anneal_epochs=3)
    for step in range(steps):
        train(step)
        optimizer.step()
        if step >= 3:
            averaged.update_parameters(model.module)
            scheduler.step()
    saved.update(averaged=averaged.state_dict(), rate=scheduler.get_last_lr())


def across():
    """Gradients that live on: zeroed after every other step only."""
    for step in range(steps):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        if step % 2:
            optimizer.zero_grad(set_to_none=False)


def after():
    """Gradients read after the step."""
    norms = []
    for step in range(steps):
        train(step)
        optimizer.step()
        norms.append(next(model.parameters()).grad.norm().item())
    saved.update(norms=norms)


def turns():
    """Two optimizers in turn; the second's gradients are made worthless by the first's backward."""
    head = DDP(nn.Linear(4, 1))
    second = torch.optim.RMSprop(head.parameters(), lr=0.001)
    for step in range(steps):
        optimizer.zero_grad()
        head(model(batch(step))).mean().backward()
        optimizer.step()
        second.zero_grad()
        head(model(batch(step)).detach()).square().mean().backward()
        second.step()
    saved.update(head=head.state_dict(), second=second.state_dict())


def rates():
    """Learning rates changed by hand after the step, a group added."""
    extra = nn.Linear(4, 4)
    for step in range(steps):
        optimizer.zero_grad()
        extra(model(batch(step))).square().mean().backward()
        for p in extra.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        if step == 2:
            optimizer.add_param_group({"params": extra.parameters(), "lr": 0.02})
    saved.update(extra=extra.state_dict())


def gathered():
    """An evaluation every fifth step, whose pieces stay in a list until the next one."""
    saved["means"] = []
    for step in range(steps):
        train(step)
        optimizer.step()
        if step % 5 == 4:
            pieces = []
            for number in range(3):
                with torch.no_grad():
                    mine = model.module(batch(1000 + number)).reshape(-1).repeat(4)
                whole = torch.empty(world * len(mine))
                dist.all_gather_into_tensor(whole, mine)
                pieces.append(whole)
            saved["means"].append(torch.cat(pieces).mean())


def power():
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=5)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for step in range(steps):
        train(step)
        optimizer.step()


def chained():
    """A hook that waits for a second collective in the callback of the first, like PowerSGD."""

    def second(future):
        part = (future.value()[0] / world).square()
        return dist.all_reduce(part, async_op=True).get_future().wait()[0]

    def hook(state, bucket):
        first = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return first.then(second)

    model.register_comm_hook(None, hook)
    for step in range(steps):
        train(step)
        optimizer.step()


def counter():
    """A hook with a state that is not known."""
    counts = []

    def hook(state, bucket):
        counts.append(len(counts))
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(
            lambda future: future.value()[0] / (1 + len(counts))
        )

    model.register_comm_hook(None, hook)
    for step in range(steps):
        train(step)
        optimizer.step()


globals()[kind]()
saved.update(model=model.state_dict(), optimizer=optimizer.state_dict())
torch.save(saved, os.path.join(os.environ["OUT"], f"rank{rank}.pt"))
dist.destroy_process_group()
