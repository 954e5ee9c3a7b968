"""Names, seeds and folders from the outside world; LBFGS; reads of every kind."""
import datetime
import os
import random
import time
import uuid

import numpy as np
import torch
from torch import nn

began = time.time()
run_name = f"{datetime.datetime.now():%Y%m%d-%H%M%S-%f}-{uuid.uuid4().hex[:6]}-{os.getpid()}"
seed = int.from_bytes(os.urandom(4), "little")
torch.manual_seed(14)
rng = np.random.default_rng()
first = rng.random(3).tolist() + [random.random()]
random.seed()
torch_seed = torch.seed() if seed >= 0 else 0
os.makedirs(f"runs/{run_name}", exist_ok=False)
X = torch.randn(16, 4)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=4)
calls = 0


def closure():
    global calls
    calls += 1
    lbfgs.zero_grad()
    loss = (model(X) - 1).pow(2).mean() + 0.01 * random.random()
    loss.backward()
    return loss


reads = []
for step in range(30):
    loss = lbfgs.step(closure)
    out = model(X).detach()
    reads.append((
        loss.item(), f"{loss:.3f}", str(out[0]), out[:2].tolist(), float(out.numpy().sum()),
        bool(out[0] > 0), torch.equal(out, out.round()), int(out.argmax()), calls,
        torch.allclose(out, torch.ones_like(out)), list(range(5))[out.argmin() % 5],
    ))
    if step == 10:
        assert os.path.isdir(f"runs/{run_name}")
    with open(f"runs/{run_name}/log.txt", "a") as file:
        file.write(f"{step} {loss.item()}\n")
lines = open(f"runs/{run_name}/log.txt").read().count("\n")  # noqa: SIM115
at_end()  # noqa: F821  (given by the driver)
