# ruff: noqa: B007
"""A forward that counts, a module with a generator of its own, a dataset with one."""
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 8)
        self.b = nn.Linear(8, 1)
        self.calls = 0
        self.generator = torch.Generator()
        self.generator.manual_seed(1)

    def forward(self, x):
        self.calls += 1
        return self.b(torch.relu(self.a(x)) + torch.rand(8, generator=self.generator))


class Data(Dataset):
    def __init__(self):
        self.rng = torch.Generator()
        self.rng.manual_seed(2)

    def __len__(self):
        return 30

    def __getitem__(self, i):
        return torch.randn(4, generator=self.rng)


torch.manual_seed(1)
net = Net()
loader = DataLoader(Data(), batch_size=5, shuffle=True, generator=torch.Generator())
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
calls = []
for epoch in range(8):
    for x in loader:
        optimizer.zero_grad()
        loss = net(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        calls.append(net.calls)
at_end()  # noqa: F821  (given by the driver)
