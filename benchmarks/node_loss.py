"""What a lost node costs with a warm spare, and what it costs to be ready for one.

    python benchmarks/node_loss.py killed --repeat 9
    python benchmarks/node_loss.py cut --repeat 3       # needs root: nodes are network namespaces
    python benchmarks/node_loss.py copying

``killed``: two nodes of two ranks and a spare, on one machine. The supervisor of the second node
gets SIGKILL, and with it everything on that node, right after a step. Measured, by the wall clock
of one machine, is the time from the kill to the next step that a rank of the lost node completes
(on the spare), and flashrun's own account of the recovery. A run in which the last steps had not
been copied restarts all; these are counted apart.

``cut``: the same three in namespaces of their own, and the second one's cable is taken out. From
then to the next step, with the default settings (heartbeats every 5 s, lost after 15) and with fast
ones (1 and 3), also without the detection timeout itself.

``copying``: what a node's ranks leave is streamed to the next node in every step. Step time of two
nodes of one rank (over loopback), beside the same job as one node of two ranks, in turns (see
steady.py); and what an agent then sends and uses per step (all of it: the copies and its words with
the control store).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import steady
from bars import Bars, facts
from recovery import BIN, HERE, SCRIPT, await_step, phases, steps_of

from flashrun.node import tags
from flashrun.node.process_tree import read_tag

SETTINGS = {"default": (5.0, 15.0), "fast": (1.0, 3.0)}  # heartbeat, detection: seconds


def start(out: Path, number: int, width: int, endpoint: str, *more: str,
          within: list[str] | None = None) -> subprocess.Popen[bytes]:  # fmt: skip
    events = out / ("events" if number == 0 else f"events.{number}")
    return subprocess.Popen(
        [*(within or []), str(BIN / "flashrun"), "--nnodes=2", "--nproc-per-node=2", "--spares=1",
         "--rdzv-backend=flash",
         f"--rdzv-endpoint={endpoint}", f"--rdzv-conf=is_host={int(number == 0)}",
         "--rdzv-id=loss", "--recovery=in-place", "--max-restarts=1", f"--events={events}", *more,
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


def lose(
    begin: Callable[[Path, int], subprocess.Popen[bytes]],
    strike: Callable[[subprocess.Popen[bytes]], None],
    step: int,
    in_flight: int,
) -> dict[str, Any]:
    """One lost node. The places are given in the order of arrival.

    Args:
        begin: starts a node, by its number.
        strike: takes the second one away.
        step: after which.
        in_flight: steps that its ranks may still complete.
    """
    out = Path(tempfile.mkdtemp())
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(3):
            nodes.append(begin(out, number))
            if number == 1:
                await_step(out / "steps.2", 1, nodes[0])
        await_text(out / "err.2", "this node is a spare")
        await_step(out / "steps.2", step, nodes[0])
        at = time.time()
        strike(nodes[1])
        last = steps_of(out / "steps.2")[-1][0]  # (a worker dies a moment after its supervisor)
        for node in (nodes[0], nodes[2]):
            if node.wait(300) != 0:
                raise RuntimeError((out / "err.0").read_text()[-3000:])
        err = (out / "err.0").read_text()
        if "restart 1 of" in err:
            why = next(line for line in err.splitlines() if "cannot go on in place" in line)
            return {"in place": False, "reason": why}
        steps = steps_of(out / "steps.2")
        after = [t for s, t in steps if s > last + in_flight and t > at]
        before = [t for s, t in steps if t <= at]
        pace = [b - a for a, b in zip(before[-50:], before[-49:], strict=False)]
        return {"in place": True, "fault to next step": after[0] - at,
                "step": statistics.median(pace), **phases(out)}  # fmt: skip
    finally:
        for node in nodes:
            node.kill()
            node.wait()
        shutil.rmtree(out)


def killed_once(width: int, step: int) -> dict[str, Any]:
    endpoint = f"127.0.0.1:{steady.free_port()}"

    def kill(node: subprocess.Popen[bytes]) -> None:
        node.kill()
        node.wait()

    return lose(lambda out, number: start(out, number, width, endpoint), kill, step, 0)


def cut_once(width: int, step: int, heartbeat: float, detection: float) -> dict[str, Any]:
    sys.path.insert(0, str(HERE.parent))
    from tests import netns

    reason = netns.why_not()
    if reason is not None:
        raise SystemExit(f"node_loss.py cut: {reason}")
    with netns.Network(3) as network:
        endpoint = f"{network.address(0)}:29400"
        flags = [f"--heartbeat-interval={heartbeat}", f"--detection-timeout={detection}"]

        def begin(out: Path, number: int) -> subprocess.Popen[bytes]:
            return start(out, number, width, endpoint, *flags, within=network.within(number))

        return lose(begin, lambda _: network.cut(1), step, 1)


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    good = [r for r in runs if r["in place"]]
    names = [n for n in good[0] if n != "in place"] if good else []
    medians = {name: statistics.median(float(r[name]) for r in good) for name in names}
    print(f"{len(good)} of {len(runs)} in place; medians: {medians}", flush=True)
    return {"runs": runs, "in place": len(good), "medians": medians}


def killed(options: argparse.Namespace, bars: Bars) -> dict[str, Any]:
    draw = random.Random(1)
    runs = []
    for _ in range(options.repeat):
        runs.append(killed_once(options.width, draw.randint(100, 250)))
        print(runs[-1], flush=True)
    found = summary(runs)
    if found["medians"]:
        took = found["medians"]["fault to next step"]
        bars.at_most("node killed: fault to next step, s", took, 1.5)
    return found


def cut(options: argparse.Namespace, bars: Bars) -> dict[str, Any]:
    draw = random.Random(1)
    found = {}
    for name, (heartbeat, detection) in SETTINGS.items():
        runs = []
        for _ in range(options.repeat):
            runs.append(cut_once(options.width, draw.randint(100, 250), heartbeat, detection))
            print(name, runs[-1], flush=True)
        found[name] = summary(runs)
        if found[name]["medians"]:
            more = found[name]["medians"]["fault to next step"] - detection
            bars.at_most(f"node cut off, {name}: beyond the detection timeout, s", more, 2.0)
    return found


def sent(pid: int) -> int:
    """Bytes that a process has sent by TCP, over the sockets that it has now (ss(8))."""
    shown = subprocess.run(
        ["ss", "-tinpOH", "state", "established"], capture_output=True, text=True, check=True
    ).stdout
    return sum(
        int(found.group(1))
        for line in shown.splitlines()
        if f"pid={pid}," in line and (found := re.search(r"bytes_sent:(\d+)", line))
    )


class Agents:
    """What the agents of a job have sent and used, between two looks."""

    def __init__(self, job: steady.Job) -> None:
        self.processes = [
            child
            for node in job.processes
            for child in psutil.Process(node.pid).children()
            if tags.role_of(read_tag(child.pid)) == "agent"
        ]

    def look(self) -> tuple[int, float]:
        used = [process.cpu_times() for process in self.processes]
        return (
            sum(sent(process.pid) for process in self.processes),
            sum(times.user + times.system for times in used),
        )


def copying(options: argparse.Namespace, bars: Bars) -> dict[str, Any]:
    steps, blocks = 40, options.blocks
    launchers = {"one node": steady.IN_PLACE, "two nodes": steady.TWO_NODES}
    with ExitStack() as stack:
        jobs = {
            name: steady.Job(launcher, (options.width, 64, steps, blocks))
            for name, launcher in launchers.items()
        }
        for job in jobs.values():
            stack.callback(job.close)
            job.block()
        agents = {name: Agents(job) for name, job in jobs.items()}
        before = {name: each.look() for name, each in agents.items()}
        for block in range(blocks):
            if block == blocks - 1:  # they end with the last one
                after = {name: each.look() for name, each in agents.items()}
            for job in list(jobs.values())[:: 1 if block % 2 else -1]:
                job.block()
        run = {name: job.ended() for name, job in jobs.items()}
    found = steady.compare([run], "copying")
    for name in launchers:
        count = len(agents[name].processes) * steps * (blocks - 1)
        bytes_sent, used = (b - a for a, b in zip(before[name], after[name], strict=True))
        found[f"{name}, bytes sent of an agent per step"] = bytes_sent / count
        found[f"{name}, processor of an agent per step"] = used / count
        print(f"{name}: an agent sends {bytes_sent / count:,.0f} bytes and uses"
              f" {used / count * 1e3:.2f} ms of processor a step", flush=True)  # fmt: skip
    return found


PARTS = {"killed": killed, "cut": cut, "copying": copying}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[*PARTS])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--width", type=int, default=768, help="of the model: 768 takes some 20 ms")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "node_loss.json")
    options = parser.parse_args()
    bars = Bars()
    results = json.loads(options.out.read_text()) if options.out.exists() else {}
    for part in options.parts:
        ran = facts()
        found = PARTS[part](options, bars)
        results[part] = {**ran, **found, "bars": dict(bars.found)}
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    raise SystemExit(bars.status())


if __name__ == "__main__":
    main()
