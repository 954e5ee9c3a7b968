"""What every rank needs from the store when a generation opens: sharded beside one TCPStore.

    python benchmarks/bootstrap.py                      # 128 … 10,240 ranks; about 10 minutes
    python benchmarks/bootstrap.py --ranks 512 2048

Simulated on one machine with real sockets and real TCPStore servers, 8 ranks a node, each rank with
connections of its own. Per generation, in two kinds:

*words*: every rank gets the rank table and a word of every other rank, as gloo's groups meet;
*ids*: every rank gets the rank table, the ids of two communicators (one over all ranks, one over 16
nodes), and passes a barrier of all, as NCCL's groups meet.

*Sharded* runs `flashrun.rendezvous.sharded`, one server for each node, and one read of the table a
node, from a server of its own (the control store), into a file in shared memory. *One store* does
the same by `set`, `add`, `get`, `wait` and `multi_get` on a single server, as torch does. The ranks
of a driver process run one after the other in the order in which they could go on.

What does not depend on the machine is counted: requests, bytes and connections per server (the most
of any). Looks for a key that is not there yet are counted apart: whoever waits longer looks more
often (at last every 20 ms), and here many wait for the one whose turn it is. The processor time of
a server is the one thing that is measured and not shared with the simulator. The wall time is of
two cores that play all ranks and all servers.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import tempfile
import time
from collections import Counter
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bars import Bars, facts
from torch._C import _distributed_c10d as c10d

from flashrun.rendezvous.server import look_up_no_names
from flashrun.rendezvous.sharded import Scope, Shards

HERE = Path(__file__).parent
PER_NODE = 8
GROUP_NODES = 16
PROCESSES = 2  # drivers, and as many that host the servers; each has so many descriptors
MANY, MORE_PROCESSES = 4096, 6
SPAWN: Any = multiprocessing.get_context("spawn")
LONG = timedelta(seconds=300)
BYTES_PER_NODE = 200  # of a rank table


def prepare() -> None:
    """Many descriptors; no look-up of the peer's name at each connect (both sides gain alike)."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    look_up_no_names()


def host(count: int, told: Connection) -> None:
    prepare()
    servers = [
        c10d.TCPStore("127.0.0.1", 0, None, True, LONG, wait_for_workers=False)
        for _ in range(count)
    ]
    told.send([server.port for server in servers])
    while told.recv() == "time":
        used = resource.getrusage(resource.RUSAGE_SELF)
        told.send(used.ru_utime + used.ru_stime)


class Counted:
    """A client that counts what its server has to answer."""

    def __init__(
        self, store: Any, asked: Counter[int], carried: Counter[int], vain: Counter[int], node: int
    ) -> None:
        self._store, self._asked, self._carried, self._node = store, asked, carried, node
        self._vain = vain

    def _count(self, size: int) -> None:
        self._asked[self._node] += 1
        self._carried[self._node] += size

    def get(self, key: str) -> bytes:
        value: bytes = self._store.get(key)
        self._count(len(key) + len(value))
        return value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values: list[bytes] = self._store.multi_get(keys)
        self._count(sum(map(len, keys)) + sum(map(len, values)))
        return values

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)
        self._count(len(key) + len(value))

    def compare_set(self, key: str, expected: bytes, value: bytes) -> bytes:
        found: bytes = self._store.compare_set(key, expected, value)
        if found == expected:
            self._vain[self._node] += 1
            return found
        self._count(len(key) + len(expected) + len(value) + len(found))
        return found

    def add(self, key: str, amount: int) -> int:
        self._count(len(key) + 8)
        return self._store.add(key, amount)  # type: ignore[no-any-return]

    def check(self, keys: list[str]) -> bool:
        self._count(sum(map(len, keys)))
        return self._store.check(keys)  # type: ignore[no-any-return]

    def wait(self, keys: list[str]) -> None:
        self._count(sum(map(len, keys)))
        self._store.wait(keys)


class Driver:
    """Plays the nodes number, number + of, … of a cluster."""

    def __init__(self, number: int, of: int, nodes: int, ports: list[int], barrier: Any) -> None:
        self.mine = range(number, nodes, of)
        self.nodes = nodes
        self.addresses = [("127.0.0.1", port) for port in ports]
        self.meet = barrier
        self.asked: Counter[int] = Counter()
        self.carried: Counter[int] = Counter()
        self.vain: Counter[int] = Counter()
        self.connections: Counter[int] = Counter()
        self.number_of = {address: node for node, address in enumerate(self.addresses)}

    def connect(self, address: str, port: int) -> Counted:
        node = self.number_of[address, port]
        self.connections[node] += 1
        store = c10d.TCPStore(address, port, None, False, LONG, wait_for_workers=False)
        return Counted(store, self.asked, self.carried, self.vain, node)

    def group(self, node: int) -> range:
        first = node - node % GROUP_NODES
        return range(first, min(first + GROUP_NODES, self.nodes))

    @property
    def ranks(self) -> list[tuple[int, int]]:
        return [(node, rank) for node in self.mine for rank in range(PER_NODE)]

    def table(self, folder: Path, read: Any) -> None:
        """Each node reads it once, and every rank from the file."""
        for node in self.mine:
            (folder / str(node)).write_bytes(read(node))
            for _ in range(PER_NODE):
                (folder / str(node)).read_bytes()

    def sharded(self, what: str, generation: int, shards: dict[Any, Shards], control: Any) -> None:
        members = [
            range(node * PER_NODE, (node + 1) * PER_NODE) for node in range(self.nodes)
        ]
        key = f"{generation}.{what}"
        worlds = {
            (node, rank): Scope(shards[node, rank], f"{key}/world", range(self.nodes), members, 300)
            for node, rank in self.ranks
        }
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            self.table(Path(folder), lambda node: control[node].get("table"))
        for rank in range(PER_NODE):
            for node in self.mine:
                word = f"{40000 + rank}" if what == "words" else None
                worlds[node, rank].arrive("meet", node * PER_NODE + rank, word)
        if 0 in self.mine:
            worlds[0, 0].set("id", b"i" * 128)
        for name in ("meet/all",) if what == "words" else ("meet/all", "id"):
            home = worlds[self.mine[0], 0].home(name)
            for node in sorted(self.mine, key=lambda n: (n - home) % self.nodes):
                for rank in range(PER_NODE):
                    worlds[node, rank].get(name)
        if what == "ids":
            self.group_ids(key, shards, members)

    def group_ids(self, key: str, shards: dict[Any, Shards], members: list[range]) -> None:
        for first in range(0, self.nodes, GROUP_NODES):
            nodes = self.group(first)
            groups = {
                (node, rank): Scope(
                    shards[node, rank], f"{key}/g{first}", nodes, members[: len(nodes)], 300
                )
                for node in nodes if node in self.mine for rank in range(PER_NODE)
            }  # fmt: skip
            if first in self.mine:
                groups[first, 0].set("id", b"i" * 128)
            for scope in groups.values():
                home = scope.home("id")
                break
            order = sorted(groups, key=lambda at: (at[0] - first - home) % len(nodes))
            for at in order:
                groups[at].get("id")

    def one(self, what: str, generation: int, stores: dict[Any, Counted]) -> None:
        """The same with one store."""
        size = self.nodes * PER_NODE
        key = f"{generation}.{what}"
        if what == "ids" and 0 in self.mine:
            stores[0, 0].set(f"{key}/id", b"i" * 128)
        for (node, rank), store in stores.items():
            store.get("table")
            if what == "words":
                store.set(f"{key}/{node * PER_NODE + rank}", f"{40000 + rank}".encode())
                continue
            if rank == 0 and node % GROUP_NODES == 0:
                store.set(f"{key}/g{node}", b"i" * 128)
            if store.add(f"{key}/count", 1) == size:
                store.set(f"{key}/all", b"1")
        names = [f"{key}/{number}" for number in range(size)]
        for (node, _), store in stores.items():
            if what == "words":
                store.wait(names)
                store.multi_get(names)
            else:
                store.wait([f"{key}/all"])
                store.get(f"{key}/id")
                store.get(f"{key}/g{node - node % GROUP_NODES}")

    def run(self, kind: str, what: str, generations: int, told: Connection) -> None:
        self.meet.wait()
        begin = time.monotonic()
        shards: dict[Any, Shards] = {}
        stores: dict[Any, Counted] = {}
        control: dict[int, Counted] = {}
        table = b"t" * (BYTES_PER_NODE * self.nodes)
        if kind == "sharded":
            shards = {at: Shards(self.addresses[:-1], at[0], self.connect) for at in self.ranks}
            for (node, _), opened in shards.items():
                opened[node]
            control = {node: self.connect(*self.addresses[-1]) for node in self.mine}
            writer = control[self.mine[0]]
        else:
            stores = {at: self.connect(*self.addresses[-1]) for at in self.ranks}
            writer = stores[self.ranks[0]]
        if 0 in self.mine:
            writer.set("table", table)
        self.meet.wait()
        told.send(time.monotonic() - begin)
        seconds = []
        for generation in range(generations + 1):
            if generation == 1:  # the first one opens the connections to other nodes as well
                self.asked.clear()
                self.carried.clear()
                self.vain.clear()
                told.send("warm")
                told.recv()
            self.meet.wait()
            begin = time.monotonic()
            if kind == "sharded":
                self.sharded(what, generation, shards, control)
            else:
                self.one(what, generation, stores)
            self.meet.wait()
            seconds.append(time.monotonic() - begin)
        told.send(
            {
                "first": seconds[0], "generations": seconds[1:], "asked": dict(self.asked),
                "carried": dict(self.carried), "connections": dict(self.connections),
                "vain": dict(self.vain),
            }
        )  # fmt: skip


def drive(
    number: int, of: int, nodes: int, ports: list[int], meet: Any, kind: str, what: str,
    generations: int, told: Connection,
) -> None:  # fmt: skip
    prepare()
    Driver(number, of, nodes, ports, meet).run(kind, what, generations, told)


def serve(count: int, processes: int) -> tuple[list[int], list[Connection]]:
    """Servers in a few processes: their ports, and the ways to these."""
    pipes, ports = [], [0] * count
    for number in range(min(processes, count)):
        mine = range(number, count, processes)
        ours, theirs = SPAWN.Pipe()
        SPAWN.Process(target=host, args=(len(mine), theirs)).start()
        for node, port in zip(mine, ours.recv(), strict=True):
            ports[node] = port
        pipes.append(ours)
    return ports, pipes


def processor(pipes: list[Connection]) -> float:
    for pipe in pipes:
        pipe.send("time")
    return sum(pipe.recv() for pipe in pipes)


def once(kind: str, what: str, ranks: int, generations: int) -> dict[str, float]:
    nodes = ranks // PER_NODE
    of = MORE_PROCESSES if ranks > MANY else PROCESSES
    ports, pipes = serve(nodes, of) if kind == "sharded" else ([], [])
    single, way = serve(1, 1)  # the one store, or the control store beside the shards
    meet = SPAWN.Barrier(of)
    ends = []
    for number in range(of):
        ours, theirs = SPAWN.Pipe()
        told = (number, of, nodes, [*ports, *single], meet, kind, what, generations, theirs)
        SPAWN.Process(target=drive, args=told).start()
        ends.append(ours)
    connect = max(end.recv() for end in ends)
    for end in ends:
        end.recv()
    watched = pipes or way
    before = processor(watched)
    for end in ends:
        end.send("go")
    found = [end.recv() for end in ends]
    used = (processor(watched) - before) / generations / max(1, len(ports))
    for pipe in [*pipes, *way]:
        pipe.send("end")

    def of_servers(name: str) -> list[int]:
        total: Counter[int] = Counter()
        for part in found:
            total.update(part[name])
        control = total.pop(nodes, 0) if kind == "sharded" else 0
        return [max(total.values(), default=0), control]

    times = [max(part["generations"][g] for part in found) for g in range(generations)]
    asked, carried, connections = map(of_servers, ("asked", "carried", "connections"))
    result: dict[str, float] = {
        "connect, s": connect,
        "first generation, s": max(part["first"] for part in found),
        "generation, s": statistics.median(times),
        "processor time of a server, ms": used * 1e3,
        "requests of a server": asked[0] / generations,
        "looks in vain": of_servers("vain")[0] / generations,
        "bytes of a server": carried[0] / generations,
        "connections of a server": connections[0],
    }
    if kind == "sharded":
        result["requests of the control store"] = asked[1] / generations
        result["bytes of the control store"] = carried[1] / generations
        result["connections of the control store"] = connections[1]
    return result


def judge(raw: dict[str, dict[str, list[dict[str, float]]]], bars: Bars) -> None:
    """Compare with what is asked for, as far as those sizes were run: a shard's work does not grow
    from 512 to 10,240 ranks, and at 2,048 a generation (words and ids) is 5 times as fast."""

    def middle(ranks: int, what: str, kind: str, key: str) -> float:
        return statistics.median(run[key] for run in raw[f"{ranks} {what}"][kind])

    server = "processor time of a server, ms"
    for what, key in (
        ("ids", server), ("ids", "requests of a server"), ("words", "requests of a server"),
        ("ids", "connections of a server"), ("words", "connections of a server"),
    ):  # fmt: skip
        if {f"512 {what}", f"10240 {what}"} <= raw.keys():
            ratio = middle(10_240, what, "sharded", key) / middle(512, what, "sharded", key)
            bars.at_most(f"{what}: {key}, 10,240 ranks / 512", ratio, 1.35)
    if {"2048 words", "2048 ids"} <= raw.keys():
        one, sharded = (
            sum(middle(2048, what, kind, "generation, s") for what in ("words", "ids"))
            for kind in ("one store", "sharded")
        )
        bars.at_least("words and ids at 2,048, wall time, one store / sharded", one / sharded, 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[128, 512, 2048, 10_240])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--generations", type=int, default=3)
    parser.add_argument("--words-most", type=int, default=2048, help="ranks of one store's *words*")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "bootstrap.json")
    options = parser.parse_args()
    began = facts()
    raw: dict[str, Any] = {}
    for ranks in options.ranks:
        for what in ("words", "ids"):
            both: dict[str, list[dict[str, float]]] = {"sharded": [], "one store": []}
            if what == "words" and ranks > options.words_most:
                del both["one store"]  # its requests grow with the square
            for _ in range(options.repeat):
                for kind, runs in both.items():
                    runs.append(once(kind, what, ranks, options.generations))
            raw[f"{ranks} {what}"] = both
            for kind, runs in both.items():
                middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
                told = ", ".join(f"{key} {value:.4g}" for key, value in middle.items())
                print(f"{ranks} ranks, {what}, {kind}: {told}", flush=True)
            if len(both) == 2:
                pairs = list(zip(both["one store"], both["sharded"], strict=True))
                for key in ("generation, s", "processor time of a server, ms"):
                    ratio = statistics.median(a[key] / b[key] for a, b in pairs)
                    print(f"{ranks} ranks, {what}: one store / sharded, {key}: {ratio:.2f}")
            options.out.write_text(json.dumps({**began, "raw": raw}, indent=1) + "\n")
    bars = Bars()
    judge(raw, bars)
    options.out.write_text(json.dumps({**began, "raw": raw, "bars": bars.found}, indent=1) + "\n")
    raise SystemExit(bars.status())


if __name__ == "__main__":
    main()
