"""Warm-up that takes steps and then resets model and optimizer; a second phase with another
module and another shape."""
import copy

import torch
from torch import nn

torch.manual_seed(13)
X = torch.randn(32, 6)
model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
begin, begin_opt = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
steps = 0


def step(net, optimizer, x):
    global steps
    optimizer.zero_grad()
    loss = net(x).pow(2).mean()
    loss.backward()
    optimizer.step()
    steps += 1
    return loss.item()


for _ in range(6):
    step(model, optimizer, X)
model.load_state_dict(begin)
optimizer.load_state_dict(begin_opt)
del begin, begin_opt
history = [step(model, optimizer, X[i % 4 :]) for i in range(20)]
head = nn.Sequential(model, nn.Linear(1, 1))
optimizer2 = torch.optim.SGD(head.parameters(), lr=0.01, momentum=0.9)
for i in range(20):
    history.append(step(head, optimizer2, X[: 8 + i % 3]))
at_end()  # noqa: F821  (given by the driver)
