"""After four steps rank 0 computes for ever, in Python and without a collective."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.manual_seed(1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1000):
    if step == 4 and dist.get_rank() == 0:
        while True:
            sum(range(1000))
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
