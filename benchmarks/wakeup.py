"""How soon survivors leave a blocked collective when a peer is killed.

    python benchmarks/wakeup.py                    # 2, 3, 4, 8, 16 ranks; 3 minutes on 2 cores
    python benchmarks/wakeup.py --ranks 16 --kills 5

Real jobs under ``flashrun --recovery=in-place``: all ranks but one are in an all-reduce of 1 MB
over gloo, the one is killed. Times are from the SIGKILL (CLOCK_MONOTONIC, the same for all
processes) to *woken*: the wait in the communicator ends, and *held*: the survivor has told its
agent that it stands still. Of each kill the slowest survivor counts. Ranks in turn are killed,
several times per job.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bars import Bars, facts

HERE = Path(__file__).parent
SCRIPT = HERE / "wakeup_train.py"
SETTLE = 0.1  # s for the survivors to get from their last line into the collective
QUIET = 3  # steps at the start in which nobody is killed: replicas are proved in them


def await_files(paths: list[Path], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while not all(path.exists() for path in paths):
        if time.monotonic() > deadline or process.poll() is not None:
            missing = [path.name for path in paths if not path.exists()]
            raise RuntimeError(f"the job did not come to {missing} (status {process.poll()})")
        time.sleep(0.005)


def times_of(log: Path) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {"woken": [], "held": []}
    for line in log.read_text().splitlines():
        what, at = line.split()
        found[what].append(int(at))
    return found


def measure(ranks: int, kills: int, seed: int) -> dict[str, list[float]]:
    """Seconds from each kill to the slowest survivor's ``woken`` and ``held``."""
    draw = random.Random(seed)
    order = [rank for _ in range(-(-kills // ranks)) for rank in draw.sample(range(ranks), ranks)]
    victims = [-1] * QUIET + order[:kills]
    results: dict[str, list[float]] = {"woken": [], "held": []}
    with tempfile.TemporaryDirectory() as name:
        out = Path(name)
        command = [
            str(Path(sys.executable).parent / "flashrun"), "--standalone", "--recovery=in-place",
            f"--nproc-per-node={ranks}", "--max-retries=100", "--log-level=error",
            str(SCRIPT), name, ",".join(map(str, victims)),
        ]  # fmt: skip
        process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
        try:
            killed: list[tuple[int, int]] = []
            for step, victim in enumerate(victims):
                if victim < 0:
                    continue
                others = [r for r in range(ranks) if r != victim]
                blocked = [out / f"blocked.{step}.{r}" for r in others]
                await_files([out / f"victim.{step}", *blocked], process)
                time.sleep(SETTLE)
                pid = int((out / f"victim.{step}").read_text())
                killed.append((victim, time.monotonic_ns()))
                os.kill(pid, signal.SIGKILL)
            if process.wait(120):
                raise RuntimeError(f"the job ended with {process.returncode}")
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(60)
        logs = {r: times_of(out / f"log.{r}") for r in range(ranks)}
        for victim, at in killed:
            for what, seconds in results.items():
                firsts = [
                    min((t for t in logs[r][what] if t > at), default=None)
                    for r in range(ranks)
                    if r != victim
                ]
                if None in firsts:
                    raise RuntimeError(f"a survivor of rank {victim} noted no '{what}'")
                seconds.append(max(t - at for t in firsts if t is not None) / 1e9)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4, 8, 16])
    parser.add_argument("--kills", type=int, default=12, help="per number of ranks")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "wakeup.json")
    options = parser.parse_args()
    began, bars = facts(), Bars()
    results, raw = {}, {}
    for ranks in options.ranks:
        raw[ranks] = measure(ranks, options.kills, options.seed)
        results[ranks] = {}
        for what, values in raw[ranks].items():
            low, middle, high = statistics.quantiles(values, n=4)
            results[ranks][what] = {
                "median": middle, "q1": low, "q3": high, "slowest": max(values)
            }  # fmt: skip
            print(
                f"{ranks} ranks, {what}: {middle * 1e3:.1f} ms ({low * 1e3:.1f} to"
                f" {high * 1e3:.1f}, slowest {max(values) * 1e3:.1f})",
                flush=True,
            )
        bars.at_most(f"{ranks} ranks, woken, s", results[ranks]["woken"]["median"], 0.05)
    options.out.parent.mkdir(exist_ok=True)
    terms = {"unit": "s", "kills": options.kills, "seed": options.seed}
    found = {**began, **terms, "bars": bars.found, "results": results, "raw": raw}
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    raise SystemExit(bars.status())


if __name__ == "__main__":
    main()
