"""What a lost node costs with a warm spare: two nodes of two ranks and a spare, on one machine.

    python benchmarks/node_loss.py --repeat 9

The supervisor of the second node gets SIGKILL, and with it everything on that node, right after a
step. Measured, by the wall clock of one machine, is the time from the kill to the next step that a
rank of the lost node completes (on the spare), and flashrun's own account of the recovery. A run in
which the last steps had not been copied restarts all; these are counted apart.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from recovery import BIN, HERE, SCRIPT, await_step, phases, steps_of


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def start(out: Path, port: int, number: int, width: int) -> subprocess.Popen[bytes]:
    events = out / ("events" if number == 0 else f"events.{number}")
    return subprocess.Popen(
        [str(BIN / "flashrun"), "--nnodes=2", "--nproc-per-node=2", "--spares=1",
         "--rdzv-backend=flash",
         f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-conf=is_host={int(number == 0)}",
         "--rdzv-id=loss", "--recovery=in-place", "--max-restarts=1", f"--events={events}",
         str(SCRIPT), str(out), "--steps=400", "--save-every=1000000", f"--width={width}"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL, stderr=(out / f"err.{number}").open("w"),
    )  # fmt: skip


def await_text(path: Path, text: str, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while text not in path.read_text():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {text!r} in {path.read_text()}")
        time.sleep(0.02)


def once(width: int, step: int) -> dict[str, Any]:
    """One lost node. The places are given in the order of arrival."""
    out = Path(tempfile.mkdtemp())
    port = free_port()
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(3):
            nodes.append(start(out, port, number, width))
            if number == 1:
                await_step(out / "steps.2", 1, nodes[0])
        await_text(out / "err.2", "this node is a spare")
        await_step(out / "steps.2", step, nodes[0])
        at = time.time()
        nodes[1].kill()
        nodes[1].wait()
        last = steps_of(out / "steps.2")[-1][0]  # (a worker dies a moment after its supervisor)
        for node in (nodes[0], nodes[2]):
            if node.wait(300) != 0:
                raise RuntimeError((out / "err.0").read_text()[-3000:])
        err = (out / "err.0").read_text()
        if "restart 1 of" in err:
            why = next(line for line in err.splitlines() if "cannot go on in place" in line)
            return {"in place": False, "reason": why}
        steps = steps_of(out / "steps.2")
        after = [t for s, t in steps if s > last and t > at]
        before = [t for s, t in steps if t <= at]
        pace = [b - a for a, b in zip(before[-50:], before[-49:], strict=False)]
        return {"in place": True, "fault to next step": after[0] - at,
                "step": statistics.median(pace), **phases(out)}  # fmt: skip
    finally:
        for node in nodes:
            node.kill()
            node.wait()
        shutil.rmtree(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--width", type=int, default=768, help="of the model: 768 takes some 20 ms")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "node_loss.json")
    options = parser.parse_args()
    draw = random.Random(1)
    runs = []
    for _ in range(options.repeat):
        runs.append(once(options.width, draw.randint(100, 250)))
        print(runs[-1], flush=True)
    good = [r for r in runs if r["in place"]]
    names = [n for n in good[0] if n != "in place"] if good else []
    summary = {name: statistics.median(float(r[name]) for r in good) for name in names}
    print(f"{len(good)} of {len(runs)} in place; medians: {summary}")
    machine = f"{platform.machine()}, {os.cpu_count()} processors, load {os.getloadavg()}"
    options.out.write_text(
        json.dumps({"machine": machine, "python": sys.version.split()[0], "runs": runs,
                    "in place": len(good), "medians": summary}, indent=1) + "\n"
    )  # fmt: skip


if __name__ == "__main__":
    main()
