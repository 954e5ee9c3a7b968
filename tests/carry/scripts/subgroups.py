"""Subgroups by new_group (one made on the way), barriers, monitored_barrier, many collectives.
Argument: steps (60)."""

from datetime import timedelta

import torch
import torch.distributed as dist
from common import batch, begin, leave, length, mse, net, shown
from torch.nn.parallel import DistributedDataParallel as DDP

rank, world = begin()
pair = dist.new_group([0, 1], timeout=timedelta(seconds=60))
everyone = dist.new_group(timeout=timedelta(seconds=60))
model = DDP(net(), process_group=everyone)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
torch.manual_seed(rank)
history = []
for step in range(length(60)):
    x, y = batch(step, rank)
    optimizer.zero_grad()
    loss = mse(model(x), y)
    loss.backward()
    work = dist.all_reduce(torch.ones(4), async_op=True)
    if rank < 2:
        t = torch.full((3,), float(rank + step))
        dist.all_reduce(t, group=pair)
        history.append(t.tolist())
    work.wait()
    optimizer.step()
    if step % 5 == 0:
        dist.monitored_barrier()
        parts = [torch.zeros(2) for _ in range(world)]
        dist.all_gather(parts, torch.tensor([loss.item(), float(rank)]))
        history.append([p.tolist() for p in parts])
    if step == 30:
        late = dist.new_group(list(range(world)))
    if step > 30 and step % 3 == 0:
        whole = torch.zeros(2 * world)
        dist.all_gather_into_tensor(whole, torch.full((2,), float(rank * step)), group=late)
        t = loss.detach().clone()
        dist.broadcast(t, step % world, group=late)
        dist.all_reduce(whole, op=dist.ReduceOp.MAX)
        history.append((whole.tolist(), t.item()))
        dist.barrier(group=late)
    shown(step + 1)
leave(model=model.state_dict(), optimizer=optimizer.state_dict(), history=history)
