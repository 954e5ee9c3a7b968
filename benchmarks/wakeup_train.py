"""What `wakeup.py` runs on each rank: steps in which all but one block in a collective, while the
one waits to be killed. Arguments: folder, victims (a rank per step, -1: nobody)."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from flashrun.worker.channel import Channel
from flashrun.worker.communicator import Gloo

folder, victims = sys.argv[1], [int(v) for v in sys.argv[2].split(",")]
rank, incarnation = int(os.environ["RANK"]), int(os.environ["FLASHRUN_INCARNATION"])
now, kill_me = time.monotonic_ns, signal.pause


def note(what):
    at = now()
    # opened each time: a file that a replacement opened while it caught up is not the real one
    with open(f"{folder}/log.{rank}", "a") as log:
        log.write(f"{what} {at}\n")


class Timed:
    """A handle that notes when a wait in it ended because the communicator was cut."""

    def __init__(self, handle):
        self._handle = handle

    def wait(self):
        try:
            return self._handle.wait()
        except RuntimeError:
            note("woken")
            raise

    def __getattr__(self, name):
        return getattr(self._handle, name)


issue, send = Gloo.issue, Channel.send
Gloo.issue = lambda self, kind, args: Timed(issue(self, kind, args))


def send_and_note(self, message, standing=None):
    send(self, message, standing)
    if message["op"] == "held":
        note("held")


Channel.send = send_and_note

torch.manual_seed(0)
dist.init_process_group("gloo")
weights = torch.nn.Parameter(torch.zeros(1 << 18))  # 1 MB
optimizer = torch.optim.SGD([weights], lr=0.1)
for step, victim in enumerate(victims):
    weights.grad = torch.ones_like(weights)
    if victim == rank and incarnation == victims[:step].count(rank):
        with open(f"{folder}/victim.{step}.new", "w") as file:
            file.write(str(os.getpid()))
        os.rename(f"{folder}/victim.{step}.new", f"{folder}/victim.{step}")
        kill_me()
    elif victim >= 0:
        with open(f"{folder}/blocked.{step}.{rank}", "w"):
            pass
    dist.all_reduce(weights.grad)
    optimizer.step()
dist.destroy_process_group()
