"""What one lost worker costs: flashrun's recovery in place beside torchrun's restart.

    python benchmarks/recovery.py                 # everything; about 15 minutes on 2 cores
    python benchmarks/recovery.py fault --repeat 9
    python benchmarks/recovery.py curve --boundaries 100 1000 10000 100000

``fault``: three ranks train (recover_train.py); a random one gets SIGKILL right after it has
completed step 200. Measured, by the wall clock of one machine, is the time from the kill to the
next step that *that rank* completes. Both launchers alternate in one run; torchrun has
``--max-restarts=3``, ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`` and a checkpoint of the script's own
every 150 steps (it takes up at 150). The script's set-up (from its first line to its loop, imports
included, as the new process itself measured it) is shown and subtracted from both.

``curve``: two ranks, one killed at boundary B: the catch-up and the whole recovery, by flashrun's
own event, for a bare loop and one as trainers have (loader, scheduler, clipping, ``item`` in each
step). Iterations per second are B / catch-up.

``cost``: the step time of an undisturbed run with ``--recovery=in-place`` beside torchrun, for
steps of about 1, 5, 20 and 100 ms; the jobs take turns (steady.py). With batches as they are
trained with (hundreds of rows), and the worst case, batches so small that a step does little more
than move gradients about (a copy of them is kept). torchrun with the setting of the allocator that
flashrun's workers have is there too, which shows what the bookkeeping costs by itself. The
processor time of the worker per step depends less on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import steady
from bars import Bars, facts
from steady import spread

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
SCRIPT = HERE / "recover_train.py"


@contextmanager
def training(launcher: str, ranks: int, *arguments: str) -> Iterator[tuple[Path, Any]]:
    """A job of recover_train.py; yields its folder and process, and ends it."""
    out = Path(tempfile.mkdtemp())
    flags = {
        "flashrun": ["--recovery=in-place", f"--events={out}/events"],
        "torchrun": ["--max-restarts=3"],
    }[launcher]
    environ = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    if launcher == "flashrun":
        del environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"]
    head = [str(BIN / launcher), "--standalone", f"--nproc-per-node={ranks}", *flags]
    process = subprocess.Popen(
        [*head, str(SCRIPT), str(out), *arguments],
        env=environ, stdout=subprocess.DEVNULL, stderr=(out / "err").open("w"),
    )  # fmt: skip
    try:
        yield out, process
        if process.wait(900) != 0:
            raise RuntimeError(f"{launcher} failed:\n{(out / 'err').read_text()[-9000:]}")
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(out)


def lines(path: Path) -> list[list[str]]:
    try:
        return [line.split() for line in path.read_text().splitlines(keepends=True) if "\n" in line]
    except FileNotFoundError:
        return []


def steps_of(path: Path) -> list[tuple[int, float]]:
    return [(int(a), float(b)) for a, b in lines(path) if a != "pid"]


def last_step(path: Path) -> int:
    """The last one of `steps_of`, 0: none. (To read 100,000 lines takes as long as many steps.)"""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 200))
            words = file.read().rpartition(b"\n")[0].split()[-2:]
    except FileNotFoundError:
        return 0
    return int(words[0]) if words and words[0] != b"pid" else 0


def await_step(path: Path, step: int, process: Any, seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if last_step(path) >= step:
            return
        if process.poll() is not None:
            raise RuntimeError(f"the job ended before step {step}")
        time.sleep(0.002)
    raise TimeoutError(f"step {step} was not reached in {seconds:.0f} s")


def strike(out: Path, process: Any, rank: int, step: int) -> tuple[float, int]:
    """Kill `rank` after `step`. Returns the moment and the last step it had completed."""
    path = out / f"steps.{rank}"
    await_step(path, step, process)
    pid = next(int(b) for a, b in lines(path) if a == "pid")
    at = time.time()
    os.kill(pid, signal.SIGKILL)
    return at, max(s for s, t in steps_of(path) if t <= at)


def fault_once(launcher: str, rank: int) -> dict[str, float]:
    """Seconds and counts of one fault; see the module."""
    with training(launcher, 3, "--steps=260", "--save-every=150") as (out, process):
        at, last = strike(out, process, rank, 200)
        process.wait(300)
        # flashrun: the next step of the run; torchrun: the first one after its checkpoint
        fresh = last if launcher == "flashrun" else 0
        after = [(s, t) for s, t in steps_of(out / f"steps.{rank}") if t > at and s > fresh]
        moment = after[0][1]
        survivor = [s for s, _ in steps_of(out / f"steps.{(rank + 1) % 3}")]
        setup = float(lines(out / f"setup.{rank}")[-1][0])
        result = {
            "fault to next step": moment - at,
            "set-up": setup,
            "without set-up": moment - at - (setup if launcher == "torchrun" else 0.0),
            "steps a survivor did again": float(len(survivor) - len(set(survivor))),
        }
        if launcher == "flashrun":
            result.update(phases(out))
            # In a replay the set-up writes its file aside: its time is that of an undisturbed fork.
            result["without set-up"] = moment - at - min(setup, result["catch-up"])
    return result


def phases(out: Path) -> dict[str, float]:
    """Seconds of the phases of the (only) recovery, from flashrun's events."""
    for line in (out / "events").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "recovered":
            return {name: float(value) for name, value in event["seconds"].items()}
    raise RuntimeError("no recovery in the events: " + (out / "err").read_text()[-2000:])


def curve_once(boundary: int, trainer: bool) -> dict[str, float]:
    more = ["--trainer"] if trainer else []
    steps = f"--steps={boundary + 400}"
    with training("flashrun", 2, steps, "--save-every=10000000", *more) as (out, process):
        strike(out, process, 1, boundary)
        process.wait(900)
        found = phases(out)
    return {**found, "iterations per second": boundary / found["catch-up"]}


COSTS = (  # width of the model, rows of a batch, steps of a block
    (64, 512, 200), (128, 1024, 60), (256, 1664, 15), (512, 2560, 3), (1280, 16, 15),
)  # fmt: skip


def fault(repeat: int, seed: int, bars: Bars) -> dict[str, Any]:
    draw = random.Random(seed)
    raw: dict[str, list[dict[str, float]]] = {"torchrun": [], "flashrun": []}
    for _ in range(repeat):
        rank = draw.randrange(3)
        for launcher in raw:
            raw[launcher].append(fault_once(launcher, rank))
    result: dict[str, Any] = {"seed": seed, "raw": raw}
    for launcher, runs in raw.items():
        result[launcher] = {key: spread([run[key] for run in runs]) for key in runs[0]}
        told = ", ".join(f"{k} {v['median']:.3f}" for k, v in result[launcher].items())
        print(f"fault, {launcher}: {told}", flush=True)
    for key in ("fault to next step", "without set-up"):
        ratios = [t[key] / f[key] for t, f in zip(raw["torchrun"], raw["flashrun"], strict=True)]
        result[f"times faster, {key}"] = s = spread(ratios)
        print(f"times faster, {key}: {s['median']:.1f} ({s['q1']:.1f} to {s['q3']:.1f})")
    ours = result["flashrun"]["without set-up"]["median"]
    bars.at_most("fault to next step without set-up, s", ours, 0.5)
    faster = result["times faster, fault to next step"]["median"]
    bars.at_least("times faster, fault to next step", faster, 5)
    return result


def curve(boundaries: list[int], repeat: int, bars: Bars) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for kind, trainer in (("bare", False), ("trainer", True)):
        for boundary in boundaries:
            count = repeat if boundary <= 10_000 else 1
            runs = [curve_once(boundary, trainer) for _ in range(count)]
            result[f"{kind}, boundary {boundary}"] = {
                "raw": runs,
                **{key: spread([r[key] for r in runs]) for key in runs[0]},
            }
            s = result[f"{kind}, boundary {boundary}"]
            print(
                f"curve, {kind}, boundary {boundary}: recovery {s['total']['median']:.3f} s,"
                f" catch-up {s['catch-up']['median']:.3f} s,"
                f" {s['iterations per second']['median']:.0f} it/s",
                flush=True,
            )
        # What a catch-up costs whatever its length is apart from what an iteration takes.
        low, high = boundaries[0], boundaries[-1]
        if low == high:
            continue
        first, last = (
            result[f"{kind}, boundary {b}"]["catch-up"]["median"] for b in (low, high)
        )
        rate = (high - low) / (last - first)
        result[f"{kind}, iterations per second between the first and the last"] = rate
        bars.at_least(f"replay, {kind}, iterations per second", rate, 1000 if trainer else 5000)
    return result


def cost(repeat: int, blocks: int, bars: Bars) -> dict[str, Any]:
    launchers = {
        "torchrun": steady.TORCHRUN,
        "flashrun": steady.IN_PLACE,
        "torchrun with the allocator's setting": steady.KEEPS,
    }
    result: dict[str, Any] = {}
    for width, rows, steps in COSTS:
        name = f"width {width}, {rows} rows"
        runs = [steady.turns(launchers, width, rows, steps, blocks) for _ in range(repeat)]
        result[name] = steady.compare(runs, f"cost, {name}")
        retained = spread([run["flashrun"]["retained"] for run in runs])
        result[name]["retained share of gradients"] = retained
        # (The worst case is stated.)
        if rows > 100 and result[name]["torchrun, step"]["median"] > 0.015:
            bars.at_most(f"step, {name}", result[name]["flashrun, ratio of step"]["median"], 1.01)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", choices=["fault", "curve", "cost", []], default=[])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--boundaries", type=int, nargs="+", default=[100, 1000, 10_000, 100_000])
    parser.add_argument("--out", type=Path, default=HERE / "results" / "recovery.json")
    options = parser.parse_args()
    wanted = options.what or ["fault", "curve", "cost"]
    found = json.loads(options.out.read_text()) if options.out.exists() else {}
    parts = {
        "fault": lambda bars: fault(options.repeat, options.seed, bars),
        "curve": lambda bars: curve(options.boundaries, options.repeat, bars),
        "cost": lambda bars: cost(options.repeat, options.blocks, bars),
    }
    status = 0
    options.out.parent.mkdir(exist_ok=True)
    for name in wanted:
        began, bars = facts(), Bars()
        found[name] = {**parts[name](bars), **began, "bars": bars.found}
        status |= bars.status()
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    raise SystemExit(status)


if __name__ == "__main__":
    main()
