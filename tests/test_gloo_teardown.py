"""A script that destroys its group and drops its model right after a collective ends."""

from __future__ import annotations

from pathlib import Path

from tests import helpers

# With a switch interval of 1000 s gloo's thread gets the GIL only where somebody lets go of it: the
# moment in which torch alone hangs (on each of the first turns) comes every time.
_SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
sys.setswitchinterval(1000)
for turn in range(30):
    group = dist.new_group()
    model = DistributedDataParallel(torch.nn.Linear(4, 4), process_group=group)
    total = torch.ones(1 << 10)
    dist.all_reduce(total, group=group)
    dist.destroy_process_group(group)
    del group
    del model
assert dist.destroy_process_group.__name__ == "destroy_process_group"
dist.destroy_process_group()
print("gone")
"""


def test_model_dropped_after_its_group(tmp_path: Path) -> None:
    script = tmp_path / "work.py"
    script.write_text(_SCRIPT)
    command = [*helpers.launcher("flashrun"), "--nproc-per-node=2", str(script)]
    finished = helpers.run(command, timeout=60.0)
    assert finished.status == 0, finished.describe()
    assert finished.stdout.count("gone") == 2, finished.describe()
