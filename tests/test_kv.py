"""One contract for every key-value backend; the listening socket and the server."""

from __future__ import annotations

import os
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from torch.distributed import FileStore

from flashrun.rendezvous.kv import KeyValue, MemoryKeyValue, StoreLost
from flashrun.rendezvous.server import StoreInUse, StoreNotBound, open_listener, serve
from flashrun.rendezvous.tcp_kv import (
    Cancelled,
    ConnectTimeout,
    NotAStore,
    TorchKeyValue,
    connect,
)
from tests import etcd, stores

Maker = Callable[[], KeyValue]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[etcd.Cluster | None]:
    if etcd.why_not() is not None:
        yield None
        return
    with etcd.Cluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


@pytest.fixture(params=["memory", "tcp", "tcp6", "file", "embedded", "etcd"])
def make(
    request: pytest.FixtureRequest, tmp_path: Path, server: etcd.Cluster | None
) -> Iterator[Maker]:
    """Gives clients of one store. More of the last two: test_control_store.py."""
    if request.param == "etcd":
        etcd.need()
        assert server is not None
        endpoints = list(server.config().endpoints)
        spec = {"kind": "etcd", "prefix": f"/{uuid.uuid4().hex}/", "endpoints": endpoints}
        with closing(stores.Backend(spec)) as backend:
            yield backend.open
    elif request.param == "memory":
        shared = MemoryKeyValue()
        yield lambda: shared
    elif request.param == "file":
        path = str(tmp_path / "store")
        yield lambda: TorchKeyValue(FileStore(path), path)
    else:
        host = "::1" if request.param == "tcp6" else "127.0.0.1"
        try:
            listener = open_listener(host, 0)
        except StoreNotBound as error:
            pytest.skip(f"no IPv6 here: {error}")
        port = listener.getsockname()[1]
        keep = serve(listener)
        if request.param == "embedded":
            with closing(stores.Backend({"kind": "embedded", "port": port})) as backend:
                yield backend.open
        else:
            yield lambda: connect(host, port, 5.0)
        del keep


def test_absent_is_none_and_does_not_block(make: Maker) -> None:
    kv = make()
    assert kv.get("a") is None
    kv.put("b", b"1")
    assert kv.get_many(["a", "b", "c"]) == [None, b"1", None]
    assert kv.get_many(["b"]) == [b"1"]
    assert kv.get_many([]) == []


def test_written_is_seen_by_others_after_an_answered_call(make: Maker) -> None:
    one, two = make(), make()
    for number in range(20):
        one.put("key", str(number).encode())
        one.increment("revision")
        assert two.get("key") == str(number).encode()


def test_compare_and_swap(make: Maker) -> None:
    kv = make()
    assert kv.compare_and_swap("k", None, b"one")
    assert not kv.compare_and_swap("k", None, b"two")
    assert not kv.compare_and_swap("k", b"other", b"three")
    assert kv.get("k") == b"one"
    assert kv.compare_and_swap("k", b"one", b"four")
    assert kv.get("k") == b"four"
    assert not kv.compare_and_swap("absent", b"something", b"five")


def test_compare_and_swap_has_one_winner(make: Maker) -> None:
    clients = [make() for _ in range(4)]
    start = threading.Barrier(4)
    wins: list[int] = []

    def compete(me: int) -> None:
        kv = clients[me]
        start.wait()
        for turn in range(25):
            old = kv.get(f"lock{turn}")
            if old is None and kv.compare_and_swap(f"lock{turn}", None, f"{me}.{turn}".encode()):
                wins.append(turn)

    threads = [threading.Thread(target=compete, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(wins) == list(range(25))


def test_increment(make: Maker) -> None:
    one, two = make(), make()
    assert [one.increment("n"), two.increment("n"), one.increment("n")] == [1, 2, 3]
    assert one.get("n") == b"3"


def test_delete_and_range(make: Maker) -> None:
    kv = make()
    for key in ("x/a", "x/b", "y/a"):
        kv.put(key, key.encode())
    assert kv.range("x/") == {"x/a": b"x/a", "x/b": b"x/b"}
    kv.delete("x/a")
    kv.delete("x/a")
    assert kv.get("x/a") is None
    assert sorted(kv.list_keys("x/")) == ["x/b"]


# --- server and connections ------------------------------------------------------------------


def test_a_port_in_use_names_its_owner() -> None:
    with open_listener("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StoreInUse) as caught:
            open_listener("127.0.0.1", port)
    assert str(port) in str(caught.value)
    assert f"process {os.getpid()} " in str(caught.value)
    assert "--master-port" in str(caught.value)


def test_a_foreign_address_is_said() -> None:
    with pytest.raises(StoreNotBound, match="not an address of this machine"):
        open_listener("203.0.113.7", 0)


def test_wildcard_serves_both_families() -> None:
    listener = open_listener("::", 0)
    port = listener.getsockname()[1]
    server = serve(listener)
    connect("127.0.0.1", port, 5.0).put("a", b"1")
    assert connect("::1", port, 5.0).get("a") == b"1"
    del server


def test_connect_waits_for_a_host_and_says_so() -> None:
    with open_listener("127.0.0.1", 0) as reserve:
        port = reserve.getsockname()[1]
    servers = []
    waits: list[str] = []

    def waiting(seconds: float, problem: str) -> None:
        waits.append(problem)
        if len(waits) == 2:
            servers.append(serve(open_listener("127.0.0.1", port)))

    connect("127.0.0.1", port, 20.0, waiting=waiting).put("a", b"1")
    assert len(waits) >= 2 and not any(waits)
    servers.clear()


def test_a_name_that_leads_nowhere_is_told_while_it_is_waited_for() -> None:
    cancel = threading.Event()
    problems: list[str] = []

    def waiting(seconds: float, problem: str) -> None:
        problems.append(problem)
        cancel.set()

    with pytest.raises(Cancelled):
        connect("no-such-host.invalid", 1, 20.0, cancel=cancel, waiting=waiting)
    assert "The name 'no-such-host.invalid'" in problems[0]


def test_connect_ends() -> None:
    with open_listener("127.0.0.1", 0) as reserve:
        port = reserve.getsockname()[1]
    with pytest.raises(ConnectTimeout, match="Start the node that hosts it"):
        connect("127.0.0.1", port, 0.2)
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(Cancelled):
        connect("127.0.0.1", port, 60.0, cancel=cancel)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"", "closed the connection"),
        (b"HTTP/1.1 400 Bad Request", "something else"),
        (None, "says nothing"),
    ],
)
def test_something_else_at_the_endpoint_is_said(answer: bytes | None, says: str) -> None:
    """torch's own client would wait for ever for the third."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        gave_up = threading.Event()

        def serve_one() -> None:
            connection, _ = other.accept()
            with connection:
                connection.recv(100)
                if answer is None:
                    gave_up.wait(30)
                else:
                    connection.sendall(answer)

        thread = threading.Thread(target=serve_one)
        thread.start()
        with pytest.raises(NotAStore, match=says):
            connect("127.0.0.1", port, 5.0, read_timeout_s=0.5)
        gave_up.set()
        thread.join()


def test_a_lost_server_is_said() -> None:
    listener = open_listener("127.0.0.1", 0)
    port = listener.getsockname()[1]
    servers = [serve(listener)]
    kv = connect("127.0.0.1", port, 5.0)
    kv.put("a", b"1")
    servers.clear()
    with pytest.raises(StoreLost, match="start the job again"):
        kv.increment("n")
