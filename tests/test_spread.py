"""The default store's keys over several nodes: which has which, what is lost with one, and what a
worker is connected to."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from flashrun.rendezvous.links import links_to
from flashrun.rendezvous.table import RankTable
from flashrun.worker import spread
from flashrun.worker.spread import INIT, Spread, Unreached, connect
from tests.homes import seat, server, table_of

WAIT = timedelta(seconds=60)
KEYS = [f"default_pg/0//{name}{i}" for name in ("rank", "barrier:", "") for i in range(400)]


@pytest.mark.parametrize(
    ("key", "nodes", "home"),
    [("a", 1, 0), ("a", 2, 1), ("a", 4, 3), ("b", 4, 1), ("", 3, 0), ("ü", 4, 1), ("a", 1280, 67)],
)
def test_the_home_of_a_key(key: str, nodes: int, home: int) -> None:
    assert table_of(range(1, nodes + 1)).home(key) == home


@pytest.mark.parametrize("nodes", [2, 3, 16])
def test_keys_are_spread(nodes: int) -> None:
    table = table_of(range(1, nodes + 1))
    counts = [sum(table.home(key) == place for key in KEYS) for place in range(nodes)]
    assert min(counts) > 0.5 * len(KEYS) / nodes and max(counts) < 1.6 * len(KEYS) / nodes


def lost(table: RankTable, *names: str) -> RankTable:
    for name in names:
        table = table.with_instead(name, seat(f"for-{name}", 9))
    return table


@pytest.mark.parametrize(
    ("names", "since", "places"),
    [
        ((), 0, []),
        (("n0",), 0, [0]),
        (("n2",), 0, [2]),
        (("n2", "n0"), 0, [0, 2]),
        (("n2", "n0"), 1, [0]),
        (("n2", "n0"), 2, []),
        (("n1", "n0", "for-n1"), 1, [0, 1]),
        (("n1", "n0", "for-n1"), 2, [1]),
    ],
)
def test_what_was_lost_since(names: Sequence[str], since: int, places: list[int]) -> None:
    table = lost(table_of([1, 2, 3]), *names)
    assert table.taken_since(since) == places
    assert RankTable.from_json(table.to_json()) == table
    before = table_of([1, 2, 3])
    assert [table.home(key) for key in KEYS] == [before.home(key) for key in KEYS]


def of_home(table: RankTable, place: int) -> str:
    return next(key for key in KEYS if table.home(key) == place)


def noting(servers: Sequence[Any], connected: list[int]) -> Callable[[str, int], Any]:
    """Connects, and notes to which."""
    ports = [one.port for one in servers]

    def open_(host: str, port: int) -> Any:
        connected.append(ports.index(port) if port in ports else -1)
        return connect(host, port)

    return open_


class Nodes:
    """Servers, a worker on the second node, and the nodes that it was connected to (-1: a new one).
    """

    def __init__(self, count: int) -> None:
        self.servers = [server() for _ in range(count)]
        self.table = table_of([one.port for one in self.servers])
        self.connected: list[int] = []
        self.one = Spread(self.table, 1, noting(self.servers, self.connected))

    def lose(self, place: int) -> None:
        self.servers[place] = server()
        new = seat(f"other{place}", self.servers[place].port)
        self.table = self.table.with_instead(self.table.nodes[place].node, new)


def deadlines(port: int) -> list[bytes]:
    links = links_to(port).values()
    found = [link.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16) for link in links]
    for link in links:
        link.close()
    return sorted(found)


def test_a_store_of_the_scripts_own_waits_as_long_as_it_likes() -> None:
    """Opened at ``MASTER_ADDR`` before a key is first needed that has its home there."""
    one = server()
    before = deadlines(one.port)
    own = dist.TCPStore("127.0.0.1", one.port, None, False, WAIT, wait_for_workers=False)
    mine = connect("127.0.0.1", one.port)
    found = deadlines(one.port)
    none, limited = struct.pack("@ll", 0, 0), struct.pack("@ll", 30, 0)
    assert found == sorted([*before, none, limited]), "only the default store's own is limited"
    own.set("a", "1")
    mine.set("b", "2")


def test_a_worker_connects_to_what_it_needs() -> None:
    nodes = Nodes(4)
    store, table = nodes.one, nodes.table
    assert store.add(INIT, 1) == 1
    assert nodes.connected == [1], "at its beginning to its own node alone"
    for _ in range(2):
        store.set(of_home(table, 3), b"1")
        assert store.check([of_home(table, 3), of_home(table, 1)]) is False
    assert nodes.connected == [1, 3]
    store.multi_set([of_home(table, place) for place in range(4)], [b"x"] * 4)
    assert sorted(nodes.connected) == [0, 1, 2, 3] and store.opened == 4
    for place, one in enumerate(nodes.servers):
        there = [key for key in one.list_keys() if key.endswith(of_home(table, place))]
        assert len(there) == 1 and one.num_keys() == 1 + (place == 1), "each key is at its home"
        assert not one.check([of_home(table, place)]), "not for a TCPStore of the script's own"
        one.set("own", "1")
    assert store.num_keys() == 5 and not store.check(["own"])


def test_connections_are_opened_side_by_side() -> None:
    """Each waits for all others to begin."""
    nodes = Nodes(5)
    together = threading.Barrier(5)

    def open_(host: str, port: int) -> Any:
        together.wait(30)
        return connect(host, port)

    store = Spread(nodes.table, 0, open_)
    assert store.list_keys() == [] and store.opened == 5


@pytest.mark.parametrize("place", range(3))
def test_another_node_takes_a_place(place: int) -> None:
    """What had its home there is put there again; the rest was never away."""
    nodes = Nodes(3)
    store = nodes.one
    names = [of_home(nodes.table, home) for home in range(3)]
    store.multi_set(names, [b"1"] * 3)
    nodes.lose(place)
    Spread(nodes.table, place).put_again(place, {"old": b"of an attempt before"})
    Spread(nodes.table, place).put_again(place, {names[place]: b"2"})
    store.use(nodes.table)
    found = dict(zip(names, store.multi_get(names), strict=True))
    assert found == {key: b"2" if home == place else b"1" for home, key in enumerate(names)}
    assert store.num_keys() == 3
    assert sorted(nodes.connected) == [-1, 0, 1, 2], "and no other one is opened anew"


def test_a_home_that_is_gone_is_known_at_once() -> None:
    nodes = Nodes(2)
    nodes.one.set(of_home(nodes.table, 1), b"1")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        table = nodes.table.with_instead("n0", seat("gone", port))
        store = Spread(table, 1)
        with pytest.raises(Unreached, match=f"127.0.0.1:{port} can't be reached"):
            store.set(of_home(table, 0), b"1")
    assert issubclass(Unreached, dist.DistNetworkError)
    store.set(of_home(table, 1), b"2")
    assert nodes.one.check([of_home(table, 1)])


def test_each_looks_after_the_next_node() -> None:
    nodes = Nodes(3)
    nodes.one.knock()
    nodes.lose(0)
    nodes.one.use(nodes.table)
    nodes.one.knock()
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        table = nodes.table.with_instead("n2", seat("gone", unused.getsockname()[1]))
        Spread(table, 0).knock()
        Spread(table, 2).knock()
        with pytest.raises(Unreached):
            Spread(table, 1).knock()
    Spread(table_of([9]), 0).knock()
    assert nodes.connected == [], "a look leaves no connection"


def test_a_home_that_is_silent_is_waited_for_as_long_as_there_is_a_point(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody accepts, and the queue is full."""
    monkeypatch.setattr(spread, "_KNOCK_S", 0.05)
    asked: list[float] = []

    def given_up() -> bool:
        asked.append(time.monotonic())
        return len(asked) == 3

    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        where = full.getsockname()
        with socket.create_connection(where), pytest.raises(Unreached, match="no answer"):
            connect(*where, given_up)
    assert len(asked) == 3
