"""Leading the recovery of several nodes on a real store: taking over from an agent or a node that
is dead, and a round that leaves nothing behind; and the bells by which a dead node is known."""

from __future__ import annotations

import json
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from flashrun.control import recovery_lead
from flashrun.control.blobs import packed
from flashrun.control.commands import Log, Reseat, RestartAll, Send, Spawn
from flashrun.control.director import Director
from flashrun.control.ledger import Keys
from flashrun.control.probing import Nobody, lost_nodes, nobody_there
from flashrun.control.recovery import FAULT, Limits
from flashrun.control.recovery_lead import Place
from flashrun.control.recovery_post import Batch, RecoveryPost
from flashrun.node.doorbell import Doorbell
from flashrun.rendezvous.embedded import EmbeddedStore, connect_embedded
from flashrun.rendezvous.kv import Put
from flashrun.rendezvous.server import open_listener, serve
from flashrun.rendezvous.table import NodeRanks, RankTable, Seat, assign_ranks
from tests import helpers
from tests.control.decider import message_of

Opener = Callable[[], EmbeddedStore]


@pytest.fixture
def connect() -> Iterator[Opener]:
    listener = open_listener("127.0.0.1", 0)
    port = int(listener.getsockname()[1])
    keep = serve(listener)
    clients: list[EmbeddedStore] = []

    def open_one() -> EmbeddedStore:
        clients.append(connect_embedded("127.0.0.1", port, 10.0))
        return clients[-1]

    yield open_one
    for client in clients:
        client.close()
    del keep


def table(bells: dict[str, int]) -> RankTable:
    seats = [Seat(node, 2, "default", "127.0.0.1", bell) for node, bell in bells.items()]
    return RankTable(3, 0, 1, "j", 2 * len(seats), "127.0.0.1", 1, True, assign_ranks(seats),
                     "0123456789")  # fmt: skip


class Agent:
    """One node's post, and what came of it."""

    def __init__(
        self, connect: Opener, rounds: RankTable, node: str, joins: bool = False, **options: Any
    ) -> None:
        self.batches: queue.SimpleQueue[Batch] = queue.SimpleQueue()
        self.lost: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        limits = options.pop("limits", Limits())
        self.place = Place(rounds, node, limits, **options)
        self.post = RecoveryPost(
            connect, self.place, 0, self.batches.put, print,
            lambda node, why: self.lost.put((node, why)), 0, (lambda: "") if joins else None,
        )  # fmt: skip
        self.post.start()

    def say(self, rank: int, message: dict[str, Any]) -> None:
        self.post.send({"rank": rank, "incarnation": 0, "message": message})

    def next(self, kind: type[Any]) -> Any:
        while True:
            _, commands = self.batches.get(timeout=30)
            found = [c for c in commands if isinstance(c, kind)]
            if found:
                return found[0]

    def hear(self, op: str) -> None:
        """Until a worker is told so."""
        while True:
            _, commands = self.batches.get(timeout=30)
            if any(isinstance(c, Send) and c.message["op"] == op for c in commands):
                return


Make = Callable[..., Agent]


@pytest.fixture
def make(connect: Opener) -> Iterator[Make]:
    agents: list[Agent] = []

    def one(rounds: RankTable, node: str, **options: Any) -> Agent:
        agents.append(Agent(connect, rounds, node, **options))
        return agents[-1]

    yield one
    for agent in agents:
        agent.post.close()


def formed(agent: Agent) -> None:
    """All through one, so that nothing overtakes it."""
    for rank in range(4):
        agent.say(rank, {"op": "formed"})


def leader_of(store: EmbeddedStore, keys: Keys) -> Callable[[], str | None]:
    def ask() -> str | None:
        value = store.get(keys.leader)
        return None if value is None else str(json.loads(value)["node"])

    return ask


def lead_for_ever(connect: Opener, place: Place) -> None:
    """Somebody leads, and its lease does not run out."""
    store = connect()
    claim = json.dumps({"node": place.node, "life": "before"}).encode()
    store.transaction({}, [Put(place.keys.leader, claim, store.lease(3600))])


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def test_a_loss_on_one_node_is_told_to_all(make: Make) -> None:
    rounds = table({"a": 0, "b": 0})
    a, b = (make(rounds, node) for node in "ab")
    formed(b)
    for rank in range(4):
        b.say(rank, {"op": "hello", "port": 1, "generation": 0})
    b.post.send({"rank": 3, "incarnation": 0, "ended": [FAULT, "SIGKILL"]})
    assert b.next(Spawn) == Spawn(3, 1, 1)
    assert a.next(Send).message == {"op": "abort", "generation": 1, "dead": [3]}


def test_an_agent_that_was_restarted_leads_again_at_once(make: Make, connect: Opener) -> None:
    rounds = table({"a": 0, "b": 0})
    place = Place(rounds, "a", Director(["x"]).machine.limits)
    lead_for_ever(connect, place)
    agent = make(rounds, "a")
    agent.post.send({"rank": 0, "incarnation": 0, "ended": [FAULT, "SIGKILL"]})
    assert "had formed a process group" in agent.next(RestartAll).reason


def test_a_leader_whose_node_is_dead_need_not_be_waited_for(make: Make, connect: Opener) -> None:
    rounds = table({"a": closed_port(), "b": 0})
    lead_for_ever(connect, Place(rounds, "a", Director(["x"]).machine.limits))
    agent = make(rounds, "b")
    formed(agent)
    agent.say(3, {"op": "suspect", "generation": 0, "error": "reset by peer"})
    node, why = agent.lost.get(timeout=30)
    assert node == "a" and "refuses connections" in why


def test_a_leader_that_lives_is_not_replaced(make: Make, connect: Opener) -> None:
    with selectors.DefaultSelector() as selector:
        bell = Doorbell("127.0.0.1", selector)
        rounds = table({"a": bell.port, "b": 0})
        place = Place(rounds, "a", Director(["x"]).machine.limits)
        lead_for_ever(connect, place)
        agent = make(rounds, "b")
        agent.say(3, {"op": "suspect", "generation": 0, "error": "reset by peer"})
        helpers.wait_until(
            lambda: bool(selector.select(0)), "a ring", 30
        )
        for key, _ in selector.select(5):
            key.data()
        store = connect()
        assert leader_of(store, place.keys)() == "a"
        bell.close()


def word(rank: int, *word: Any, incarnation: int = 0) -> dict[str, Any]:
    return {"rank": rank, "incarnation": incarnation, "message": message_of(word, rank, 4)}


# What is heard in each phase of a recovery, and the word to the workers that it leads to.
COURSE = {
    "live": ([{"rank": 3, "incarnation": 0, "ended": [FAULT, "SIGKILL"]}], "abort"),
    "hold": ([*(word(rank, "held", 1, 5, True, False) for rank in range(3)),
              word(3, "hello", 1, incarnation=1)], "plan"),
    "gather": ([*(word(rank, "digest", 1) for rank in range(3)),
                word(3, "held", 1, 5, False, False, incarnation=1)], "rebuild"),
    "rebuild": ([word(rank, "built", 1, incarnation=int(rank == 3)) for rank in range(4)], "go"),
}  # fmt: skip


def leave_books(store: EmbeddedStore, place: Place, phase: str) -> None:
    """As a leader does that dies in this phase without a word, and whose node lives."""
    ledger = place.new_ledger()
    machine = ledger.director.machine
    machine.proved = True
    for rank, who in enumerate(machine.ranks):
        who.port, who.formed = 1000 + rank, True
    for number, (before, (seen, _)) in enumerate(COURSE.items()):
        if before == phase:
            break
        value = {"node": "b", "read": 0, "seen": seen}
        entry = packed(place.keys.prefix, value).first
        ledger.take(place.keys.entry("b", "before", number), entry, value, time.monotonic())
    assert machine.phase == phase
    commit = ledger.commit(time.monotonic())
    assert store.transaction(commit.expected, commit.operations)
    claim = json.dumps({"node": place.node, "life": "before"}).encode()
    lease = store.lease(1.0)
    store.transaction({}, [Put(place.keys.leader, claim, lease)])
    lease.abandon()


def test_a_leader_that_dies_in_any_phase_costs_its_lease(make: Make, connect: Opener) -> None:
    """The next one goes on from the books with what is heard then, and nothing is waited for but
    the lease: every other wait of the recovery is half an hour here."""
    limits = Limits(rebuild=1800.0, grace=1800.0)
    store = connect()
    agents = {}
    for number, phase in enumerate(COURSE, 10):
        rounds = replace(table({"a": 0, "b": 0}), round=number)
        leave_books(store, Place(rounds, "a", limits), phase)
        agents[phase] = make(rounds, "b", limits=limits)
    for phase, agent in agents.items():
        seen, leads_to = COURSE[phase]
        for item in seen:
            agent.post.send(item)
        agent.hear(leads_to)
        assert leader_of(store, agent.place.keys)() == "b"


@pytest.mark.parametrize(
    ("silent", "options", "lost"),
    [
        ("a", {"detection": 0.0}, "a"),
        ("a", {"detection": 600.0}, ""),  # it has the time to stop, should it be cut off
        ("ac", {"detection": 0.0}, "ac"),
        ("ac", {"detection": 0.0, "outlived": True}, "ac"),  # however many: they stand still
    ],
)
def test_nodes_that_do_not_answer_are_lost_once_they_must_have_stopped(
    make: Make, monkeypatch: pytest.MonkeyPatch, silent: str, options: dict[str, Any], lost: str
) -> None:
    rings = threading.Semaphore(0)

    def ring(nodes: Sequence[NodeRanks]) -> dict[str, Nobody]:
        rings.release()
        return {n.node: Nobody("no answer", gone=False) for n in nodes if n.node in silent}

    monkeypatch.setattr(recovery_lead, "lost_nodes", ring)
    monkeypatch.setattr(recovery_lead, "_RING_AGAIN_S", 0.01)
    agent = make(table({"a": 0, "b": 0, "c": 0}), "b", **options)
    for rank in range(6):
        agent.say(rank, {"op": "formed"})
    agent.say(3, {"op": "suspect", "generation": 0, "error": "reset by peer"})
    for _ in range(1 if lost else 3):
        assert rings.acquire(timeout=30)
    assert {agent.lost.get(timeout=30)[0] for _ in lost} == set(lost)
    assert agent.lost.empty()


def instead(rounds: RankTable, lost: str, spare: str) -> RankTable:
    return rounds.with_instead(lost, Seat(spare, 2, "default", "127.0.0.1"))


def test_a_spare_that_leads_has_the_others_told_of_its_place(make: Make, connect: Opener) -> None:
    """It began with the table that the others have yet to hear of."""
    rounds = table({"a": 0, "b": 0})
    seated = instead(rounds, "b", "c")
    c = make(seated, "c", joins=True)
    helpers.wait_until(lambda: leader_of(connect(), c.place.keys)() == "c", "its lead", 30)
    a = make(rounds, "a")
    a.post.tell_seats(seated)  # it hears of it as well, and nothing is news to who leads
    assert RankTable.from_dict(a.next(Reseat).table).of("c") is not None


def test_a_spare_that_does_not_live_any_more_is_missed(make: Make) -> None:
    """Nobody waits for a word of its ranks but for the one that it has joined."""
    rounds = table({"a": 0, "b": 0})
    seat = Seat("c", 2, "default", "127.0.0.1", closed_port())
    a = make(rounds, "a")
    formed(a)
    a.post.tell_seats(rounds.with_instead("b", seat))
    node, why = a.lost.get(timeout=30)
    assert node == "c" and "refuses connections" in why


def test_a_node_that_came_back_is_missed_again(make: Make) -> None:
    """It was lost, has another one's place now, and is lost."""
    gone = closed_port()
    rounds = table({"a": 0, "b": gone, "c": 0})
    a = make(rounds, "a")
    for rank in range(6):
        a.say(rank, {"op": "formed"})
    a.say(0, {"op": "suspect", "generation": 0, "error": "reset by peer"})
    assert a.lost.get(timeout=30)[0] == "b"
    first = instead(rounds, "b", "d")
    a.post.tell_seats(first)
    a.post.tell_seats(first.with_instead("c", Seat("b", 2, "default", "127.0.0.1", gone)))
    assert a.lost.get(timeout=30)[0] == "b"


@pytest.mark.parametrize("first", [True, False], ids=["known before", "known after"])
def test_a_spare_is_told_of_the_place_that_another_took_before(make: Make, first: bool) -> None:
    """What was commanded before it came is for the lost node, but for that."""
    rounds = table({"a": 0, "b": 0, "c": 0})
    one = instead(rounds, "b", "d")
    two = instead(one, "c", "e")
    a = make(rounds, "a")
    if first:
        a.post.tell_seats(one)
        assert a.next(Reseat).table["joins"] == 1
    a.post.tell_seats(two)
    assert a.next(Reseat).table["joins"] == 2
    d = make(one, "d", joins=True)
    assert d.next(Reseat).table["joins"] == 2


def test_a_store_that_outlives_the_job_keeps_nothing(make: Make, connect: Opener) -> None:
    rounds = table({"a": 0, "b": 0})
    store = connect()
    store.put("recovery/2.abcdefgh/head", b"of a round before")
    store.put("recovery/10.abcdefgh/head", b"of a later one, while these agents stood still")
    agents = [make(rounds, node, outlived=True) for node in "ab"]
    formed(agents[0])
    keys = agents[0].place.keys
    helpers.wait_until(lambda: leader_of(store, keys)() is not None, "a leader", 30)
    helpers.wait_until(lambda: len(store.list_keys(keys.inbox)) > 0, "an entry", 30)
    helpers.wait_until(lambda: not store.list_keys("recovery/2"), "the old round's end", 30)
    for agent in agents:
        agent.post.close(30.0)
    assert store.list_keys("recovery/") == ["recovery/10.abcdefgh/head"]


def test_a_bell_that_is_answered_and_one_that_is_not() -> None:
    with selectors.DefaultSelector() as selector:
        bell = Doorbell("127.0.0.1", selector)
        here, gone, none = assign_ranks(
            [
                Seat("here", 1, "r", "127.0.0.1", bell.port),
                Seat("gone", 1, "r", "127.0.0.1", closed_port()),
                Seat("none", 1, "r", "127.0.0.1"),
            ]
        )
        found = nobody_there(here, 0.05)  # as of a supervisor that stands still
        assert found is not None and not found.gone and "no answer" in found.why
        with ThreadPoolExecutor() as pool:
            for ring in (lambda: nobody_there(here), lambda: lost_nodes([here, gone, none])):
                ringing = pool.submit(ring)
                while not ringing.done():
                    for key, _ in selector.select(0.1):
                        key.data()
                assert ringing.result() in (None, {"gone": nobody_there(gone)})
        bell.close()
        assert lost_nodes([here])["here"].gone
        assert nobody_there(replace(here, addr="no.such.invalid")) is None, "our own trouble"


def in_training() -> Director:
    director = Director(["a", "a", "b", "b"])
    for rank in range(4):
        director.message(rank, 0, {"op": "formed"}, 0.0)
    director.machine.proved = True
    return director


def test_a_lost_nodes_ranks_are_started_where_its_place_was_taken() -> None:
    director = in_training()
    (log,) = director.node_lost(range(2, 4), "10.0.0.2", "refused", 1.0)
    assert isinstance(log, Log)
    assert "the node at 10.0.0.2 was lost with ranks 2 to 3 (refused)" in log.line
    commands = director.node_joined(range(2, 4), "10.0.0.3", 2.0)
    assert [(c.rank, c.incarnation) for c in commands if isinstance(c, Spawn)] == [(2, 1), (3, 1)]
    assert sorted(director.machine.dead) == ["2", "3"]
    assert director.missed()[1] == {0, 1}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: setattr(d.machine, "restart_only", "rank 1: no room"), "rank 1: no room"),
        (lambda d: setattr(d.machine.ranks[1], "formed", False), "formed no process group"),
    ],
)
def test_a_lost_node_ends_the_recovery_in_place_where_it_must(
    change: Callable[[Director], None], words: str
) -> None:
    director = in_training()
    change(director)
    log, restart = director.node_lost(range(2, 4), "10.0.0.2", "refused", 1.0)
    assert isinstance(log, Log) and isinstance(restart, RestartAll)
    assert "the node at 10.0.0.2 was lost with ranks 2 to 3" in restart.reason
    assert words in restart.reason
    assert director.node_lost(range(2), "10.0.0.1", "refused", 2.0) == []
    assert director.node_joined(range(2, 4), "10.0.0.3", 2.0) == []


def test_what_a_lost_node_has_left_is_nowhere() -> None:
    director = in_training()
    director.node_lost(range(2, 4), "10.0.0.2", "refused", 1.0)
    log, restart = director.unable(range(2, 4), "the node at 10.0.0.1 says: none")
    assert isinstance(log, Log) and isinstance(restart, RestartAll)
    assert "the host-read logs of ranks 2 to 3 were lost with their node" in restart.reason


def test_nodes_that_cannot_have_spares() -> None:
    log, restart = in_training().node_lost(range(2, 4), "10.0.0.2", "refused", 1.0, "use flash")
    assert isinstance(log, Log) and isinstance(restart, RestartAll)
    assert "use flash" in restart.reason


def test_a_node_whose_ranks_have_ended_is_not_missed() -> None:
    director = Director(["a", "b"])
    director.machine.ranks[1].gone = True
    assert director.node_lost(range(1, 2), "10.0.0.2", "refused", 1.0) == []


def test_who_is_missed() -> None:
    director = Director(["a", "b"])
    assert director.missed() == ("", set()) or not director.missed()[1]
    for rank in range(2):
        director.message(rank, 0, {"op": "formed"}, 0.0)
    director.message(0, 0, {"op": "suspect", "generation": 0, "error": "x"}, 0.0)
    assert director.missed() == ("suspected", {0, 1})
    director.tick(1.0)
    assert director.missed() == ("1.hold", {0, 1})
    held = {"op": "held", "generation": 1, "boundary": 0, "state": True, "finished": False,
            "groups": {}, "check": {"groups": {}, "site": "", "buckets": []}}  # fmt: skip
    director.message(0, 0, held, 1.0)
    assert director.missed() == ("1.hold", {1})


def test_no_thread_is_left(connect: Opener) -> None:
    before = threading.active_count()
    agent = Agent(connect, table({"a": 0, "b": 0}), "a")
    agent.say(0, {"op": "formed"})
    store = connect()
    helpers.wait_until(lambda: bool(store.list_keys(agent.place.keys.inbox)), "an entry", 30)
    agent.post.close(10.0)
    assert threading.active_count() <= before + 2  # of our own client
