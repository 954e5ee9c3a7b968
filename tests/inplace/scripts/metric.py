"""DDP with a metric that is all-reduced after backward and before the step, and read.
Arguments: width of the layer, steps, elements of the metric (0: none), what else is done:

``norm``    clips gradients and reads their norm
``clip``    clips gradients
``keep``    keeps their norms
``after``   reads gradients after the step
``hooks``   counts steps and keeps an average of the weights in a hook of the optimizer's step
``scale``   divides the metric in place
``inf``     scales the loss, and has infinite gradients in step 5
``lbfgs``   steps with a closure
``view``    has DDP make gradients views of its buckets
"""

import os
import sys

import torch
import torch.distributed as dist

width, steps, elements = map(int, sys.argv[1:4])
also = sys.argv[4:]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
model = torch.nn.parallel.DistributedDataParallel(
    torch.nn.Linear(width, width), gradient_as_bucket_view="view" in also
)
if "lbfgs" in also:
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=2)
else:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
history, counted = [], []
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
mean = torch.nn.Linear(width, width)
if "hooks" in also:

    def after(*_):
        counted.append(len(history))
        with torch.no_grad():
            for a, b in zip(mean.parameters(), model.parameters(), strict=True):
                a.mul_(0.9).add_(b, alpha=0.1)

    optimizer.register_step_post_hook(after)
torch.manual_seed(rank)
for _ in range(steps):
    x = torch.randn(2, width)

    def closure(x=x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    if "inf" in also and len(history) == 5:
        x[0] = float("inf")
    if "inf" in also:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        scaler.scale(loss).backward()
    else:
        loss = closure()
    metric = loss.detach() * torch.ones(max(elements, 1))
    if elements:
        dist.all_reduce(metric)
    if "scale" in also:
        metric /= world
    history.append(metric[0].item() / world)
    if {"norm", "clip", "keep"} & set(also):
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        if "keep" in also:
            counted.append(norm)
        if "norm" in also:
            history.append(norm.item())
    if "inf" in also:
        scaler.step(optimizer)
        scaler.update()
    elif "lbfgs" in also:
        optimizer.step(closure)
    else:
        optimizer.step()
    if "after" in also:
        history.append(next(model.parameters()).grad.abs().max().item())
saved = {
    "model": model.state_dict(), "optimizer": optimizer.state_dict(), "history": history,
    "counted": [] if "keep" in also else counted, "mean": mean.state_dict(),
    "scaler": scaler.state_dict(),
}  # fmt: skip
torch.save(saved, os.path.join(os.environ["OUT"], f"rank{rank}.pt"))
dist.destroy_process_group()
