"""A worker whose script has ended, while threads of flashrun's are at work in it."""

from __future__ import annotations

from pathlib import Path

from tests import helpers

# What each forward draws is counted by a thread, in torch, for longer than the script then takes.
_SCRIPT = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
drop = torch.nn.Dropout(0.1)
for _ in range(20):
    drop(torch.ones(1 << 20))
print("ended")
"""


def test_draws_that_are_being_counted(tmp_path: Path) -> None:
    script = tmp_path / "work.py"
    script.write_text(_SCRIPT)
    command = [*helpers.launcher("flashrun"), "--nproc-per-node=2", "--recovery=in-place"]
    finished = helpers.run([*command, str(script)])
    assert finished.status == 0, finished.describe()
    assert finished.stdout.count("ended") == 2, finished.describe()
    assert "lost" not in finished.stderr, finished.describe()
