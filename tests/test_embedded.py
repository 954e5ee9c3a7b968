"""What is the embedded store's own: the ring of records, who judges leases, clients that die."""

from __future__ import annotations

import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from flashrun.rendezvous import embedded
from flashrun.rendezvous.embedded import EmbeddedStore, connect_embedded
from flashrun.rendezvous.kv import Event, StoreLost
from flashrun.rendezvous.lease_judge import LeaseJudge
from flashrun.rendezvous.ring import Ring
from flashrun.rendezvous.server import open_listener, serve
from tests import helpers

Opener = Callable[[], EmbeddedStore]
RING = 8


@pytest.fixture
def port() -> Iterator[int]:
    listener = open_listener("127.0.0.1", 0)
    number = int(listener.getsockname()[1])
    keep = serve(listener)
    yield number
    del keep


@pytest.fixture
def connect(port: int) -> Iterator[Opener]:
    clients: list[EmbeddedStore] = []

    def open_one() -> EmbeddedStore:
        clients.append(connect_embedded("127.0.0.1", port, 10.0, ring=RING))
        return clients[-1]

    yield open_one
    for client in clients:
        client.close()


def raw(port: int) -> TCPStore:
    return TCPStore(
        "127.0.0.1", port, is_master=False, timeout=timedelta(seconds=10), wait_for_workers=False
    )


def until(client: EmbeddedStore, events: list[Event], done: Callable[[], bool]) -> None:
    """Watch everything until ``done``; what is watched adds up to what is there."""
    folded: dict[str, bytes] = {}
    with client.watch() as watch:
        last = False
        while True:
            over = done()
            got = watch.get(0.05)
            events += got
            for event in got:
                if event.kind == "put":
                    folded[event.key] = event.value
                else:
                    folded.pop(event.key, None)
            if over and last and not got:
                break
            last = over
    assert folded == client.range("")
    revisions = [event.revision for event in events]
    assert revisions == sorted(revisions)


def test_many_clients_on_a_ring_that_is_far_too_small(connect: Opener, seed: int) -> None:
    """Everybody is lapped again and again, and snapshots are written by several at once."""
    turns, writers = 60, 4
    clients = [connect() for _ in range(writers)]
    watchers = [connect() for _ in range(2)]
    over = threading.Event()
    draws = [random.Random(seed + i) for i in range(writers)]

    def write(i: int) -> int:
        won = 0
        for turn in range(turns):
            clients[i].increment("n")
            clients[i].put(f"k/{draws[i].randrange(5)}", f"{i}.{turn}".encode())
            if draws[i].random() < 0.3:
                clients[i].delete(f"k/{draws[i].randrange(5)}")
            if draws[i].random() < 0.1:
                clients[i].put("large", bytes([i]) * 5000)  # not kept in its slot
            won += clients[i].compare_and_swap(f"lock/{turn}", None, str(i).encode())
        return won

    with ThreadPoolExecutor(writers + len(watchers)) as pool:
        watching = [pool.submit(until, client, [], over.is_set) for client in watchers]
        try:
            won = list(pool.map(write, range(writers)))
        finally:
            over.set()
        for watch in watching:
            watch.result()
    assert connect().get("n") == str(turns * writers).encode()
    assert sum(won) == turns  # each lock has one winner
    ranges = [client.range("") for client in [*clients, *watchers]]
    assert all(found == ranges[0] for found in ranges)


def test_memory_in_the_store_is_bounded(connect: Opener, port: int) -> None:
    client = connect()
    for number in range(10 * RING):
        client.put("k", str(number).encode())
        client.put("large", str(number).encode() * 2000)
    # Slots and announcements, a few of them late; long records; two snapshots and their parts.
    assert len([key for key in raw(port).list_keys() if embedded.PREFIX in key]) < 4 * RING + 8


def test_a_client_that_fell_behind_writes_nothing_out_of_date(connect: Opener, port: int) -> None:
    """Its record's slot has been written again: it must not take the place of a newer one."""
    ahead, behind = connect(), connect()
    ahead.put("k", b"0")
    assert behind.get("k") == b"0"
    ring = Ring(raw(port), embedded.PREFIX, RING)
    assert ring.read(2) is None
    for number in range(1, 3 * RING):
        ahead.put("k", str(number).encode())
    assert not ring.append(2, b'[["put", "k", "AAAA", null]]')
    assert behind.compare_and_swap("k", b"0", b"wrong") is False
    assert behind.get("k") == ahead.get("k") == str(3 * RING - 1).encode()


def test_a_writer_that_dies_before_it_wakes_the_others(connect: Opener, port: int) -> None:
    reader = connect()
    watch = reader.watch()
    ring = Ring(raw(port), embedded.PREFIX, RING)
    ring.announce = lambda number: None  # type: ignore[method-assign]  # died here
    assert ring.read(1) is None
    assert ring.append(1, b'[["put", "k", "AAAA", null]]')
    assert [event.key for event in watch.get(20)] == ["k"]
    connect().put("k", b"2")
    assert [event.value for event in watch.get(20)] == [b"2"]


def test_a_client_that_dies_while_it_closes_wakes_nobody_for_ever(
    connect: Opener, port: int
) -> None:
    """Its announcement of a record that does not come stays; those who wait must not spin."""
    reader, writer = connect(), connect()
    watch = reader.watch()
    Ring(raw(port), embedded.PREFIX, RING).announce(1)
    begun = time.thread_time_ns(), time.process_time()
    assert watch.get(1.0) == []
    assert time.process_time() - begun[1] < 0.5
    writer.put("k", b"1")
    assert [event.value for event in watch.get(20)] == [b"1"]


def test_another_judge_takes_over(connect: Opener) -> None:
    first, second, holder = connect(), connect(), connect()
    for client in (first, second):
        client.watch()
    lease = holder.lease(1)
    holder.put("k", b"1", lease)
    watch = second.watch("k")
    helpers.wait_until(lambda: second._ring.peek("judge") is not None, "a judge")
    judge = second._ring.peek("judge")
    assert judge is not None
    for client in (first, holder):
        if judge.startswith(client._id.encode()):
            client.close()
    holder.close()  # without giving its lease back
    assert [event.kind for event in watch.get(20)][-1:] == ["delete"]


@pytest.mark.parametrize(
    ("looks", "over"),
    [
        # (begun, ended, count) of one lease of 4 s
        ([(0, 0, b"1"), (1, 1, b"1"), (2, 2, b"1"), (3, 3, b"1"), (4, 4, b"1")], True),
        ([(0, 0, b"1"), (1, 1, b"1"), (2, 2, b"2"), (3, 3, b"2"), (4, 4, b"2")], False),
        # the judge slept: whoever renewed meanwhile had its renewals in a queue behind us
        ([(0, 0, b"1"), (1, 1, b"1"), (9, 9, b"1")], False),
        # the store slept, so that the answer was late
        ([(0, 0, b"1"), (1, 1, b"1"), (2, 9, b"1")], False),
        ([(0, 0, b"1"), (1, 9, b"1"), (10, 10, b"1"), (12, 12, b"1")], False),
        ([(0, 0, b"1"), (1, 9, b"1"), (10, 10, b"1"), (12, 12, b"1"), (13, 13, b"1")], True),
        ([(0, 0, None), (2, 2, None), (4, 4, None), (6, 6, None)], False),
    ],
)
def test_time_counts_only_while_judge_and_store_are_awake(
    looks: list[tuple[float, float, bytes | None]], over: bool
) -> None:
    judge = LeaseJudge("me")
    found = [judge.silent({"x": count}, {"x": 4.0}, begun, end) for begun, end, count in looks]
    assert found[-1] == (["x"] if over else [])
    assert not any(found[:-1])


def test_a_frozen_server_ends_no_lease_and_one_that_stays_frozen_is_said() -> None:
    listener_code = (
        "from flashrun.rendezvous.server import open_listener, serve\n"
        "import threading, sys\n"
        "keep = serve(open_listener('127.0.0.1', int(sys.argv[1])))\n"
        "threading.Event().wait()"
    )
    port = helpers.free_port()
    command = [sys.executable, "-c", listener_code, str(port)]
    with helpers.start(command, cwd=helpers.ROOT) as server:
        holder = connect_embedded("127.0.0.1", port, 30.0, read_timeout_s=2.5)
        reader = connect_embedded("127.0.0.1", port, 30.0, read_timeout_s=2.5)
        lease = holder.lease(1)
        holder.put("k", b"1", lease)
        watch = reader.watch("k")
        helpers.freeze(server.pid)
        assert watch.get(1.5) == []
        assert lease.remaining_s() == 0  # as far as its holder can know
        server.signal(signal.SIGCONT)
        assert watch.get(2.0) == []
        assert holder.get("k") == b"1"
        assert lease.remaining_s() > 0
        helpers.freeze(server.pid)
        with pytest.raises(StoreLost, match="start the job again"):
            watch.get(30.0)
        with pytest.raises(StoreLost, match=f"127.0.0.1:{port}"):
            holder.put("k", b"2")
        holder.close()
        reader.close()
        assert not [t for t in threading.enumerate() if t.name.startswith("store ")]
