"""What the busiest server hears of a script's default store: keys spread over the nodes beside one
TCPStore.

    python benchmarks/default_store.py                  # 128, 512, 2,048 ranks
    python benchmarks/default_store.py --ranks 128

Simulated on one machine with real sockets and real TCPStore servers, 8 ranks a node, each rank with
a client of its own (`flashrun.worker.spread`; of one node, which is as one TCPStore, and of all).
Each rank, in this order:

*open*: opens its default store, with the ``add`` by which a TCPStore's clients are counted;
*own keys*: sets a key of its own, and reads its neighbour's;
*barriers*: passes four barriers, each a counter that all add to, and a key that the last one sets,
as torch's own. All ranks have to reach one server for each of these, wherever it is.

Counted are the requests and the connections of the server that has the most, after each part. The
wall time is of two cores that play all ranks and all servers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bars import facts
from bootstrap import LONG, PER_NODE, PROCESSES, SPAWN, Counted, prepare, serve
from torch._C import _distributed_c10d as c10d

from flashrun.rendezvous.table import RankTable, Seat, assign_ranks
from flashrun.worker.script_store import look
from flashrun.worker.spread import INIT, Spread

HERE = Path(__file__).parent
BARRIERS = 4


def table_of(ports: list[int]) -> RankTable:
    seats = [
        Seat(f"n{i}", PER_NODE, "trainer", "127.0.0.1", store=port)
        for i, port in enumerate(ports)
    ]
    size = PER_NODE * len(ports)
    return RankTable(0, 0, 0, "job", size, "127.0.0.1", ports[0], True, assign_ranks(seats))


class Driver:
    """Plays the ranks number, number + of, …"""

    def __init__(self, number: int, of: int, ranks: int, ports: list[int], barrier: Any) -> None:
        self.ranks = ranks
        self.meet = barrier
        self.asked: Counter[int] = Counter()
        self.vain: Counter[int] = Counter()
        self.connections: Counter[int] = Counter()
        self.place_of = {port: place for place, port in enumerate(ports)}
        table = table_of(ports)
        self.stores = {
            rank: Spread(table, rank // PER_NODE % len(ports), self.open)
            for rank in range(number, ranks, of)
        }

    def open(self, host: str, port: int) -> Counted:
        place = self.place_of[port]
        self.connections[place] += 1
        store = c10d.TCPStore(host, port, None, False, LONG, wait_for_workers=False)
        return Counted(store, self.asked, Counter(), self.vain, place)

    def opened(self) -> None:
        for store in self.stores.values():
            store.add(INIT, 1)

    def own_keys(self) -> None:
        for rank, store in self.stores.items():
            store.set(f"default_pg/0//of {rank}", b"127.0.0.1:40000")
        self.meet.wait()
        for rank, store in self.stores.items():
            assert look(store, f"default_pg/0//of {(rank + 1) % self.ranks}") is not None

    def barriers(self) -> None:
        for number in range(BARRIERS):
            key = f"default_pg/0//barrier:{number}"
            for store in self.stores.values():
                if store.add(key, 1) == self.ranks:
                    store.set(f"{key}:last", b"1")
            self.meet.wait()
            for store in self.stores.values():
                assert look(store, f"{key}:last") is not None

    def run(self, told: Connection) -> None:
        found = {}
        for what, part in (
            ("open", self.opened), ("own keys", self.own_keys), ("barriers", self.barriers)
        ):  # fmt: skip
            self.meet.wait()
            begin = time.monotonic()
            part()
            self.meet.wait()
            spent = time.monotonic() - begin
            found[what] = spent, Counter(self.asked), Counter(self.connections)
            self.asked.clear()
        told.send(found)


def drive(
    number: int, of: int, ranks: int, ports: list[int], meet: Any, told: Connection
) -> None:
    prepare()
    Driver(number, of, ranks, ports, meet).run(told)


def once(ranks: int, homes: int) -> dict[str, float]:
    ports, pipes = serve(homes, PROCESSES)
    meet = SPAWN.Barrier(PROCESSES)
    ends = []
    for number in range(PROCESSES):
        ours, theirs = SPAWN.Pipe()
        told = (number, PROCESSES, ranks, ports, meet, theirs)
        SPAWN.Process(target=drive, args=told).start()
        ends.append(ours)
    found = [end.recv() for end in ends]
    for pipe in pipes:
        pipe.send("end")
    result: dict[str, float] = {}
    for what in found[0]:
        asked, connections = Counter[int](), Counter[int]()
        for part in found:
            asked.update(part[what][1])
            connections.update(part[what][2])
        result[f"{what}: requests"] = max(asked.values())
        result[f"{what}: connections"] = max(connections.values())
        result[f"{what}: s"] = max(part[what][0] for part in found)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "default_store.json")
    options = parser.parse_args()
    began = facts()
    raw: dict[str, Any] = {}
    for ranks in options.ranks:
        kinds = {"spread": ranks // PER_NODE, "one store": 1}
        both: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
        for _ in range(options.repeat):
            for kind, homes in kinds.items():
                both[kind].append(once(ranks, homes))
        raw[str(ranks)] = both
        for kind, runs in both.items():
            middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            told = ", ".join(f"{key} {value:.4g}" for key, value in middle.items())
            print(f"{ranks} ranks, {kind}: {told}", flush=True)
        options.out.write_text(json.dumps({**began, "raw": raw}, indent=1) + "\n")


if __name__ == "__main__":
    main()
