"""Small training scripts of many kinds. Arguments: kind, steps."""

import copy
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

kind, steps = sys.argv[1], int(sys.argv[2])
saved = {}


def net(out=1):
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, out))


def batch(step, rank):
    g = torch.Generator().manual_seed(step * 100 + rank)
    x = torch.randn(8, 16, generator=g)
    return x, x.sum(1, keepdim=True)


def mse(a, b):
    return nn.functional.mse_loss(a, b)


def plain(rank, world):
    """All-reduce of gradients without DDP, an all-reduced loss read every step."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    history = []
    torch.manual_seed(rank)
    for step in range(steps):
        x, y = batch(step, rank)
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        history.append(mean.item() / world)
        optimizer.step()
    return model, optimizer, history


def functional(rank, world):
    """Functional collectives."""
    import torch.distributed._functional_collectives as funcol

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    for step in range(steps):
        x, y = batch(step, rank)
        optimizer.zero_grad()
        mse(model(x), y).backward()
        for p in model.parameters():
            p.grad = funcol.wait_tensor(funcol.all_reduce(p.grad, "sum", dist.group.WORLD)) / world
        optimizer.step()
    return model, optimizer, None


def accumulate(rank, world):
    """Gradient accumulation with no_sync, evaluation on rank 0 only, barriers."""
    model = DDP(net())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    history = []
    for step in range(steps):
        for micro in range(3):
            x, y = batch(step * 3 + micro, rank)
            if micro < 2:
                with model.no_sync():
                    (mse(model(x), y) / 3).backward()
            else:
                (mse(model(x), y) / 3).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 4:
            if rank == 0:
                model.eval()
                with torch.no_grad():
                    x, y = batch(10_000, 0)
                    history.append(mse(model.module(x), y).item())
                model.train()
            dist.barrier()
    return model, optimizer, history


def objects(rank, world):
    """Object collectives, subgroups, monitored_barrier, async all-reduce."""
    name = ["run"] if rank == 0 else [None]
    dist.broadcast_object_list(name, src=0)
    pair = dist.new_group([0, 1], timeout=timedelta(seconds=60))
    everyone = dist.new_group(timeout=timedelta(seconds=60))
    model = DDP(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    history = [name[0]]
    for step in range(steps):
        x, y = batch(step, rank)
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        work = dist.all_reduce(torch.ones(4), group=everyone, async_op=True)
        if rank < 2:
            t = torch.full((3,), float(rank + step))
            dist.all_reduce(t, group=pair)
            history.append(t.tolist())
        work.wait()
        optimizer.step()
        if step % 4 == 0:
            gathered = [None] * world
            dist.all_gather_object(gathered, {"rank": rank, "step": step})
            history.append(gathered)
            dist.monitored_barrier()
        if step == steps // 2:
            late = dist.new_group([0, 1, 2][:world])
            t = torch.tensor([float(rank)])
            dist.broadcast(t, 1, group=late)
            history.append(t.item())
            parts = [torch.zeros(2) for _ in range(world)]
            dist.all_gather(parts, torch.full((2,), float(rank)), group=late)
            history.append([p.tolist() for p in parts])
            whole = torch.zeros(2 * world)
            dist.all_gather_into_tensor(whole, torch.full((2,), float(rank)))
            history.append(whole.tolist())
    return model, optimizer, history


def norm(rank, world):
    """BatchNorm buffers."""
    torch.manual_seed(7)
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(steps):
        x, y = batch(step, rank)
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()
    return model, optimizer, None


def average(rank, world):
    """EMA on all ranks, updated after the step."""
    model = DDP(net())
    mean = copy.deepcopy(model.module)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(steps):
        x, y = batch(step, rank)
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            for a, b in zip(mean.parameters(), model.module.parameters(), strict=True):
                a.data.mul_(0.9).add_(b.data, alpha=0.1)
    saved["mean"] = mean.state_dict()
    return model, optimizer, None


def lonely(rank, world):
    """EMA on rank 0 only."""
    model = DDP(net())
    mean = copy.deepcopy(model.module) if rank == 0 else None
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(steps):
        x, y = batch(step, rank)
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()
        if mean is not None:
            with torch.no_grad():
                for a, b in zip(mean.parameters(), model.module.parameters(), strict=True):
                    a.mul_(0.9).add_(b, alpha=0.1)
    return model, optimizer, None


def scaled(rank, world):
    """GradScaler with skipped steps and bf16 autocast."""
    model = DDP(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    history = []
    for step in range(steps):
        x, y = batch(step, rank)
        if step % 7 == 3:
            x = x * float("inf")
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = mse(model(x), y.bfloat16())
        scaler.scale(loss.float()).backward()
        scaler.step(optimizer)
        scaler.update()
        history.append(scaler.get_scale())
    return model, optimizer, history


def gan(rank, world):
    """Two optimizers in turn, weight clipping."""
    a, b = DDP(net(16)), DDP(net())
    oa = torch.optim.Adam(a.parameters(), lr=1e-3)
    ob = torch.optim.RMSprop(b.parameters(), lr=1e-3)
    for step in range(steps):
        x, _ = batch(step, rank)
        ob.zero_grad()
        (b(a(x).detach()).mean() - b(x).mean()).backward()
        ob.step()
        for p in b.parameters():
            p.data.clamp_(-0.1, 0.1)
        oa.zero_grad()
        (-b(a(x)).mean()).backward()
        oa.step()
    saved["a"] = a.state_dict()
    return b, ob, None


def local(rank, world):
    """Local SGD: replicas differ between averagings."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(steps):
        x, y = batch(step, rank)
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()
        if step % 4 == 3:
            for p in model.parameters():
                dist.all_reduce(p.data)
                p.data /= world
    return model, optimizer, None


def hook(rank, world):
    """DDP communication hooks."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model = DDP(net())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(steps):
        x, y = batch(step, rank)
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()
    return model, optimizer, None


def static(rank, world):
    """static_graph with activation checkpointing."""
    from torch.utils.checkpoint import checkpoint

    class Checked(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = net(16)
            self.head = nn.Linear(16, 1)

        def forward(self, x):
            return self.head(checkpoint(self.body, x, use_reentrant=False))

    model = DDP(Checked(), static_graph=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(steps):
        x, y = batch(step, rank)
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()
    return model, optimizer, None


def unused(rank, world):
    """find_unused_parameters, and DDP's join with uneven inputs."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = net(), net()

        def forward(self, x, which):
            return self.one(x) if which else self.two(x)

    model = DDP(Two(), find_unused_parameters=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(steps):
        x, y = batch(step, rank)
        optimizer.zero_grad()
        mse(model(x, step % 2), y).backward()
        optimizer.step()
    return model, optimizer, None


dist.init_process_group("gloo", timeout=timedelta(seconds=120))
rank, world = dist.get_rank(), dist.get_world_size()
model, optimizer, history = globals()[kind](rank, world)
assert dist.get_backend() == "gloo"
saved.update(
    model=model.state_dict(),
    optimizer=optimizer.state_dict(),
    history=history,
    random=torch.get_rng_state(),
)
torch.save(saved, os.path.join(os.environ["OUT"], f"rank{rank}.pt"))
dist.destroy_process_group()
