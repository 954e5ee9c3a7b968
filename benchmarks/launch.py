"""flashrun beside torchrun: time to the first step, memory of the process tree, step time.

Both launchers run the same script alternately in one go; medians and quartiles of the ratios go to
standard output and everything measured to a JSON file.

    python benchmarks/launch.py                      # 1, 2, 4, 8 ranks; about 8 minutes on 2 cores
    python benchmarks/launch.py --ranks 4 --repeat 3

Times are from the start of the launcher's process to the end of the last rank's first optimizer
step (wall clock of one machine). Memory is the sum of PSS (proportional set size) over launcher and
descendants while all ranks are between two steps. Step time is that of steady.py, for steps of some
5 ms and 20 ms: jobs in turns, with the launcher alone (``--recovery=restart``) and with the
default, which prepares each worker to be replaced in place.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import steady
from bars import Bars, facts

HERE = Path(__file__).parent
SCRIPT = HERE / "first_step.py"
BIN = Path(sys.executable).parent
LAUNCHERS = ("torchrun", "flashrun")


def command(launcher: str, ranks: int, *arguments: str) -> list[str]:
    head = [str(BIN / launcher), "--standalone", f"--nproc-per-node={ranks}"]
    return [*head, str(SCRIPT), *arguments]


def launch_seconds(launcher: str, ranks: int) -> float:
    """Seconds from the launcher's start to the end of every rank's first step."""
    with tempfile.TemporaryDirectory() as out:
        begin = time.time()
        subprocess.run(
            command(launcher, ranks, out, "1"), check=True, timeout=300, capture_output=True
        )
        firsts = [float((Path(out) / f"first.{r}").read_text()) for r in range(ranks)]
        return max(firsts) - begin


def tree_pss(launcher: str, ranks: int) -> int:
    """Bytes of PSS of the launcher and everything below it, with all ranks in their loop."""
    out = tempfile.mkdtemp()
    go = os.path.join(out, "go")
    process = subprocess.Popen(
        command(launcher, ranks, out, "20", go),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 120
        while len(list(Path(out).glob("steps.*"))) < ranks:
            if time.monotonic() > deadline or process.poll() is not None:
                raise RuntimeError(f"{launcher} with {ranks} ranks did not get to its loop")
            time.sleep(0.05)
        time.sleep(1.0)  # what is still being set up (threads, allocators) settles
        root = psutil.Process(process.pid)
        return sum(p.memory_full_info().pss for p in [root, *root.children(recursive=True)])
    finally:
        Path(go).touch()
        process.wait(60)
        shutil.rmtree(out)


def summary(values: dict[str, list[float]]) -> dict[str, float]:
    """Medians of both and of the ratios of neighbouring runs, with the ratios' quartiles."""
    ratios = [f / t for t, f in zip(values["torchrun"], values["flashrun"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
    return {
        "torchrun": statistics.median(values["torchrun"]),
        "flashrun": statistics.median(values["flashrun"]),
        "ratio": middle,
        "ratio_q1": low,
        "ratio_q3": high,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=60)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "launch.json")
    options = parser.parse_args()

    raw: dict[str, dict[str, list[float]]] = {}
    began, bars = facts(), Bars()

    def measure(name: str, unit: str, function, *arguments) -> None:  # type: ignore[no-untyped-def]
        values: dict[str, list[float]] = {launcher: [] for launcher in LAUNCHERS}
        for _ in range(options.repeat):
            for launcher in LAUNCHERS:
                values[launcher].append(function(launcher, *arguments))
        raw[f"{name} [{unit}]"] = values
        s = summary(values)
        print(
            f"{name}: torchrun {s['torchrun']:.4g} {unit}, flashrun {s['flashrun']:.4g} {unit},"
            f" ratio {s['ratio']:.3f} ({s['ratio_q1']:.3f} to {s['ratio_q3']:.3f})",
            flush=True,
        )

    for ranks in options.ranks:
        measure(name := f"start to first step, {ranks} ranks", "s", launch_seconds, ranks)
        if ranks == 4:
            bars.at_most(name, summary(raw[f"{name} [s]"])["ratio"], 0.6)
    for ranks in options.ranks:
        if ranks in (1, 4):
            measure(name := f"memory of the tree (PSS), {ranks} ranks", "bytes", tree_pss, ranks)
            if ranks == 4:
                bars.at_most(name, summary(raw[f"{name} [bytes]"])["ratio"], 0.6)
    launchers = {
        "torchrun": steady.TORCHRUN,
        "flashrun --recovery=restart": steady.RESTART,
        "flashrun": steady.IN_PLACE,
    }
    steps = {}
    for width, rows, count in ((128, 1024, 60), (256, 1664, 15)):
        runs = [
            steady.turns(launchers, width, rows, count, options.blocks)
            for _ in range(options.repeat)
        ]
        name = f"width {width}, {rows} rows"
        steps[name] = steady.compare(runs, "step")
        for launcher in ("flashrun --recovery=restart", "flashrun"):
            ratio = steps[name][f"{launcher}, ratio of step"]["median"]
            bars.at_most(f"step, {name}, {launcher}", ratio, 1.01)

    options.out.parent.mkdir(exist_ok=True)
    results = {name: summary(values) for name, values in raw.items()}
    found = {**began, "bars": bars.found, "results": results, "raw": raw, "step": steps}
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    raise SystemExit(bars.status())


if __name__ == "__main__":
    main()
