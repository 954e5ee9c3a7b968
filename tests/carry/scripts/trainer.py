"""A Trainer class: a snapshot every epoch, resumed from when the file is there, without the
optimizer; a throw-away iterator per epoch. Argument: epochs."""

import os
import sys

import torch
from common import begin, leave, net, shown
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Trainer:
    def __init__(self, model, data, optimizer, save_every, path):
        self.rank = int(os.environ["RANK"])
        self.model, self.data, self.optimizer = model, data, optimizer
        self.save_every, self.path = save_every, path
        self.epochs_run, self.steps, self.losses = 0, 0, []
        if os.path.exists(path):
            print("Loading snapshot\n", end="")
            snapshot = torch.load(path, weights_only=True)
            self.model.load_state_dict(snapshot["MODEL_STATE"])
            self.epochs_run = snapshot["EPOCHS_RUN"]
            print(f"Resuming training from snapshot at Epoch {self.epochs_run}\n", end="")
        self.model = DDP(self.model)

    def run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(source), targets)
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())
        self.steps += 1
        shown(self.steps)

    def run_epoch(self, epoch):
        size = len(next(iter(self.data))[0])
        steps = len(self.data)
        print(f"[rank {self.rank}] Epoch {epoch} | Batchsize: {size} | Steps: {steps}\n", end="")
        self.data.sampler.set_epoch(epoch)
        for source, targets in self.data:
            self.run_batch(source, targets)

    def save_snapshot(self, epoch):
        torch.save(
            {"MODEL_STATE": self.model.module.state_dict(), "EPOCHS_RUN": epoch + 1}, self.path
        )
        print(f"Epoch {epoch} | Training snapshot saved at {self.path}\n", end="")

    def train(self, epochs):
        for epoch in range(self.epochs_run, epochs):
            self.run_epoch(epoch)
            if self.rank == 0 and epoch % self.save_every == 0:
                self.save_snapshot(epoch)


rank, world = begin()
torch.manual_seed(5)
data = TensorDataset(torch.randn(180, 16), torch.randint(0, 3, (180,)))
loader = DataLoader(data, batch_size=10, sampler=DistributedSampler(data))
model = net(out=3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
torch.manual_seed(rank)
trainer = Trainer(model, loader, optimizer, 1, "snapshot.pt")
trainer.train(int(sys.argv[1]))
leave(
    model=trainer.model.state_dict(), optimizer=optimizer.state_dict(), losses=trainer.losses,
    step=trainer.steps, run=trainer.epochs_run,
)  # fmt: skip
