"""A run that resumed from an older snapshot, which it overwrites, and rotates files."""
import json
import os
import shutil
import tempfile
from pathlib import Path

import torch
from torch import nn


def write(path, text):
    """As fsspec does: aside, in the temporary folder."""
    handle, name = tempfile.mkstemp()
    with open(handle, "w") as file:
        file.write(text)
    shutil.move(name, path)


torch.manual_seed(6)
start = torch.load("old.pt", weights_only=True)
model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.2), nn.Linear(16, 1))
model.load_state_dict(start["model"])
optimizer = torch.optim.Adam(model.parameters(), lr=start["lr"])
first = start["step"]
names = []
log = open("log.csv", "a")  # noqa: SIM115
os.makedirs("out/deep", exist_ok=True)
X = torch.randn(32, 4)
for step in range(first, first + 40):
    optimizer.zero_grad()
    loss = model(X).pow(2).mean()
    loss.backward()
    optimizer.step()
    log.write(f"{step},{loss.item()}\n")
    if step % 5 == 4:
        log.flush()
        torch.save({"model": model.state_dict(), "lr": 0.5, "step": step + 1}, "new.tmp")
        os.replace("new.tmp", "old.pt")
        write(f"out/state{step}.json", json.dumps({"step": step, "loss": loss.item()}))
        kept = sorted(Path("out").glob("state*.json"), key=lambda p: int(p.stem[5:]))
        names.append([p.name for p in kept])
        if len(kept) > 2:
            kept[0].unlink()
        if step % 10 == 9:
            shutil.rmtree("out/deep")
            os.mkdir("out/deep")
            Path("out/deep/mark").write_text(str(step))
            names.append(Path("config.txt").read_text())
            if step > first + 15 and Path("config.txt").exists():
                os.rename("config.txt", "config.old")
                Path("config.txt").write_text(f"changed at {step}")
log.close()
at_end()  # noqa: F821  (given by the driver)
