"""Training jobs of several launchers that take turns on the same cores, a block of steps each.

What else the machine does, and how fast its clock runs, meets neighbouring blocks alike, so each
block is compared with the one of the reference beside it.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent
SCRIPT = Path(__file__).parent / "steady_train.py"
RANKS = 2

# Launchers by name: command with flags, and variables.
TORCHRUN = (["torchrun"], {})
# Beside it: how much of the difference is the allocator (flashrun.worker.allocator).
KEEPS = (
    ["torchrun"],
    {"MALLOC_TRIM_THRESHOLD_": str(256 << 20), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)},
)
IN_PLACE = (["flashrun", "--recovery=in-place"], {})
RESTART = (["flashrun", "--recovery=restart"], {})
TWO_NODES = (["flashrun", "--recovery=in-place", "--nnodes=2", "--rdzv-backend=flash"], {})
Launcher = tuple[list[str], dict[str, str]]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def commands(flags: list[str]) -> list[list[str]]:
    """The flags of each node's command; the ranks are spread over the nodes."""
    if "--nnodes=2" not in flags:
        return [["--standalone", f"--nproc-per-node={RANKS}", *flags]]
    where = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    own = [f"--nproc-per-node={RANKS // 2}", where, "--rdzv-id=steady", *flags]
    return [["--rdzv-conf=is_host=1", *own], ["--rdzv-conf=is_host=0", *own]]


class Job:
    """A job of steady_train.py that runs a block of steps when it is told.

    Args:
        shape: width of the model, rows of a batch, steps of a block, blocks after the first one.
    """

    def __init__(self, launcher: Launcher, shape: tuple[int, int, int, int]) -> None:
        (name, *flags), variables = launcher
        self.folder = Path(tempfile.mkdtemp())
        self.pipes = {}
        for pipe in ("turn", "done"):
            for rank in range(RANKS):
                os.mkfifo(self.folder / f"{pipe}.{rank}")
                self.pipes[pipe, rank] = os.open(self.folder / f"{pipe}.{rank}", os.O_RDWR)
        self.processes = [
            subprocess.Popen(
                [str(BIN / name), *own, str(SCRIPT), str(self.folder), *map(str, shape)],
                env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
                stdout=subprocess.DEVNULL, stderr=(self.folder / f"err.{node}").open("w"),
            )
            for node, own in enumerate(commands(flags))
        ]  # fmt: skip

    def _fail(self) -> None:
        text = (self.folder / "err.0").read_text()[-9000:]
        raise RuntimeError(f"status {self.processes[0].returncode}:\n{text}")

    def block(self) -> None:
        for rank in range(RANKS):
            os.write(self.pipes["turn", rank], b"x")
        for rank in range(RANKS):
            while not select.select([self.pipes["done", rank]], [], [], 5)[0]:
                if self.processes[0].poll() is not None:
                    self._fail()
            os.read(self.pipes["done", rank], 1)

    def ended(self) -> dict[str, Any]:
        """What rank 0 has measured: per block the median step and the processor time of one."""
        if any(process.wait(60) for process in self.processes):
            # A worker of torchrun's may abort in torch's own teardown, once all is measured.
            if not all((self.folder / f"steady.{rank}").exists() for rank in range(RANKS)):
                self._fail()
            print(f"after its last step: status {self.processes[0].returncode}", flush=True)
        return json.loads((self.folder / "steady.0").read_text())  # type: ignore[no-any-return]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        for pipe in self.pipes.values():
            os.close(pipe)
        shutil.rmtree(self.folder)


def turns(
    launchers: Mapping[str, Launcher], width: int, rows: int, steps: int, blocks: int
) -> dict[str, dict[str, Any]]:
    """One job of each launcher at once, a block each in turn; the first block warms up.

    Returns:
        By name what `Job.ended` gives: seconds, by block.
    """
    with ExitStack() as stack:
        jobs = {
            name: Job(launcher, (width, rows, steps, blocks))
            for name, launcher in launchers.items()
        }
        for job in jobs.values():
            stack.callback(job.close)
        for block in range(blocks + 1):
            for job in list(jobs.values())[:: 1 if block % 2 else -1]:
                job.block()
        return {name: job.ended() for name, job in jobs.items()}


def spread(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return {"median": middle, "q1": low, "q3": high}


def compare(runs: list[dict[str, dict[str, Any]]], what: str) -> dict[str, Any]:
    """Seconds of a step by launcher, and the ratios of neighbouring blocks to the first launcher's.

    Prints a line for each of the others.
    """
    first, *others = runs[0]
    result: dict[str, Any] = {"raw": runs}
    for key in ("step", "processor"):
        result[f"{first}, {key}"] = spread([v for run in runs for v in run[first][key]])
        for name in others:
            result[f"{name}, ratio of {key}"] = spread(
                [
                    mine / theirs
                    for run in runs
                    for mine, theirs in zip(run[name][key], run[first][key], strict=True)
                ]
            )
    for name in others:
        s, c = (result[f"{name}, ratio of {key}"] for key in ("step", "processor"))
        print(
            f"{what}, {first} {result[f'{first}, step']['median'] * 1e3:.2f} ms; {name}: step"
            f" {s['median']:.4f} ({s['q1']:.4f} to {s['q3']:.4f}), processor time"
            f" {c['median']:.4f} ({c['q1']:.4f} to {c['q3']:.4f})",
            flush=True,
        )
    return result
