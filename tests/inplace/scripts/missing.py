"""A monitored_barrier that rank 1 does not come to. Arguments: whether its error is caught."""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank = dist.get_rank()
caught = ""
if rank != 1:
    try:
        dist.monitored_barrier(timeout=timedelta(seconds=0.5), wait_all_ranks=True)
    except RuntimeError as error:
        if sys.argv[1] != "caught":
            raise
        caught = str(error)
torch.save(caught, os.path.join(os.environ["OUT"], f"rank{rank}.pt"))
