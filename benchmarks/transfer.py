"""State from peers beside a plain gloo send: bytes per second over loopback, extra memory.

    python benchmarks/transfer.py                   # 1 GB; 1, 2 and 3 donors; about a minute

Each round sends the same tensor once by ``gloo.send``/``recv`` between two fresh processes and once
by flashrun's transfer (checksummed, a distinct part from each donor, each donor a process), in one
run, alternating. Extra memory is the growth of the peak resident set of the receiver over what it
had with the tensor allocated and touched.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bars import Bars, facts

from flashrun.worker.state import as_bytes
from flashrun.worker.transfer import Fetch, Server, cut, shares

HERE = Path(__file__).parent
SPAWN: Any = multiprocessing.get_context("spawn")


def peak() -> int:
    """Peak resident set of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def gloo(rank: int, store: str, size: int, told: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    tensor = torch.full((size,), rank, dtype=torch.uint8)
    dist.barrier()
    before, begin = peak(), time.monotonic()
    if rank == 0:
        dist.send(tensor, 1)
    else:
        dist.recv(tensor, 0)
        told.send((time.monotonic() - begin, peak() - before))
    dist.barrier()
    dist.destroy_process_group()


def donate(size: int, number: int, donors: int, told: Connection) -> None:
    torch.set_num_threads(1)
    tensor = torch.full((size,), 7, dtype=torch.uint8)
    low, high = shares(size, donors)[number]
    server = Server("token", lambda request: ({}, cut([as_bytes(tensor)], low, high)))
    told.send(server.port)
    told.recv()


def receive(ports: list[int], size: int, told: Connection) -> None:
    torch.set_num_threads(1)
    tensor = torch.zeros(size, dtype=torch.uint8)
    view = as_bytes(tensor)
    before, begin = peak(), time.monotonic()

    def take(number: int) -> None:
        low, high = shares(size, len(ports))[number]
        Fetch(f"127.0.0.1:{ports[number]}", "token", {}, 60).into(cut([view], low, high))

    threads = [threading.Thread(target=take, args=(i,)) for i in range(len(ports))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    told.send((time.monotonic() - begin, peak() - before))
    assert int(tensor[0]) == int(tensor[-1]) == 7


def by_gloo(size: int) -> tuple[float, int]:
    ours, theirs = SPAWN.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        both = [SPAWN.Process(target=gloo, args=(r, store, size, theirs)) for r in range(2)]
        for process in both:
            process.start()
        found = ours.recv()
        for process in both:
            process.join()
    return found  # type: ignore[no-any-return]


def by_flashrun(size: int, donors: int) -> tuple[float, int]:
    ends = [SPAWN.Pipe() for _ in range(donors + 1)]
    processes = [
        SPAWN.Process(target=donate, args=(size, i, donors, ends[i][1])) for i in range(donors)
    ]
    for process in processes:
        process.start()
    ports = [ends[i][0].recv() for i in range(donors)]
    receiver = SPAWN.Process(target=receive, args=(ports, size, ends[donors][1]))
    receiver.start()
    found = ends[donors][0].recv()
    receiver.join()
    for ours, _ in ends[:donors]:
        ours.send("end")
    for process in processes:
        process.join()
    return found  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, default=1 << 30)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--donors", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, default=HERE / "results" / "transfer.json")
    options = parser.parse_args()
    began, bars = facts(), Bars()
    raw: dict[str, list[tuple[float, int]]] = {"gloo send": []}
    raw |= {f"flashrun, donors: {n}": [] for n in options.donors}
    for _ in range(options.repeat):
        raw["gloo send"].append(by_gloo(options.bytes))
        for donors in options.donors:
            raw[f"flashrun, donors: {donors}"].append(by_flashrun(options.bytes, donors))
    results = {}
    for name, runs in raw.items():
        speeds = [options.bytes / seconds for seconds, _ in runs]
        ratios = [g[0] / r[0] for g, r in zip(raw["gloo send"], runs, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(runs) > 1 else ratios * 3
        results[name] = {
            "bytes per second": statistics.median(speeds),
            "share of gloo's speed": middle, "q1": low, "q3": high,
            "extra memory of the receiver, bytes": max(extra for _, extra in runs),
        }  # fmt: skip
        print(
            f"{name}: {statistics.median(speeds) / 1e9:.2f} GB/s, {middle:.2f} of gloo's speed"
            f" ({low:.2f} to {high:.2f}), receiver's extra memory"
            f" {max(extra for _, extra in runs) / 1e6:.0f} MB",
            flush=True,
        )
        if name != "gloo send":
            bars.at_least(f"{name}, share of gloo's speed", middle, 0.5)
    found = {**began, "bars": bars.found, "results": results, "raw": raw}
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    raise SystemExit(bars.status())


if __name__ == "__main__":
    main()
