"""Metrics computed from the step's output after optimizer.step(), read now and then.
Argument: steps (60)."""

import torch
import torch.distributed as dist
from common import batch, begin, leave, length, net, shown
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

rank, world = begin()
model = DDP(net(out=4))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
torch.manual_seed(rank)
correct, seen, confusion = 0, 0, torch.zeros(4, 4, dtype=torch.long)
running = torch.zeros(())
history = []
for step in range(length(60)):
    x, y = batch(step, rank)
    labels = (y.squeeze(1) * 2).long().remainder(4)
    optimizer.zero_grad()
    out = model(x)
    loss = nn.functional.cross_entropy(out, labels)
    loss.backward()
    optimizer.step()
    found = out.argmax(1)
    correct += (found == labels).sum().item()
    seen += len(labels)
    running = 0.9 * running + 0.1 * loss.detach()
    for a, b in zip(labels.tolist(), found.tolist(), strict=True):
        confusion[a, b] += 1
    if step % 10 == 9:
        total = torch.tensor([correct, seen])
        dist.all_reduce(total)
        history.append((total.tolist(), running.item(), correct / seen))
    shown(step + 1, f"correct {correct / seen:.3f}")
leave(
    model=model.state_dict(), optimizer=optimizer.state_dict(), history=history, confusion=confusion
)
