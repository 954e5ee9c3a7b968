"""torch's metrics: the handler that a site has configured gets what it gets from torchrun."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests import helpers, jobs

# torch.distributed.elastic.metrics imports this where it is there, for `initialize_metrics`.
STATIC_INIT = """
import json, os
from torch.distributed.elastic import metrics

class ToFile(metrics.MetricHandler):
    def emit(self, metric):
        line = json.dumps([metric.group_name, metric.name, metric.value]) + "\\n"
        fd = os.open(os.environ["METRICS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(fd, line.encode())
        os.close(fd)

def initialize_metrics(cfg=None):
    assert cfg.params == {}
    metrics.configure(ToFile())
"""

SITE = """
import importlib.abc, importlib.util, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torch.distributed.elastic.metrics.static_init":
            return importlib.util.spec_from_file_location(name, {path!r})

sys.meta_path.append(Finder())
"""

# Long enough for torchrun to look at its workers once while they run.
BODY = """
import time
time.sleep(0.5)
if sys.argv[1] == "signal":
    tell("ready")
    time.sleep(300)
sys.exit(int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < int(sys.argv[1]) and RANK == 1)
"""


def metrics(folder: Path, launcher: str, how: str) -> list[list[Any]]:
    """What was put, in order."""
    folder.mkdir()
    (folder / "site").mkdir()
    (folder / "site" / "static_init.py").write_text(STATIC_INIT)
    site = SITE.format(path=str(folder / "site" / "static_init.py"))
    (folder / "site" / "sitecustomize.py").write_text(site)
    environ = {"PYTHONPATH": str(folder / "site"), "METRICS": str(folder / "metrics")}
    script = jobs.write_script(folder, BODY)
    flags = ["--nproc-per-node=2", "--max-restarts=2", "--role=trainer"]
    command = [*helpers.launcher(launcher), *flags, str(script), how]
    (folder / "j").mkdir()
    with jobs.running(command, folder / "j", environ) as job:
        if how == "signal":
            job.await_told("ready", 2)
            job.signal(signal.SIGTERM)
        assert (job.ended() == 0) == (how in ("0", "1")), job.describe()
    return [json.loads(line) for line in (folder / "metrics").read_text().splitlines()]


def comparable(found: list[list[Any]]) -> list[tuple[Any, ...]]:
    """Without what repeats at each look of torchrun at its workers, and the values of times."""
    kept = set()
    for group, name, value in found:
        if name.startswith("LocalElasticAgent._monitor_workers."):
            continue  # flashrun is told of exits, and does not look
        if name.endswith(".duration.ms"):
            assert 0 <= value < 300_000
            value = "time"
        kept.add((group, name, value))
    return sorted(kept, key=str)


@pytest.mark.parametrize(
    "how",
    ["1", *(pytest.param(how, marks=pytest.mark.slow) for how in ("0", "9", "signal"))],
    ids={"0": "succeeds", "1": "after a restart", "9": "fails", "signal": "is stopped"}.get,
)
def test_metrics_are_torchruns(tmp_path: Path, how: str) -> None:
    expected = metrics(tmp_path / "torchrun", "torchrun", how)
    found = metrics(tmp_path / "flashrun", "flashrun", how)
    assert comparable(found) == comparable(expected)
    names = [name for _, name, _ in found]
    states = [n for n in names if n.rpartition(".")[2] in ("healthy", "failed", "succeeded")]
    assert len(states) == {"0": 2, "1": 4, "9": 6, "signal": 1}[how]
