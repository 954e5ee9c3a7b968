"""Many ways to use values that a replay does not compute; ``REPLAY_CASE`` says which."""
import copy
import ctypes
import io
import os
import uuid

import numpy as np
import torch
from torch import nn

STEPS = 16
case = os.environ["REPLAY_CASE"]
torch.manual_seed(3)
X, Y = torch.randn(96, 6), torch.randint(0, 20, (96,))
model = nn.Sequential(nn.Linear(6, 24), nn.Dropout(0.2), nn.ReLU(), nn.Linear(24, 20))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
criterion = nn.CrossEntropyLoss()
history = []


def batch(step):
    at = step % 6 * 16
    return X[at : at + 16], Y[at : at + 16]


def train(after=None, before=None, each=None):
    """A plain loop.

    Args:
        after: called with the output and the targets after the optimizer's step.
        before: the same between backward and the step.
        each: called with the step's number first.
    """
    for step in range(STEPS):
        if each:
            each(step)
        x, y = batch(step)
        optimizer.zero_grad()
        out = model(x)
        loss = criterion(out, y)
        loss.backward()
        if before:
            before(out, y)
        optimizer.step()
        if after:
            after(out, y)


if case == "best":
    best_loss = 1e9
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        if loss.item() < best_loss:
            best_loss, best = loss.item(), copy.deepcopy(model.state_dict())
    model.load_state_dict(best)
    del best
elif case == "best_in_memory":
    kept = {}

    def each(step):
        if step == 3:
            file = io.BytesIO()
            torch.save(model.state_dict(), file)
            file.seek(0)
            kept["best"] = torch.load(file)

    train(each=each)
    model.load_state_dict(kept["best"])
    del kept
elif case == "best_in_file":

    def each(step):
        global again
        if step == 3:
            torch.save({"w": model.state_dict(), "n": 7}, "best.pt")
        if step == 5:
            again = torch.load("best.pt")["w"]

    train(each=each)
    model.load_state_dict(again)
    del again
elif case == "first_weights":

    def each(step):
        global first
        if step == 4:
            first = model[0].weight.detach().clone()

    train(each=each)
    history.append((model[0].weight.detach() - first).norm().item())
elif case == "unused":
    old = None

    def each(step):
        global old
        if step == 4:
            old = model[0].weight.detach().clone()

    train(each=each)
    old = None
elif case == "overwritten":
    buffer = torch.zeros(16, 20)

    def before(out, y):
        buffer.copy_(out.detach())
        history.append(buffer.sum().item())

    def after(out, y):
        buffer.zero_()

    train(before=before, after=after)
elif case == "running":
    total = torch.zeros(20)
    train(after=lambda out, y: total.add_(out.detach().sum(0)))
    history.append(total.tolist())
elif case == "hidden":
    rnn = nn.LSTM(6, 20, batch_first=True)
    head = nn.Linear(rnn.hidden_size, 20)
    optimizer = torch.optim.Adam([*rnn.parameters(), *head.parameters()], lr=1e-2)
    hidden = None
    for step in range(STEPS):
        x, y = batch(step)
        out, hidden = rnn(x.view(16, 1, 6), hidden)
        hidden = tuple(h.detach() for h in hidden)
        optimizer.zero_grad()
        loss = criterion(head(out[:, -1]), y)
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    del hidden
elif case == "metric":
    correct = 0

    def after(out, y):
        global correct
        correct += (out.argmax(1) == y).sum().item()
        history.append(correct / 16)

    train(after=after)
elif case == "shapes":

    def after(out, y):
        hit = out.argmax(1) == y
        history.append((
            len(out[out > 0.3]), hit.nonzero().shape[0], torch.unique(out.argmax(1)).numel(),
            torch.masked_select(out, out > 0).numel(), torch.bincount(out.argmax(1)).shape[0],
            torch.where(hit)[0].numel(), tuple(out[hit, :3].shape), len(out[hit.tolist()]),
            torch.repeat_interleave(out.argmax(1) % 3).numel(),
            torch.nn.functional.one_hot(out.argmax(1)).shape,
            [t.numel() for t in torch.unique(out.argmax(1), return_counts=True)],
        ))

    train(before=after)
elif case == "unlogged_shape":
    train(before=lambda out, y: history.append(torch.ops.aten.nonzero(out > 0).shape[0]))
elif case == "numpy":
    train(before=lambda out, y: history.append(float(np.asarray(out.detach()).sum())))
elif case == "array_index":  # numpy asks a tensor first whether it is one number
    table = np.arange(8.0)
    train(before=lambda out, y: history.append(float(table[out.argmax(1) % 8].sum())))
elif case == "dlpack":
    train(before=lambda out, y: history.append(float(np.from_dlpack(out.detach()).sum())))
elif case == "storage":
    train(before=lambda out, y: history.append(sum(out.untyped_storage().tolist())))
elif case == "address":
    train(before=lambda out, y: history.append(ctypes.string_at(out.data_ptr(), 4)))
elif case == "identity":
    tied = {p.untyped_storage().data_ptr() for p in model.parameters()}
    train(before=lambda out, y: history.append(out.untyped_storage().data_ptr() in tied))
elif case == "shared":
    held = torch.zeros(20)
    seen = held.numpy()

    def before(out, y):
        held.copy_(out.detach()[0])
        history.append(float(seen[0]))

    train(before=before)
elif case == "swallowed":

    def before(out, y):
        try:
            history.append(torch.ops.aten.nonzero(out > 0).shape[0])
        except Exception:  # noqa: BLE001
            history.append(-1)

    train(before=before)
elif case == "index":
    train(before=lambda out, y: history.append(X[out[0].argmax() % 8].sum().item()))
elif case == "gradients":
    train(after=lambda out, y: history.append(model[0].weight.grad.norm().item()))
elif case == "accumulated":
    for step in range(STEPS):
        x, y = batch(step)
        criterion(model(x), y).backward()
        optimizer.step()  # gradients are never zeroed
elif case == "zeroed":
    for step in range(STEPS):
        x, y = batch(step)
        criterion(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
elif case == "read_in_graph":
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        squared = loss * loss
        history.append(loss.item())  # a value that the graph has kept
        squared.backward()
        optimizer.step()
elif case == "two_losses":
    other = nn.Linear(6, 20)
    second = torch.optim.SGD(other.parameters(), lr=0.1)
    for step in range(STEPS):
        x, y = batch(step)
        loss, loss_other = criterion(model(x), y), criterion(other(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        second.zero_grad()
        loss_other.backward()
        second.step()
elif case == "attribute":

    class Remembering(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model
            self.last = None

        def forward(self, x):
            out = self.inner(x)
            self.last = out.detach().clone()
            return out

    model = Remembering()
    train(after=lambda out, y: history.append(model.last.sum().item()))
elif case == "hook":
    seen = {}
    model[0].register_forward_hook(lambda m, i, o: seen.update(o=o.detach()))
    train(after=lambda out, y: history.append(seen["o"].sum().item()))
elif case == "told":

    def each(step):
        answer = uuid.uuid4().hex if step < 2 else np.random.default_rng().integers(1 << 60)
        with open(os.path.join(os.environ["REPLAY_DUMPS"], "told"), "a") as file:
            file.write(f"{step} {answer}\n")

    train(each=each)
else:
    raise SystemExit(f"no case {case}")
at_end()  # noqa: F821  (given by the driver)
