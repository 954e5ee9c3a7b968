"""torchdata's StatefulDataLoader, its state saved on the way."""

import torch
from common import begin, leave, mse, net, shown
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DistributedSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

rank, world = begin()
torch.manual_seed(1)
data = TensorDataset(torch.randn(192, 16), torch.randn(192, 1))
sampler = DistributedSampler(data, seed=3)
loader = StatefulDataLoader(data, batch_size=8, sampler=sampler)
model = DDP(net())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
torch.manual_seed(100 + rank)
losses, step = [], 0
for epoch in range(8):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        step += 1
        if step % 20 == 0:
            torch.save(
                {"model": model.module.state_dict(), "loader": loader.state_dict()},
                f"snapshot{rank}.pt",
            )
        shown(step)
leave(model=model.state_dict(), optimizer=optimizer.state_dict(), losses=losses, step=step)
