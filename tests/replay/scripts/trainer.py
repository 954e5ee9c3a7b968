"""A Trainer that saves a snapshot every epoch, resumes when there is one, keeps no optimizer, and
makes a throw-away iterator per epoch."""
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Trainer:
    def __init__(self, model, data, optimizer, path):
        self.model, self.data, self.optimizer, self.path = model, data, optimizer, path
        self.epochs_run = 0
        self.losses = []
        if os.path.exists(path):
            snapshot = torch.load(path, weights_only=True)
            self.model.load_state_dict(snapshot["model"])
            self.epochs_run = snapshot["epochs"]

    def run_batch(self, x, y):
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())

    def run_epoch(self, epoch):
        size = len(next(iter(self.data))[0])
        print(f"epoch {epoch} batch {size} steps {len(self.data)}")
        for x, y in self.data:
            self.run_batch(x, y)

    def train(self, epochs):
        for epoch in range(self.epochs_run, epochs):
            self.run_epoch(epoch)
            if epoch % 1 == 0:
                torch.save({"model": self.model.state_dict(), "epochs": epoch + 1}, self.path)


torch.manual_seed(5)
data = TensorDataset(torch.randn(50, 6), torch.randint(0, 2, (50,)))
model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.Linear(16, 2))
trainer = Trainer(
    model,
    DataLoader(data, batch_size=8, shuffle=True),
    torch.optim.SGD(model.parameters(), lr=0.1),
    "snapshot.pt",
)
trainer.train(8)
at_end()  # noqa: F821  (given by the driver)
