"""From the start of all agents to the rank table at each: flashrun's membership beside torchrun's
own c10d rendezvous, with as many simulated agents as the machine carries.

    python benchmarks/rendezvous.py                       # 8 … 512 agents; 5 minutes

Agents are threads of a few processes, at one real TCPStore on loopback: real coordinators
(`flashrun.control.coordinator`), and torch's own `DynamicRendezvousHandler` on its C10dBackend.
torch's needs much more than the machine can give for thousands of agents: each of them reads and
unpickles the state of all whenever any of them has come. Beside the seconds, which are this
machine's, there are the requests and bytes of all agents together until the last has its table.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bars import facts
from control_traffic import PROCESSES, SPAWN, carried, nodes, prepare, serve

HERE = Path(__file__).parent
LIMIT_S = 120.0
TORCHS = "torch's c10d"


def torchs(number: int, total: int, port: int, told: Connection) -> None:
    """Plays the agents number, number + PROCESSES, …"""
    prepare()
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    begin = time.monotonic()

    def agent() -> None:
        parameters = RendezvousParameters(
            "c10d", f"127.0.0.1:{port}", "compared", total, total, local_addr="127.0.0.1",
            is_host="0", join_timeout=600,
        )  # fmt: skip
        backend, store = create_backend(parameters)
        info = create_handler(store, backend, parameters).next_rendezvous()
        assert info.world_size == total

    threads = [threading.Thread(target=agent) for _ in range(number, total, PROCESSES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    told.send(time.monotonic() - begin)
    while told.recv() == "count":
        told.send(carried(port))
    os._exit(0)


def once(kind: str, total: int) -> dict[str, float] | None:
    """Until the last one has it; None: longer than `LIMIT_S`."""
    ours, theirs = SPAWN.Pipe()
    processes = [SPAWN.Process(target=serve, args=(theirs,))]
    processes[0].start()
    port = ours.recv()
    ends = []
    for number in range(min(PROCESSES, total)):
        mine, other = SPAWN.Pipe()
        target, arguments = (
            (torchs, (number, total, port, other)) if kind == TORCHS
            else (nodes, (number, total, port, False, other))
        )  # fmt: skip
        processes.append(SPAWN.Process(target=target, args=arguments))
        processes[-1].start()
        ends.append(mine)
    until = time.monotonic() + LIMIT_S
    seconds = [end.recv() for end in ends if end.poll(max(0.0, until - time.monotonic()))]
    found: dict[str, float] | None = None
    if len(seconds) == len(ends):
        for end in ends:
            end.send("count")
        sent, received, requests = map(sum, zip(*(end.recv() for end in ends), strict=True))
        found = {"s": max(seconds), "requests": requests, "bytes": sent + received}
    for process in processes:
        process.kill()
        process.join()
    return found


def shown(found: list[dict[str, float] | None]) -> str:
    known = [one for one in found if one is not None]
    if len(known) < len(found):
        return f"not within {LIMIT_S:.0f} s"
    s, requests, size = (
        statistics.median(one[name] for one in known) for name in ("s", "requests", "bytes")
    )
    return f"{s:.2f} s, {requests:.0f} requests, {size / 1e6:.1f} MB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, nargs="+", default=[8, 32, 64, 128, 256, 512])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "rendezvous.json")
    options = parser.parse_args()
    began = facts()
    raw: dict[str, Any] = {}
    for total in options.agents:
        both: dict[str, list[dict[str, float] | None]] = {"flashrun": [], TORCHS: []}
        for kind, found in both.items():
            if None in raw.get(str(total // 2), {}).get(kind, []):
                continue  # half of them took too long
            for _ in range(options.repeat):
                found.append(once(kind, total))
                if found[-1] is None:
                    break
        raw[str(total)] = both
        told = "; ".join(f"{kind} {shown(found)}" for kind, found in both.items() if found)
        print(f"{total} agents: {told}", flush=True)
        options.out.write_text(json.dumps({**began, "raw": raw}, indent=1) + "\n")


if __name__ == "__main__":
    main()
