"""The sharded bootstrap store: threads stand for workers, each with connections of its own to real
TCPStore servers, one for each node."""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch._C import _distributed_c10d as c10d

from flashrun.rendezvous import sharded
from flashrun.rendezvous.server import look_up_no_names, open_listener, serve
from flashrun.rendezvous.sharded import (
    FAN_OUT,
    Address,
    Scope,
    ScopeStore,
    Shard,
    Shards,
    children_of,
    connect,
    parent_of,
)
from tests import helpers

DEADLINE = 30.0

look_up_no_names()  # as many connect at a time, which not every resolver answers


@contextmanager
def shards_of(nodes: int) -> Iterator[list[Address]]:
    """A server for each node."""
    servers = [
        c10d.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)
        for _ in range(nodes)
    ]
    yield [("127.0.0.1", server.port) for server in servers]


def members(nodes: int, workers: int) -> list[range]:
    """So many on each node."""
    return [range(node * workers, (node + 1) * workers) for node in range(nodes)]


def everybody(
    addresses: Sequence[Address],
    nodes: Sequence[int],
    workers: int,
    body: Callable[[Scope, int], Any],
    prefix: str = "1/world",
    deadline: float = DEADLINE,
) -> list[Any]:
    """What `body` returns for each worker (scope, rank), all at the same time."""

    def worker(rank: int) -> Any:
        shards = Shards(addresses, nodes[rank // workers])
        return body(Scope(shards, prefix, nodes, members(len(nodes), workers), deadline), rank)

    with ThreadPoolExecutor(len(nodes) * workers) as pool:
        return list(pool.map(worker, range(len(nodes) * workers)))


@pytest.mark.parametrize("size", [1, 2, 4, 5, 6, 21, 22, 100, 1280])
def test_the_tree_reaches_everybody_once(size: int) -> None:
    parents = [parent_of(position) for position in range(size)]
    assert parents[0] is None
    for position, parent in enumerate(parents[1:], start=1):
        assert parent is not None and 0 <= parent < position
    for position in range(size):
        children = [child for child, parent in enumerate(parents) if parent == position]
        assert children == list(children_of(position, size)) and len(children) <= FAN_OUT


@pytest.mark.parametrize("seed", range(6))
def test_keys_reach_all_and_barriers_hold(seed: int) -> None:
    draw = random.Random(seed)
    nodes, workers = draw.randrange(1, 12), draw.randrange(1, 4)
    writer = draw.randrange(nodes * workers)
    print(f"seed {seed}: {nodes} nodes of {workers}, rank {writer} writes")
    arrived: list[int] = []

    def body(scope: Scope, rank: int) -> tuple[bytes, int, int]:
        if rank == writer:
            scope.set("id", b"hello")
        value = b"hello" if rank == writer else scope.get("id")
        arrived.append(rank)
        scope.meet("meet", rank)
        there = len(arrived)
        scope.meet("again", rank)
        return value, there, len(scope.shards.opened())

    with shards_of(nodes) as addresses:
        found = everybody(addresses, list(range(nodes)), workers, body)
    assert {value for value, _, _ in found} == {b"hello"}
    assert {there for _, there, _ in found} == {nodes * workers}, "a barrier was left early"


@pytest.mark.parametrize("nodes", [1, 2, 7, 22])
def test_words_of_all(nodes: int) -> None:
    workers = 2
    order = list(range(nodes))
    random.Random(nodes).shuffle(order)  # nodes may come in any order, the same everywhere

    def body(scope: Scope, rank: int) -> list[str]:
        return scope.meet("meet", rank, f"word {rank}" if rank else "")

    with shards_of(nodes) as addresses:
        found = everybody(addresses, order, workers, body)
    expected = ["", *(f"word {rank}" for rank in range(1, nodes * workers))]
    assert found == [expected] * nodes * workers


def test_who_does_not_come_is_named() -> None:
    def body(scope: Scope, rank: int) -> str:
        if rank == 3:
            return ""
        with pytest.raises(TimeoutError) as raised:
            scope.meet("meet", rank, "here")
        return str(raised.value)

    with shards_of(3) as addresses:
        found = everybody(addresses, [0, 1, 2], 2, body, deadline=1.0)
    text = "waited 1 s for members [3] of 6 to come to 'meet' of 1/world"
    assert found == [text, text, text, "", text, text]


def test_a_shard_that_is_back() -> None:
    """Its server was started again on the socket that the supervisor keeps."""
    with open_listener("127.0.0.1", 0) as listener:
        address = listener.getsockname()[:2]
        server = serve(listener.dup())
        shards = Shards([address], 0)
        shards[0].set("key", b"old")
        del server
        server = serve(listener.dup())
        with pytest.raises(ConnectionError, match=r"node 0 \(127.0.0.1, port .* is that node lost"):
            shards[0].check(["key"])
        shards.refresh()
        assert not shards[0].check(["key"])
        del server


SERVER = """
import sys
from flashrun.rendezvous.server import open_listener, serve
listener = open_listener("127.0.0.1", 0)
print(listener.getsockname()[1], flush=True)
server = serve(listener)
sys.stdin.read()
"""


def test_a_shard_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen node, or one behind a cut link: nobody hangs in a request, and an answer that comes
    late is not taken for that to another one."""
    monkeypatch.setattr(sharded, "_ANSWER_S", 0.3)
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process, ExitStack() as stack:
        stack.callback(process.kill)
        assert process.stdout is not None
        shards = Shards([("127.0.0.1", int(process.stdout.readline()))], 0)
        shard = shards[0]
        shard.set("key", b"v")
        assert shard.get("key") == b"v"
        helpers.freeze(process.pid)
        with pytest.raises(ConnectionError, match="does not answer"):
            shard.check(["key"])
        process.send_signal(signal.SIGCONT)
        with pytest.raises(ConnectionError, match="it was gone before"):
            shard.check(["other"])
        shards.refresh()
        assert shards[0].get("key") == b"v"


def test_work_of_a_shard_does_not_grow() -> None:
    """Every rank reads one key: its home serves its children, not the cluster."""

    class Counted:
        def __init__(self, store: Any, asked: list[int], node: int) -> None:
            self.store, self.asked, self.node = store, asked, node

        def compare_set(self, key: str, expected: bytes, value: bytes) -> bytes:
            found: bytes = self.store.compare_set(key, expected, value)
            self.asked[self.node] += found != expected
            return found

        def __getattr__(self, name: str) -> Any:
            return getattr(self.store, name)

    workers = 2
    most = {}
    for nodes in (6, 24):
        asked = [0] * nodes
        with shards_of(nodes) as addresses:
            number = {address: node for node, address in enumerate(addresses)}

            def opened(host: str, port: int) -> Any:
                node = number[host, port]  # noqa: B023
                return Counted(connect(host, port), asked, node)  # noqa: B023

            def body(rank: int) -> bytes:
                shards = Shards(addresses, rank // workers, opened)
                everybody_ = members(nodes, workers)  # noqa: B023
                scope = Scope(shards, "1/w", range(nodes), everybody_, DEADLINE)  # noqa: B023
                if rank == 0:
                    scope.set("id", b"x")
                return scope.get("id")

            with ThreadPoolExecutor(nodes * workers) as pool:
                assert set(pool.map(body, range(nodes * workers))) == {b"x"}
        most[nodes] = max(asked)
    assert workers <= max(most.values()) <= workers + FAN_OUT


def test_generations_do_not_see_each_other() -> None:
    with shards_of(2) as addresses:
        everybody(addresses, [0, 1], 1, lambda s, r: s.set("id", b"old") if r == 0 else None)
        newer = everybody(
            addresses,
            [0, 1],
            1,
            lambda s, r: s.set("id", b"new") if r == 0 else s.get("id"),
            prefix="2/world",
        )
    assert newer[1] == b"new"


def test_a_lost_node_is_named_and_the_others_go_on() -> None:
    with shards_of(2) as addresses:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            lost = ("127.0.0.1", closed.getsockname()[1])
        shards = Shards([addresses[0], lost, addresses[1]], 0, _impatient)
        with pytest.raises(ConnectionError, match=rf"node 1 \(127.0.0.1, port {lost[1]}\)"):
            shards[1]
        found = everybody(
            [addresses[0], lost, addresses[1]],
            [0, 2],
            2,
            lambda s, r: s.set("id", b"x") if r == 3 else s.get("id"),
        )
    assert found == [b"x", b"x", b"x", None]


def _impatient(host: str, port: int) -> Any:
    limit = timedelta(milliseconds=300)
    return c10d.TCPStore(host, port, None, False, limit, wait_for_workers=False)


def test_a_key_that_nobody_writes() -> None:
    with shards_of(2) as addresses:
        shards = Shards(addresses, 0)
        scope = Scope(shards, "1/w", [0, 1], members(2, 1), 0.2)
        with pytest.raises(TimeoutError, match=r"bootstrap key 1/w/id at the shard of node \d"):
            scope.get("id")


def test_waiting_ends_when_nobody_wants_it() -> None:
    class Enough(Exception):
        pass

    def wanted() -> None:
        raise Enough

    with shards_of(2) as addresses:
        scope = Scope(Shards(addresses, 0), "1/w", [0, 1], members(2, 1), DEADLINE, wanted)
        with pytest.raises(Enough):
            scope.get("id")


def test_gloo_is_made_with_it() -> None:
    size = 4

    def body(scope: Scope, rank: int) -> float:
        store = ScopeStore(scope)
        prefixed = c10d.PrefixStore("gloo", store)
        group = c10d.ProcessGroupGloo(prefixed, rank, size, timedelta(seconds=30))
        value = torch.full((3,), float(rank))
        group.allreduce([value], c10d.AllreduceOptions()).wait()
        scope.meet("done", rank)
        return float(value.sum())

    with shards_of(2) as addresses:
        assert everybody(addresses, [0, 1], 2, body) == [18.0] * size


def test_connections_side_by_side() -> None:
    """None waits for the one before: each of these needs another one to be under way."""
    others = threading.Barrier(2)

    class Meeting(Shards):
        def __getitem__(self, node: int) -> Shard:
            others.wait(DEADLINE)
            return super().__getitem__(node)

    with shards_of(8) as addresses:
        shards = Meeting(addresses, 0)
        shards.open(range(8))
        assert len(shards.opened()) == 8


def test_keys_are_spread() -> None:
    with shards_of(8) as addresses:
        scope = Scope(Shards(addresses, 0), "1/world", range(8), members(8, 50), DEADLINE)
        homes = Counter(scope.home(f"0/{rank}") for rank in range(400))
    assert set(homes) == set(range(8)) and max(homes.values()) < 100, homes
