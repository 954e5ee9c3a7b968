"""A node that is cut off stops before others may act as its ranks, and one side at most goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flashrun.control import fence as fence_module
from flashrun.control.coordinator import Coordinator
from flashrun.control.events import Connected, Lost, Membership, Node, Timing, Waiting
from flashrun.control.fence import Fence, Pausing, settled_s, try_s
from flashrun.control.liveness import Doors, Heartbeats, given_up
from flashrun.control.probing import out_of_reach
from flashrun.rendezvous.endpoint import Endpoint
from tests import helpers
from tests.test_coordinator import job


class Clock:
    """A clock that moves on when somebody waits, in the place of `time` and of an event."""

    def __init__(self) -> None:
        self.now = 0.0
        self.over = float("inf")
        self.between: Callable[[float], None] = lambda until: None

    def monotonic(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        """Whether it is over, as of an event."""
        self.between(self.now + seconds)
        self.now += seconds
        return self.now >= self.over

    def is_set(self) -> bool:
        return self.now >= self.over

    def set(self) -> None:
        self.over = self.now


def stops(
    timeout: float, no_store: float, no_peers: float, monkeypatch: pytest.MonkeyPatch
) -> float:
    """When a node's workers have stopped that loses the store and the other nodes then."""
    clock, try_, paused = Clock(), try_s(timeout), []
    monkeypatch.setattr(fence_module, "time", clock)
    beats = [b * timeout / 3 for b in range(60)]

    def sent(until: float) -> None:
        while beats and beats[0] <= min(until, no_store):
            fence.answered(beats.pop(0))

    def look(try_s: float) -> str | None:
        if clock.now >= no_peers:
            clock.now += 2 * try_
        return "alone" if clock.now >= no_peers else None

    fence = Fence(
        timeout, look, lambda why: None,
        pausing=Pausing(1e9, lambda why, since: (paused.append(clock.now), clock.set()),
                        lambda why, paused_s: None),
    )  # fmt: skip
    fence._closed = clock  # type: ignore[assignment]
    clock.between = sent
    fence._extend(timeout)
    fence._run()
    return paused[0] + try_


def given_away(timeout: float, no_store: float, no_peers: float, phase: float) -> float:
    """When the others give its ranks away at the earliest; they see its heartbeats at once, and
    look at them from `phase` on. As of `Controller._lost_of`."""
    interval, try_, settled = timeout / 3, try_s(timeout), settled_s(timeout)
    heartbeats, doors = Heartbeats(timeout), Doors(timeout / 2)
    now = phase
    while True:
        beat = str(int(min(now, no_store) / interval)).encode()
        silent = heartbeats.observe({"n": beat}, now)
        missed = {}
        pause = interval / 2
        if heartbeats.still_for("n", now) > max(interval, timeout - settled - interval / 2):
            away = ["n"] if now >= no_peers else []
            missed = doors.note(away, now)
            pause = try_ if away else pause
        if given_up(silent, missed, (), settled):
            return now
        now += pause + (2 * try_ if missed else 0.0)


@pytest.mark.parametrize("timeout", [4.0, 15.0, 60.0])
def test_workers_stand_still_before_their_ranks_are_given_away(
    timeout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever the node loses first, and whenever the other."""
    for store in range(24):
        for peers in range(48):
            no_store, no_peers = store * timeout / 8, peers * timeout / 8 + 0.01
            stopped = stops(timeout, no_store, no_peers, monkeypatch)
            for phase in (0.0, 0.1 * timeout):
                away = given_away(timeout, no_store, no_peers, phase)
                assert stopped <= away, (no_store, no_peers, phase)
                if no_store >= no_peers:  # nor later than it need be
                    assert away <= no_store + timeout * 1.2 + 2 * try_s(timeout)


@pytest.mark.parametrize(
    ("silent", "missed", "gone", "lost"),
    [
        ("a", {"a": 7}, "", "a"),
        ("a", {"a": 4}, "", ""),  # it may not have noticed yet
        ("a", {}, "", ""),  # it lives, and does not reach the store
        ("", {"a": 7}, "", ""),  # it has the store
        ("abc", {"a": 7, "b": 7, "c": 7}, "", "abc"),  # however many
        ("abc", {"a": 7, "b": 7}, "", "ab"),
        ("abc", {"b": 4}, "a", "a"),
    ],
)
def test_who_is_given_up(
    silent: str, missed: dict[str, float], gone: str, lost: str
) -> None:
    assert given_up(silent, missed, gone, 5.0) == frozenset(lost)


def test_since_when_doors_are_shut() -> None:
    doors = Doors(unseen_s=2.0)
    assert doors.note("ab", 10.0) == {"a": 0.0, "b": 0.0}
    assert doors.note("a", 12.0) == {"a": 2.0}
    assert doors.note("ab", 13.0) == {"a": 3.0, "b": 0.0}, "it had answered"
    assert doors.note("ab", 16.0) == {"a": 0.0, "b": 0.0}, "they may have, nobody looked"


class Looks:
    """What is found by the looks of a fence, in order; `at` has their times."""

    def __init__(self, *found: str | None) -> None:
        self.found = list(found)
        self.at: list[float] = []
        self.answer = False  # a heartbeat is answered during each look
        self.during: Callable[[], object] = lambda: None
        self.enough = threading.Event()

    def __call__(self, try_s: float) -> str | None:
        self.at.append(time.monotonic())
        self.during()
        found = self.found.pop(0) if self.found else None
        if not self.found:
            self.enough.set()
        return found


@pytest.fixture
def fenced() -> Iterator[Callable[..., Fence]]:
    made: list[Fence] = []

    def make(
        looks: Looks, on_cut_off: Callable[[str], object], sent: float | None = None,
        pausing: Pausing | None = None,
    ) -> Fence:  # fmt: skip
        fence = Fence(0.4, looks, on_cut_off, pausing=pausing)
        made.append(fence)
        looks.during = lambda: looks.answer and fence.answered(time.monotonic())
        fence.start(sent)
        return fence

    yield make
    for fence in made:
        fence.close()


def test_it_looks_in_time_and_again(fenced: Callable[..., Fence]) -> None:
    looks, said = Looks(None, None, "the reason"), []
    sent = time.monotonic()
    cut_off = threading.Event()
    fenced(looks, lambda why: (said.append(why), cut_off.set()), sent)
    assert cut_off.wait(20)
    assert looks.at[0] >= sent + 0.4 - 3 * try_s(0.4)
    assert len(looks.at) == 3 and "This node is cut off: the reason. Its workers" in said[0]


class Told:
    """What a fence says of its node's workers, in order."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.news = threading.Event()

    def pausing(self, at_most: float = 60.0, since: float | None = None) -> Pausing:
        return Pausing(
            at_most, lambda why, since: self.tell(f"pause: {why}"),
            lambda why, paused_s: self.tell(f"go on: {why}"), since,
        )  # fmt: skip

    def tell(self, line: str) -> None:
        self.said.append(line)
        self.news.set()

    def next(self) -> str:
        assert self.news.wait(20)
        self.news.clear()
        return self.said[-1]


def test_a_paused_node_goes_on_by_the_word_of_the_store_only(fenced: Callable[..., Fence]) -> None:
    told = Told()
    looks = Looks(*["all alone"] * 99)
    fence = fenced(looks, told.tell, time.monotonic(), told.pausing())
    assert told.next() == "pause: all alone" and fence.paused
    helpers.wait_until(lambda: time.monotonic() > fence._safe_until, "the end of its time", 20)
    with fence._lock:
        fence._settle(time.monotonic(), None, time.monotonic())
    assert fence.paused, "the others answer again, but too late: they may have its ranks"
    fence.go_on("nobody has asked the store since")
    assert fence.paused
    fence.answered(time.monotonic())
    assert fence.paused, "what it says was not looked at"
    fence.go_on("ours")
    assert told.next() == "go on: ours" and not fence.paused


def test_a_pause_that_was_for_nothing(fenced: Callable[..., Fence]) -> None:
    """All answer again before anybody can have its ranks."""
    told, looks = Told(), Looks("for a moment")
    fence = Fence(8.0, looks, told.tell, pausing=told.pausing())
    fence.start(time.monotonic() - 4.9)  # it looks in a tenth of a second, and once more 1 s later
    assert told.next() == "pause: for a moment"
    assert told.next() == "go on: all nodes of the round answer again"
    fence.close()


def test_a_pause_ends_after_all(fenced: Callable[..., Fence]) -> None:
    """Also one that the agent before this one has begun."""
    told = Told()
    now = time.monotonic()
    fenced(Looks(*["alone"] * 99), told.tell, now, told.pausing(at_most=50, since=now - 60))
    assert told.next().startswith("This node is cut off: alone. Its workers are stopped")


def test_a_machine_that_slept_pauses_first(fenced: Callable[..., Fence]) -> None:
    """Before it looks around, and even if the store answers before that."""
    told, looks = Told(), Looks(None)
    fence = fenced(looks, told.tell, time.monotonic() - 10, told.pausing())
    assert "it has stood still" in told.next()
    assert looks.enough.wait(20) and fence.paused
    fence.close()
    slept = Fence(1e6, looks, told.tell, pausing=told.pausing())
    slept._extend(time.monotonic() - 1)
    slept.answered(time.monotonic())
    assert slept.paused and "it has stood still" in told.next()


def test_an_answer_while_it_looks_counts(fenced: Callable[..., Fence]) -> None:
    looks, said = Looks("for a moment", None), []
    looks.answer = True
    fenced(looks, said.append)  # by the agent before this one: it looks at once
    assert looks.enough.wait(20) and not said


def test_the_next_agent_goes_on_from_the_last_answer(tmp_path: Path) -> None:
    """Seen in the soak: an agent was killed, and the link was down for a second as the next one
    began. It took its node for cut off."""
    kept, looks = tmp_path / "answered", Looks("for a moment")
    first = Fence(1e6, looks, lambda why: None, kept)
    first.start(time.monotonic() - 50)
    sent = time.monotonic()
    first.answered(sent)
    first.close()
    membership = Membership(
        job(nodes="2:2"), Endpoint("10.77.0.1", 1, "10.77.0.1:1"),
        timing=Timing(detection_timeout=1e6),
    )  # fmt: skip
    coordinator = Coordinator(
        membership, Node("n0", 1, "r"), wake=lambda: None, host_store=lambda host, port: 0,
        resume=Connected("10.77.0.1", 1, False, 1), answered=kept,
    )  # fmt: skip
    coordinator._be_fenced(Connected("10.77.0.1", 1, False, 1), None)
    assert coordinator._fence is not None and coordinator._fence._safe_until == sent + 1e6
    coordinator.close()
    kept.write_text("")
    last = Fence(1e6, looks, lambda why: None, kept)
    last.start(None)  # it may have been long ago: it looks at once
    assert looks.enough.wait(20)
    last.close()


def test_no_way_to_a_machine() -> None:
    refuses = helpers.free_port()
    assert out_of_reach("127.0.0.1", refuses, 0.2) is None, "the machine is there"
    with helpers.silent_port() as port:
        found = out_of_reach("127.0.0.1", port, 0.05)
    assert found is not None and found.startswith(f"127.0.0.1:{port} cannot be reached")


def test_an_agent_that_was_restarted_where_the_store_is_out_of_reach() -> None:
    """It has never had a word from the store. (It would try for ``join_timeout`` seconds, with the
    workers that it has found.)"""
    with helpers.silent_port() as port:
        membership = Membership(
            job(nodes="2:2"), Endpoint("127.0.0.1", port, f"127.0.0.1:{port}"),
            timing=Timing(detection_timeout=0.4),
        )  # fmt: skip
        coordinator = Coordinator(
            membership, Node("n0", 1, "r"), wake=lambda: None, host_store=lambda host, port: 0,
            resume=Connected("127.0.0.1", port, False, 1),
        )  # fmt: skip
        coordinator.start()
        try:
            while not isinstance(event := coordinator.events.get(timeout=60), Lost):
                assert isinstance(event, Waiting)
            assert event.at_once and f"This node is cut off: 127.0.0.1:{port}" in event.reason
        finally:
            coordinator.close(30.0)
