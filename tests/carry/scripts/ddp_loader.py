"""DDP, DataLoader, dropout, Adam and a per-step scheduler; validation and a checkpoint per epoch.
Argument: epochs of 8 steps (10)."""


import torch
import torch.distributed as dist
from common import begin, leave, length, mse, net, shown
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

epochs = length(10)
rank, world = begin()
torch.manual_seed(1)
data = TensorDataset(torch.randn(192, 16), torch.randn(192, 1))
held_out = torch.randn(32, 16), torch.randn(32, 1)
sampler = DistributedSampler(data, seed=3)
loader = DataLoader(data, batch_size=8, sampler=sampler)
model = DDP(net())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=8 * epochs)
torch.manual_seed(100 + rank)  # dropout differs between ranks
shown(0, "begins")
losses, validations, step = [], [], 0
for epoch in range(epochs):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        step += 1
        shown(step, f"loss {losses[-1]:.4f} lr {scheduler.get_last_lr()[0]:.6f}")
    model.eval()
    print(f"rank {rank} validates {epoch}\n", end="", flush=True)
    with torch.no_grad():
        total = mse(model.module(held_out[0]), held_out[1])
        for part in range(rank, 8, world):
            total += mse(model.module(held_out[0][part::8]), held_out[1][part::8])
    dist.all_reduce(total)
    validations.append(total.item())
    model.train()
    if rank == 0:
        print(f"rank 0 saves {epoch}\n", end="", flush=True)
        torch.save(
            {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()},
            f"epoch{epoch % 3}.pt",
        )
        with open("metrics.csv", "a") as file:
            file.write(f"{epoch},{validations[-1]!r}\n")
    dist.barrier()
if rank == 0:  # the others have ended by then
    print("rank 0 evaluates\n", end="", flush=True)
    model.eval()
    for part in range(600):
        x = held_out[0] + 0.01 * part
        losses.append(mse(model.module(x), held_out[1]).item())
leave(
    model=model.state_dict(), optimizer=optimizer.state_dict(), scheduler=scheduler.state_dict(),
    losses=losses, validations=validations, step=step,
)  # fmt: skip
