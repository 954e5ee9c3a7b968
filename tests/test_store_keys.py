"""The default store's keys after the loss of its host; and the store itself against torch's."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from flashrun.rendezvous.table import RankTable
from flashrun.worker.default_store import Shared
from flashrun.worker.replay.api import Divergence, Mode
from flashrun.worker.store_keys import Keys, Part, Refused, merge
from tests.homes import seat, server, table_of

BOUNDARY = 7


def brought(*ranks: Keys, replaced: tuple[int, ...] = ()) -> list[Part]:
    """As they come from the others."""
    return [
        Part.from_word(keys.to_word(replaced=rank in replaced, at=0))
        for rank, keys in enumerate(ranks)
    ]


def together(*ranks: Keys, replaced: tuple[int, ...] = ()) -> dict[str, bytes]:
    return merge(brought(*ranks, replaced=replaced), BOUNDARY)


def two() -> tuple[Keys, Keys]:
    return Keys(), Keys()


def test_what_one_rank_alone_has_written() -> None:
    a, b = two()
    for value in (b"1", b"2", b"\xff\0"):
        a.set("set", value)
    a.append("log", b"x")
    a.append("log", b"y")
    a.compare_set("won", b"", b"a", b"a", 1)
    b.compare_set("won", b"", b"b", b"a", 1)
    for rank in (a, b):
        rank.compare_set("agreed", b"", b"x", b"x", 1)
    a.set("gone", b"1")
    a.delete("gone", True)
    b.add("n", 2, 2, 1)
    b.set("n", b"40")
    b.add("n", 2, 42, 1)
    assert together(a, b) == {"set": b"\xff\0", "log": b"xy", "won": b"a", "n": b"42",
                              "agreed": b"x"}  # fmt: skip


def test_what_order_does_not_change() -> None:
    a, b = two()
    a.add("n", 1, 1, 1)
    b.add("n", 2, 3, 1)
    b.add("n", -5, -2, 1)
    a.set("flag", b"1")
    b.set("flag", b"1")
    assert together(a, b) == {"n": b"-2", "flag": b"1"}


@pytest.mark.parametrize("how", ["set", "set-again", "append", "delete", "add", "won"])
def test_what_order_changes_is_refused_by_name(how: str) -> None:
    a, b = two()
    a.set("the key", b"1")
    if how == "set":
        b.set("the key", b"2")
    elif how == "set-again":
        b.set("the key", b"2")
        b.set("the key", b"1")
    elif how == "append":
        b.append("the key", b"1")
    elif how == "delete":
        b.delete("the key", True)
    elif how == "add":
        b.add("the key", 1, 2, 1)
    else:
        b.compare_set("the key", b"1", b"2", b"2", 1)
    with pytest.raises(Refused, match=r"ranks \[0, 1\] .*'the key'.*let one rank alone"):
        together(a, b)


def test_what_a_lost_rank_wrote_in_the_middle_of_a_step_was_read() -> None:
    """The replacement knows what was written up to the boundary."""
    lost, reader = two()
    reader.saw("new", b"1", BOUNDARY)
    with pytest.raises(Refused, match="rank 1 has read the default store's key 'new'"):
        together(lost, reader, replaced=(0,))
    for value, interval, exact in (
        (b"old", BOUNDARY - 1, True), (b"old", BOUNDARY, False), (b"now", BOUNDARY, True),
        (b"never", BOUNDARY - 1, False), (b"never", BOUNDARY - 2, True),
    ):  # fmt: skip
        lost, reader = two()
        lost.set("key", b"old")
        lost.set("key", b"now")
        reader.saw("key", value, interval)
        if exact:
            assert together(lost, reader, replaced=(0,)) == {"key": b"now"}
        else:
            with pytest.raises(Refused, match="'key'"):
                together(lost, reader, replaced=(0,))


@pytest.mark.parametrize("there", [False, True])
def test_a_key_was_seen_to_be_there(there: bool) -> None:
    lost, reader = two()
    reader.saw("key", None, BOUNDARY)
    if there:
        lost.set("key", b"1")
        assert together(lost, reader, replaced=(0,)) == {"key": b"1"}
    else:
        with pytest.raises(Refused, match="'key'"):
            together(lost, reader, replaced=(0,))


def test_a_number_that_the_lost_rank_has_counted_up() -> None:
    lost, reader = two()
    lost.add("n", 1, 1, 1)
    reader.add("n", 1, 2, BOUNDARY)
    assert together(lost, reader, replaced=(0,)) == {"n": b"2"}
    reader.add("n", 1, 4, BOUNDARY)  # it has added once more meanwhile
    with pytest.raises(Refused, match="'n'"):
        together(lost, reader, replaced=(0,))


def test_an_older_value_of_a_survivor() -> None:
    writer, reader = two()
    for value in (b"1", b"2"):
        writer.set("key", value)
    reader.saw("key", b"1", BOUNDARY)
    assert together(writer, reader) == {"key": b"2"}


def test_of_some_keys() -> None:
    keys = Keys()
    for key in ("a", "b"):
        keys.set(key, b"1")
        keys.saw(key, b"1", BOUNDARY)
    keys.set("large", bytes(5 << 20))
    (part,) = brought(keys.of(lambda key: key != "large"))
    part = part.of(lambda key: key == "a")
    assert set(part.keys.written) == set(part.keys.read) == {"a"}
    assert merge([part], BOUNDARY) == {"a": b"1"}


def test_too_much() -> None:
    keys = Keys()
    keys.set("large", bytes(5 << 20))
    with pytest.raises(Refused, match="5 MB"):
        keys.to_word(replaced=False, at=0)


# --- the store against torch's


HOMES = 3


@pytest.fixture(scope="module")
def all_servers() -> list[Any]:
    return [server() for _ in range(HOMES)]


@pytest.fixture
def servers(all_servers: list[Any]) -> list[Any]:
    for one in all_servers:
        for key in one.list_keys():
            one.delete_key(key)
    return all_servers


@pytest.fixture(params=["torch", 1, HOMES])
def stores(servers: list[Any], request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any]]:
    """As a script gets it: with a prefix; and what somebody else has, without."""
    ports = [one.port for one in servers]
    if request.param == "torch":
        own, other = (
            c10d.TCPStore("127.0.0.1", ports[0], None, False, wait_for_workers=False)
            for _ in range(2)
        )
        yield c10d.PrefixStore("default_pg", own), other
        return
    shared, elsewhere = (shared_of(ports[: request.param]) for _ in range(2))
    undo = shared.install()
    store = shared.store(timedelta(seconds=300))
    yield c10d.PrefixStore("default_pg", store), elsewhere.store(timedelta(seconds=300))
    undo()


@pytest.fixture
def store(stores: tuple[Any, Any]) -> Any:
    return stores[0]


@pytest.fixture
def elsewhere(stores: tuple[Any, Any]) -> Any:
    return stores[1]


def shared_of(ports: Sequence[int], **more: Any) -> Shared:
    runtime: Any = SimpleNamespace(
        incarnation=0, mode=Mode.LIVE, pending=0, generation=0, boundary=0, rank=0,
        replay=SimpleNamespace(_session=None), laggard=SimpleNamespace(running=False),
        channel=SimpleNamespace(send=lambda *args, **kwargs: None), hold_lock=threading.RLock(),
        **more,
    )  # fmt: skip
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[0])}
    return Shared(runtime, environ, table_of(ports), 0)


def test_values(store: Any) -> None:
    store.set("a", "1")
    store.set("b", b"\xff\0")
    assert store.get("a") == b"1" and store.get("b") == b"\xff\0"
    names = [f"m{i}" for i in range(9)]  # of all homes
    store.multi_set(names, [str(i) for i in range(9)])
    assert store.multi_get(names[::-1]) == [b"%d" % i for i in range(9)][::-1]
    with pytest.raises(dist.DistStoreError, match="must be of same size"):
        store.multi_set(["c", "d"], ["3"])
    store.multi_set(["c", "d"], ["3", "4"])
    assert store.multi_get(["d", "c"]) == [b"4", b"3"]
    store.append("a", "2")
    store.append("new", "x")
    assert store.get("a") == b"12" and store.get("new") == b"x"
    assert store.has_extended_api()


def test_numbers(store: Any) -> None:
    assert store.add("n", 5) == 5 and store.add("n", -7) == -2 and store.get("n") == b"-2"
    store.set("m", "40")
    assert store.add("m", 2) == 42


def test_compare_set(store: Any) -> None:
    assert store.compare_set("key", "x", "1") == b"x"
    assert not store.check(["key"])
    assert store.compare_set("key", "", "1") == b"1"
    assert store.compare_set("key", "other", "2") == b"1"
    assert store.compare_set("key", "1", "2") == b"2"
    assert store.get("key") == b"2"


def test_keys(store: Any) -> None:
    before = store.num_keys()
    store.set("a", "1")
    assert store.check(["a"]) and not store.check(["a", "b"]) and store.check([])
    names = [f"n{i}" for i in range(9)]
    for name in names:
        assert not store.check([*names, "a"])
        store.set(name, "1")
    assert store.check([*names, "a"]) and store.num_keys() == before + 10
    assert all(map(store.delete_key, names))
    assert store.num_keys() == before + 1
    assert store.delete_key("a") and not store.delete_key("a")
    assert not store.check(["a"]) and store.num_keys() == before


def test_waits(store: Any) -> None:
    store.set("a", "1")
    store.wait(["a"])
    store.wait(["a"], timedelta(seconds=1))
    words = "wait timeout after 100ms, keys: /default_pg/a, /default_pg/b"
    with pytest.raises(dist.DistStoreError, match=words):
        store.wait(["a", "b"], timedelta(milliseconds=100))
    store.set_timeout(timedelta(milliseconds=150))
    assert store.timeout == timedelta(milliseconds=150)
    for what, key in ((store.get, "b"), (store.multi_get, ["b"])):
        with pytest.raises(dist.DistStoreError, match="150ms"):
            what(key)


def test_somebody_else_sets_what_is_waited_for(store: Any, elsewhere: Any) -> None:
    begun = threading.Event()

    def later() -> None:
        begun.wait(30)
        elsewhere.set("default_pg/late", "here")

    thread = threading.Thread(target=later)
    thread.start()
    begun.set()
    assert store.get("late") == b"here"
    store.wait(["late"])
    thread.join()


def test_lists_and_queues(store: Any, elsewhere: Any) -> None:
    elsewhere.set("other", "1")
    store.set("a", "1")
    store.queue_push("q", "x")
    store.queue_push("q", b"y")
    assert "a" in store.list_keys() and "other" not in store.list_keys()
    assert store.queue_len("q") == 2 and store.queue_pop("q") == b"x"
    assert store.queue_pop("q", block=False) == b"y" and store.queue_len("q") == 0
    with pytest.raises(dist.QueueEmptyError):
        store.queue_pop(key="q", block=False)
    store.set_timeout(timedelta(milliseconds=150))
    with pytest.raises(dist.DistStoreError, match="150ms, keys: /default_pg/q"):
        store.queue_pop("q")


def test_a_copy(store: Any) -> None:
    other = store.clone()
    other.set("a", "1")
    assert store.get("a") == b"1"


def test_an_object_for_torchs_own_barrier(store: Any) -> None:
    from torch.distributed import distributed_c10d

    distributed_c10d._store_based_barrier(0, store, "g", 1, timedelta(seconds=5))
    store.barrier("b", 1, timedelta(seconds=5))


# --- a home is lost


class Held:
    """A runtime that, when it is held, goes on with another table."""

    def __init__(self, shared: Shared, table: RankTable | None) -> None:
        self.shared, self.table, self.entered = shared, table, 0

    def enter(self) -> None:
        self.entered += 1
        table, self.table = self.table, None
        if table is not None:
            self.shared._next = table, set(table.taken_since(self.shared.client.table.joins))
            self.shared.arrive()


def key_at(place: int, nodes: int) -> str:
    table = table_of(range(1, nodes + 1))
    return next(key for key in map(str, range(99)) if table.home(key) == place)


@pytest.mark.parametrize("lost", range(HOMES))
def test_what_had_its_home_elsewhere_goes_on(lost: int) -> None:
    """Of what is asked at the lost one, each rank is held, and asks its successor again."""
    servers = [server() for _ in range(HOMES)]
    shared = shared_of([one.port for one in servers])
    store = shared.store(timedelta(seconds=30))
    keys = [key_at(place, HOMES) for place in range(HOMES)]
    for key in keys:
        store.add(key, 1)
    ports = [one.port for one in servers]
    servers[lost] = server()
    table = table_of(ports).with_instead(f"n{lost}", seat("spare", servers[lost].port))
    # The connection ends with its server.
    shared.client._clients.drop(lost)
    shared.client.table = table_of([1 if i == lost else port for i, port in enumerate(ports)])
    held = Held(shared, table)
    shared._rt.enter, shared._rt.suspect = held.enter, lambda error: None  # type: ignore[method-assign]
    for place in {*range(HOMES)} - {lost}:
        assert store.add(keys[place], 1) == 2 and not held.entered
    assert store.add(keys[lost], 1) == 1 and held.entered == 1
    store.multi_set(keys, ["7"] * HOMES)
    assert store.multi_get(keys) == [b"7"] * HOMES


@pytest.mark.parametrize("moves", [True, False])
def test_a_home_that_gave_no_answer(servers: list[Any], moves: bool) -> None:
    """What it was asked for is done again if its successor has what is known to have been done; if
    it is still there, nobody knows."""
    ports = [one.port for one in servers]
    shared = shared_of(ports)
    store = shared.store(timedelta(seconds=30))
    key = key_at(1, HOMES)
    store.set(key, "1")
    silent: Any = SimpleNamespace(add=lambda *args: no_answer())
    shared.client._clients._open[1] = silent
    moved = table_of(ports).with_instead("n1", seat("spare", ports[1]))
    held = Held(shared, moved if moves else None)
    told: list[str] = []

    def diverged(error: Exception) -> None:
        told.append(str(error))
        raise error

    shared._rt.enter, shared._rt.suspect = held.enter, lambda error: None  # type: ignore[method-assign]
    shared._rt.diverged = diverged  # type: ignore[method-assign,assignment]
    if moves:
        assert store.add(key, 1) == 2 and not told
    else:
        with pytest.raises(Divergence, match=f"no answer to the default store's add of '{key}'"):
            store.add(key, 1)
    assert held.entered == 1


def no_answer() -> None:
    raise dist.DistNetworkError("nothing came")
