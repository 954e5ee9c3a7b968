"""A loop of its own, as small GPT trainers have it: counters in a while loop, batches from the
global generator (seeded by rank) that dropout draws from too, gradient accumulation with no_sync,
the next batch fetched ahead, evaluation and checkpoints on rank 0 only. Argument: steps (60)."""

import math
import os
from contextlib import nullcontext

import numpy as np
import torch
from common import begin, leave, length, shown
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

BLOCK, VOCABULARY, WIDTH = 16, 32, 32
max_iters = length(60)
eval_interval, eval_iters, accumulation = 15, 3, 2

rank, world = begin()
os.makedirs("out", exist_ok=True)
torch.manual_seed(1337 + rank)
data = np.random.default_rng(5).integers(0, VOCABULARY, 4000).astype(np.uint16)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(0.1)
        )

    def forward(self, x):
        b, t, c = x.shape
        parts = self.qkv(self.norm1(x)).split(c, 2)
        q, k, v = (p.view(b, t, 2, c // 2).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1 * self.training)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.tokens.weight = self.head.weight

    def forward(self, x, targets=None):
        h = self.tokens(x) + self.places(torch.arange(x.size(1)))
        for block in self.blocks:
            h = block(h)
        logits = self.head(h)
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1))
        return logits, loss


def get_batch(split):
    part = data[:3600] if split == "train" else data[3600:]
    at = torch.randint(len(part) - BLOCK, (4,))
    x = torch.stack([torch.from_numpy(part[i : i + BLOCK].astype(np.int64)) for i in at])
    y = torch.stack([torch.from_numpy(part[i + 1 : i + 1 + BLOCK].astype(np.int64)) for i in at])
    return x, y


@torch.no_grad()
def estimate_loss():
    out = {}
    raw_model.eval()
    for split in ("train", "val"):
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            losses[k] = raw_model(*get_batch(split))[1].item()
        out[split] = losses.mean()
    raw_model.train()
    return out


def get_lr(it):
    if it < 10:
        return 1e-2 * (it + 1) / 11
    return 1e-3 + 0.5 * 9e-3 * (1 + math.cos(math.pi * it / max_iters))


model = DDP(GPT())
raw_model = model.module
decay = [p for p in raw_model.parameters() if p.dim() >= 2]
others = [p for p in raw_model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW(
    [{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-2
)
shown(0, "begins")
best_val_loss, iter_num, running, history, kept = 1e9, 0, -1.0, [], []
X, Y = get_batch("train")
while True:
    lr = get_lr(iter_num)
    for group in optimizer.param_groups:
        group["lr"] = lr
    if iter_num % eval_interval == 0 and rank == 0:
        print(f"rank 0 validates {iter_num}\n", end="", flush=True)
        losses = estimate_loss()
        kept.append((iter_num, losses["train"].item(), losses["val"].item()))
        if losses["val"] < best_val_loss:
            best_val_loss = losses["val"]
            if iter_num > 0:
                print(f"rank 0 saves {iter_num}\n", end="", flush=True)
                torch.save(
                    {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict(),
                     "iter_num": iter_num, "best_val_loss": best_val_loss}, "out/ckpt.pt",
                )  # fmt: skip
    for micro_step in range(accumulation):
        with nullcontext() if micro_step == accumulation - 1 else model.no_sync():
            logits, loss = model(X, Y)
            loss = loss / accumulation
            X, Y = get_batch("train")
            loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if iter_num % 5 == 0:
        lossf = loss.item() * accumulation
        running = lossf if running == -1.0 else 0.9 * running + 0.1 * lossf
        history.append((iter_num, lossf, running))
    iter_num += 1
    shown(iter_num, f"loss {running:.4f} lr {lr:.5f}")
    if iter_num >= max_iters:
        break
if rank == 0:  # the others have ended by then
    print("rank 0 evaluates\n", end="", flush=True)
    kept += [estimate_loss()["val"].item() for _ in range(20)]
leave(
    model=model.state_dict(), optimizer=optimizer.state_dict(), history=history, kept=kept,
    best=float(best_val_loss), step=iter_num, next=(X, Y),
)  # fmt: skip
