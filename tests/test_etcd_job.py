"""Jobs come and go in one etcd cluster: who belongs to which, and what is left of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from flashrun.control.coordinator import Coordinator
from flashrun.control.events import Connected, Lost, Membership, Node, Pause, Timing, Waiting
from flashrun.control.patience import Patience
from flashrun.rendezvous.endpoint import Endpoint
from flashrun.rendezvous.etcd_config import EtcdConfig
from flashrun.rendezvous.kv import ControlStore, StoreLost
from flashrun.rendezvous.table import RankTable, Seat, assign_ranks
from flashrun.rendezvous.tcp_kv import Cancelled
from tests import etcd, helpers
from tests.test_coordinator import job

if TYPE_CHECKING:
    from flashrun.rendezvous.etcd_job import JobFolder, Look
    from flashrun.rendezvous.etcd_store import EtcdStore

Open = Callable[[], "EtcdStore"]


@pytest.fixture
def base(tmp_path: Path) -> Iterator[Open]:
    etcd.need()
    from flashrun.rendezvous.etcd_store import EtcdStore

    with etcd.Cluster(tmp_path / "etcd") as cluster, ExitStack() as stack:

        def make() -> EtcdStore:
            store = EtcdStore(cluster.config(prefix="/flashrun/j/"), lambda line: None)
            stack.callback(store.close)
            return store

        yield make


def find(store: EtcdStore, me: str, look: Look = lambda store: "lives") -> JobFolder:
    from flashrun.rendezvous.etcd_job import JobFolder

    return JobFolder.find(store, me, look, lambda line: None)


def test_agents_of_one_job_meet_and_the_last_one_leaves_nothing(base: Open) -> None:
    one, two = find(base(), "a"), find(base(), "b")
    assert one.name == two.name
    one.store.put("x", b"1")
    assert two.store.get("x") == b"1"
    one.leave()
    assert two.store.get("x") == b"1"
    two.leave()
    assert base().list_keys() == [] and two.store.list_keys() == []


@pytest.mark.parametrize("seen", ["over", "lives"])
def test_the_next_job_of_a_run_id_begins_anew(base: Open, seen: str) -> None:
    """The one before has ended, though an agent of it is still there; or it runs."""

    def look(store: ControlStore) -> str:
        assert store.get("x") == b"1"
        return seen

    old = find(base(), "a")
    old.store.put("x", b"1")
    new = find(base(), "b", look)  # type: ignore[arg-type]
    assert (new.name == old.name) == (seen == "lives")
    assert new.store.get("x") == (b"1" if seen == "lives" else None)
    old.leave()
    new.look_after()
    assert find(base(), "c").name == new.name


def test_what_is_left_of_a_job_without_agents_is_removed(base: Open) -> None:
    old = find(base(), "a")
    old.store.put("x", b"1")
    old._alive.revoke()  # as when it has been dead for a while
    new = find(base(), "b", lambda store: pytest.fail("nobody of it lives"))
    assert new.name != old.name
    assert old.store.list_keys() == []


def test_a_job_that_does_not_answer_is_waited_for(base: Open) -> None:
    old = find(base(), "a")
    asked = threading.Event()

    def look(store: ControlStore) -> str:
        if not asked.is_set():
            asked.set()
            threading.Thread(target=old._alive.revoke).start()
        return "doubtful"

    assert find(base(), "b", look).name != old.name  # type: ignore[arg-type]
    assert asked.is_set()


def test_an_agent_that_was_away_comes_back_unless_its_job_was_replaced(base: Open) -> None:
    from flashrun.rendezvous.etcd_job import JobFolder, Replaced

    mine = find(base(), "a")
    mine._alive.revoke()  # the store has forgotten it
    mine.look_after()
    assert find(base(), "b").name == mine.name
    assert JobFolder.resume(base(), "a", mine.name).name == mine.name
    mine._alive.revoke()
    other = find(base(), "c", lambda store: "over")
    with pytest.raises(Replaced, match="Start the job again"):
        mine.look_after()
    with pytest.raises(Replaced):
        JobFolder.resume(base(), "a", mine.name)
    other.leave()


# --- patience -----------------------------------------------------------------------------------


class Away:
    """A store that answers after a while, by count of attempts."""

    def __init__(self, attempts: int) -> None:
        self.left = attempts

    def __call__(self) -> str:
        self.left -= 1
        if self.left < 0:
            return "answer"
        raise StoreLost("etcd at x did not answer.")


def patience(
    awaited: bool = False, outage: float = 0.0
) -> tuple[Patience, list[str], threading.Event]:
    lines: list[str] = []
    cancel = threading.Event()
    timing = Timing(outage=outage, waiting_line=0.0)
    made = Patience("etcd at x", timing, cancel=cancel, say=lines.append, awaited=lambda: awaited)
    return made, lines, cancel


def test_training_goes_on() -> None:
    made, lines, _ = patience()
    assert made.call(Away(3)) == "answer"
    assert lines and "training goes on" in lines[0]


def test_who_is_waited_for_and_who_is_not() -> None:
    made, _, _ = patience(awaited=True)
    with pytest.raises(StoreLost, match=r"while this node waited for it \(--recovery-timeout=0\)"):
        made.call(Away(10))
    made, _, _ = patience(awaited=True, outage=60.0)
    assert made.call(Away(3)) == "answer"
    made, _, cancel = patience()
    cancel.set()
    with pytest.raises(Cancelled):
        made.call(Away(3))


def test_an_agent_that_was_restarted_on_a_node_that_is_cut_off_pauses_and_stops() -> None:
    """It has not had a word from the store, and knows the other nodes from the agent before it.
    (It waited for the store for ever, and its ranks had been given to another node.)"""
    etcd.need()
    closed = helpers.free_port()
    seats = [Seat(f"n{number}", 1, "r", "127.0.0.1", closed) for number in range(3)]
    table = RankTable(0, 0, 0, "j", 3, "127.0.0.1", 1, True, assign_ranks(seats))
    membership = Membership(
        job(nodes="3:3", backend="flash-etcd"), Endpoint("", 0, "etcd"), store="etcd",
        timing=Timing(detection_timeout=0.5, outage=1.5), etcd=EtcdConfig((f"127.0.0.1:{closed}",)),
    )  # fmt: skip
    coordinator = Coordinator(
        membership, Node("n0", 1, "r"), wake=lambda: None, host_store=lambda host, port: 0,
        resume=Connected("", 0, False, 1, "a.1"), table=table,
    )  # fmt: skip
    coordinator.start()
    try:
        events: list[Any] = []
        while not (events and isinstance(events[-1], Lost)):
            events.append(coordinator.events.get(timeout=60))
        (pause,) = [e for e in events if isinstance(e, Pause)]
        assert {type(e) for e in events} <= {Waiting, Pause, Lost}
        assert "it has stood still" in pause.why, "how long ago its last heartbeat was is not known"
        assert "This node is cut off: etcd at" in events[-1].reason
    finally:
        coordinator.close(30.0)
