"""One contract for the stores that carry the control plane: etcd v3 and the embedded TCPStore."""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashrun.rendezvous.kv import (
    MAX_OPERATIONS,
    MAX_VALUE,
    Compacted,
    ControlStore,
    Delete,
    Event,
    Forked,
    LeaseLost,
    Put,
    StoreLost,
)
from flashrun.rendezvous.server import open_listener, serve
from flashrun.rendezvous.watch import Watch
from tests import etcd, helpers
from tests.stores import Backend

DEADLINE = 30.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[etcd.Cluster | None]:
    if etcd.why_not() is not None:
        yield None
        return
    with etcd.Cluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


@pytest.fixture(params=["embedded", "etcd"])
def backend(request: pytest.FixtureRequest, server: etcd.Cluster | None) -> Iterator[Backend]:
    if request.param == "etcd":
        etcd.need()
        assert server is not None
        endpoints = list(server.config().endpoints)
        prefix = f"/{uuid.uuid4().hex}/"
        found = Backend({"kind": "etcd", "prefix": prefix, "endpoints": endpoints}, server)
        yield found
        found.close()
        return
    listener = open_listener("127.0.0.1", 0)
    found = Backend({"kind": "embedded", "port": listener.getsockname()[1]})
    keep = serve(listener)
    yield found
    found.close()
    del keep


def collect(watch: Watch, count: int) -> list[Event]:
    """The next events, at least ``count``."""
    events: list[Event] = []
    deadline = time.monotonic() + DEADLINE
    while len(events) < count:
        left = deadline - time.monotonic()
        assert left > 0, f"{len(events)} of {count} events in {DEADLINE} s: {events}"
        events += watch.get(left)
    return events


def short(events: list[Event]) -> list[tuple[str, str, bytes]]:
    return [(event.kind, event.key, event.value) for event in events]


# --- values and transactions ----------------------------------------------------------------


def test_values_are_any_bytes_and_ranges_go_by_prefix(backend: Backend) -> None:
    store, other = backend.open(), backend.open()
    values = {f"n/{i}": bytes([i, 0, 255, 254, 128]) * (i + 1) for i in range(20)}
    for key, value in values.items():
        store.put(key, value)
    store.put("n", b"1")
    store.put("n0", b"2")
    store.put("m/z", b"3")
    store.put("n/\u00fc \u65e5", b"\xff")
    values["n/\u00fc \u65e5"] = b"\xff"
    assert other.range("n/") == values
    assert other.list_keys("n/") == sorted(values)
    assert set(other.range("")) == {*values, "n", "n0", "m/z"}
    assert other.get_many(["m/z", "none", "n/3"]) == [b"3", None, values["n/3"]]
    assert other.get_many([f"n/{i % 20}" for i in range(250)])[249] == values["n/9"]


def test_a_transaction_is_done_whole_or_not_at_all(backend: Backend) -> None:
    store = backend.open()
    store.put("a", b"1")
    watch = store.watch()
    wrong = {"a": b"1", "b": b"1"}
    assert not store.transaction(wrong, [Put("a", b"x"), Put("c", b"x")])
    assert store.range("") == {"a": b"1"}
    right = {"a": b"1", "b": None}
    assert store.transaction(right, [Put("b", b"2"), Delete("a"), Put("c", b"3"), Delete("none")])
    assert store.range("") == {"b": b"2", "c": b"3"}
    events = collect(watch, 3)
    assert sorted(short(events)) == [("delete", "a", b""), ("put", "b", b"2"), ("put", "c", b"3")]
    assert len({event.revision for event in events}) == 1
    assert not store.compare_and_swap("none", b"1", b"2")
    assert store.compare_and_swap("b", b"2", b"2")  # the same value again is a write as any
    assert short(collect(watch, 1)) == [("put", "b", b"2")]


def test_what_no_backend_takes_is_refused_before(backend: Backend) -> None:
    store = backend.open()
    with pytest.raises(ValueError, match="Split the value"):
        store.put("big", b"x" * (MAX_VALUE + 1))
    with pytest.raises(ValueError, match="twice: k"):
        store.transaction({}, [Put("k", b"1"), Delete("k")])
    with pytest.raises(ValueError, match="at most"):
        store.transaction({}, [Put(str(i), b"1") for i in range(MAX_OPERATIONS + 1)])
    with pytest.raises(ValueError, match="empty"):
        store.put("k", b"")
    assert store.range("") == {}
    assert store.transaction({}, [Put(str(i), b"1") for i in range(MAX_OPERATIONS)])


def test_large_values(backend: Backend) -> None:
    store, other = backend.open(), backend.open()
    watch = other.watch("big/")
    values = {f"big/{i}": os.urandom(16) * (MAX_VALUE // 16) for i in range(6)}
    for key, value in values.items():
        store.put(key, value)
    assert other.range("big/") == values
    events = collect(watch, 6)
    assert [event.key for event in events] == sorted(values)
    assert all(event.value == values[event.key] for event in events)


def test_compare_and_swap_under_contention(backend: Backend) -> None:
    """Threads and processes count one number up; nobody's turn is lost or done twice."""
    turns, threads_of = 20, 6
    body = f"import threading\ndef count(): [say(store.increment('n')) for _ in range({turns})]\n"
    body += "threads = [threading.Thread(target=count) for _ in range(2)]\n"
    body += "[t.start() for t in threads]; [t.join() for t in threads]"
    process = backend.process(body)
    clients = [backend.open() for _ in range(3)]
    got: list[int] = []

    def count(client: ControlStore) -> None:
        for _ in range(turns):
            while True:
                old = client.get("n")
                new = int(old or b"0") + 1
                if client.compare_and_swap("n", old, str(new).encode()):
                    got.append(new)
                    break

    threads = [threading.Thread(target=count, args=(clients[i % 3],)) for i in range(threads_of)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    finished = process.wait()
    assert finished.status == 0, finished.describe()
    got += map(int, finished.stdout.split())
    assert sorted(got) == list(range(1, turns * (threads_of + 2) + 1))


def test_a_client_is_not_used_in_a_fork(backend: Backend) -> None:
    store = backend.open()
    store.put("a", b"1")
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:  # the child: nothing of pytest may run here
        try:
            store.get("a")
        except Forked as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    assert f"process {os.getpid()}" in said
    assert "Open a client of its own" in said
    assert store.get("a") == b"1"


# --- watches --------------------------------------------------------------------------------


def test_a_watch_gives_each_event_once_and_in_order(backend: Backend) -> None:
    writer, reader = backend.open(), backend.open()
    watch = reader.watch("seq/")
    for number in range(100):
        writer.put("seq/a", str(number).encode())
        writer.put("other", b"x")
    writer.delete("seq/a")
    events = collect(watch, 101)
    expected = [("put", "seq/a", str(number).encode()) for number in range(100)]
    assert short(events) == [*expected, ("delete", "seq/a", b"")]
    revisions = [event.revision for event in events]
    assert revisions == sorted(set(revisions))
    assert watch.get(0.1) == []


def test_a_watch_resumes_from_a_revision_or_a_snapshot(backend: Backend) -> None:
    store = backend.open()
    store.put("k", b"0")
    start = store.snapshot("k")
    store.put("k", b"1")
    with store.watch("k", start) as watch:
        store.put("k", b"2")
        events = collect(watch, 2)
        assert short(events) == [("put", "k", b"1"), ("put", "k", b"2")]
    for number in (3, 4, 5):
        store.put("k", str(number).encode())
    again = backend.open().watch("k", watch.revision)
    assert [event.value for event in collect(again, 3)] == [b"3", b"4", b"5"]
    middle = backend.open().watch("k", events[0].revision)
    assert [event.value for event in collect(middle, 4)] == [b"2", b"3", b"4", b"5"]


def test_a_watch_that_waits_is_woken_at_once(backend: Backend) -> None:
    """By the write, not by a poll: many round trips take less than one poll would."""
    one, two = backend.open(), backend.open()
    there, back = two.watch("there"), one.watch("back")

    def answer() -> None:
        for _ in range(100):
            two.put("back", collect(there, 1)[0].value)

    thread = threading.Thread(target=answer)
    thread.start()
    for number in range(100):
        one.put("there", str(number).encode())
        assert collect(back, 1)[0].value == str(number).encode()
    thread.join()


def test_a_watch_over_a_compaction_finds_the_difference(backend: Backend) -> None:
    store, reader = backend.open(), backend.open()
    for key in ("w/kept", "w/gone", "w/changed"):
        store.put(key, b"0")
    start = reader.snapshot("w/")
    store.delete("w/gone")
    store.put("w/changed", b"1")
    store.put("w/new", b"1")
    store.put("w/short", b"1")
    store.delete("w/short")
    backend.forget(store)
    watch = reader.watch("w/", start)
    events = collect(watch, 3)
    assert sorted(short(events)) == [
        ("delete", "w/gone", b""),
        ("put", "w/changed", b"1"),
        ("put", "w/new", b"1"),
    ]
    assert all(event.resynced for event in events)
    store.put("w/after", b"1")
    last = collect(watch, 1)
    assert short(last) == [("put", "w/after", b"1")] and not last[0].resynced


def test_a_bare_revision_that_is_forgotten_is_said(backend: Backend) -> None:
    store = backend.open()
    store.put("k", b"0")
    revision = store.snapshot().revision
    store.put("k", b"1")
    store.put("k", b"2")
    backend.forget(store)
    with pytest.raises(Compacted, match="Take a snapshot"):
        backend.open().watch("k", revision - 1).get(DEADLINE)


def test_a_new_client_sees_what_is_long_forgotten(backend: Backend) -> None:
    store = backend.open()
    store.put("old", b"1")
    for _ in range(4):
        backend.forget(store)
    fresh = backend.open()
    assert fresh.get("old") == b"1"
    assert fresh.compare_and_swap("old", b"1", b"2")
    assert store.get("old") == b"2"


def test_closing_ends_a_waiting_watch(backend: Backend) -> None:
    store = backend.open()
    watch = store.watch()
    got: list[list[Event]] = []
    thread = threading.Thread(target=lambda: got.append(watch.get(DEADLINE)))
    thread.start()
    watch.close()
    thread.join()
    assert got == [[]]


# --- leases ---------------------------------------------------------------------------------


def test_a_revoked_lease_takes_its_keys_along(backend: Backend) -> None:
    store, reader = backend.open(), backend.open()
    watch = reader.watch()
    lease = store.lease(10)
    assert lease.ttl_s >= 10
    assert 0 < lease.remaining_s() <= lease.ttl_s
    store.put("a", b"1", lease)
    assert store.compare_and_swap("b", None, b"1", lease)
    store.put("c", b"1")
    store.put("b", b"2")  # without the lease: it stays
    lease.revoke()
    assert reader.range("") == {"b": b"2", "c": b"1"}
    assert short(collect(watch, 5))[-1] == ("delete", "a", b"")
    assert lease.lost.is_set() and lease.remaining_s() == 0
    with pytest.raises(LeaseLost, match="nothing was written"):
        store.transaction({}, [Put("x", b"1"), Put("y", b"1", lease)])
    assert reader.get("x") is None


def test_a_lease_outlives_a_stall_shorter_than_it_but_not_its_holder(backend: Backend) -> None:
    reader = backend.open()
    watch = reader.watch("node/")
    holder = backend.process(
        "lease = store.lease(2)\n"
        "store.put('node/1', b'here', lease)\nstore.put('node/2', b'here', lease)\n"
        "import threading; threading.Event().wait()"
    )
    try:
        assert sorted(short(collect(watch, 2))) == [
            ("put", "node/1", b"here"),
            ("put", "node/2", b"here"),
        ]
        helpers.freeze(holder.pid)
        assert watch.get(0.9) == []
        holder.signal(signal.SIGCONT)
        assert watch.get(2.0) == []  # and it is kept alive
        assert len(reader.range("node/")) == 2
    finally:
        holder.signal(signal.SIGKILL)
        holder.wait()
    assert sorted(short(collect(watch, 2))) == [
        ("delete", "node/1", b""),
        ("delete", "node/2", b""),
    ]
    assert reader.range("") == {}


def test_an_abandoned_lease_runs_out_for_its_holder_first(backend: Backend) -> None:
    store = backend.open()
    watch = store.watch("k")
    lease = store.lease(1)
    store.put("k", b"1", lease)
    lease.abandon()
    events = collect(watch, 2)
    assert short(events) == [("put", "k", b"1"), ("delete", "k", b"")]
    assert lease.remaining_s() == 0
    with pytest.raises(LeaseLost):
        store.put("k", b"2", lease)


# --- the server goes -----------------------------------------------------------------------


def test_a_watch_over_a_server_restart(tmp_path: Path) -> None:
    etcd.need()
    with etcd.Cluster(tmp_path) as cluster:
        member = cluster.members[0]
        spec = {"kind": "etcd", "prefix": "/r/", "endpoints": list(cluster.config().endpoints)}
        backend = Backend(spec, cluster)
        writer, reader = backend.open(), backend.open()
        lease = writer.lease(5)
        writer.put("leased", b"1", lease)
        watch = reader.watch("n")
        written = threading.Event()
        total = 150

        def write() -> None:
            for number in range(total):
                writer.put("n", str(number).encode())
                if number % 50 == 20:
                    written.set()

        thread = threading.Thread(target=write)
        thread.start()
        for _ in range(2):
            assert written.wait(DEADLINE)
            member.kill()
            member.start()
            written.clear()
        events = collect(watch, total)
        thread.join()
        assert [event.value for event in events] == [str(n).encode() for n in range(total)]
        assert not any(event.resynced for event in events)
        assert reader.get("leased") == b"1" and not lease.lost.is_set()
        backend.close()


def test_the_embedded_server_lost_is_said_to_everybody() -> None:
    """It holds everything in memory; there is no coming back, and no hang."""
    listener = open_listener("127.0.0.1", 0)
    backend = Backend({"kind": "embedded", "port": listener.getsockname()[1]})
    servers = [serve(listener)]
    store = backend.open()
    watch = store.watch()
    store.put("a", b"1")
    assert short(collect(watch, 1)) == [("put", "a", b"1")]
    servers.clear()
    with pytest.raises(StoreLost, match=r"gone; start the job again.*flash-etcd"):
        watch.get(DEADLINE)
    with pytest.raises(StoreLost, match=r"127\.0\.0\.1"):
        store.put("a", b"2")
    backend.close()
