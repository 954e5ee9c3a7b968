"""A node that is cut off stops before others may act as its ranks, and one side at most goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flashrun.control.coordinator import Coordinator
from flashrun.control.events import Connected, Lost, Membership, Node, Timing, Waiting
from flashrun.control.fence import Fence, is_cut_off, try_s
from flashrun.control.liveness import given_up
from flashrun.control.probing import out_of_reach
from flashrun.rendezvous.endpoint import Endpoint
from tests import helpers
from tests.test_coordinator import job


@pytest.mark.parametrize(
    ("with_store", "without", "goes_on"),
    [
        (1, 1, "with"),
        (2, 1, "with"),
        (1, 2, "nobody"),  # most of them: as a rule the store is away, so they wait for it
        (3, 1, "with"),
        (2, 2, "with"),
        (1, 3, "nobody"),
        (3, 2, "with"),
        (2, 3, "nobody"),
        (0, 4, "without"),  # it is the store that is away
        (4, 0, "with"),
    ],
)
def test_splits(with_store: int, without: int, goes_on: str) -> None:
    """Of a round's nodes, some reach the store and each other, the rest reach each other only. Who
    trains on, or acts as other ranks, is never two."""
    nodes = with_store + without
    there = [f"t{i}" for i in range(with_store)]
    hidden = [f"h{i}" for i in range(without)]
    stops = without > 0 and is_cut_off(nodes, with_store)
    lost = given_up(hidden, (), (), nodes) if there else frozenset()
    assert lost in (frozenset(), frozenset(hidden))
    assert not lost or stops, "two processes of one rank"
    whole = "without" if with_store == 0 else "with" if without == 0 else ""
    assert goes_on == (whole or ("with" if lost else "nobody"))


@pytest.mark.parametrize(
    ("silent", "answering", "gone", "lost"),
    [
        ("a", "", "", "a"),
        ("a", "a", "", ""),  # it lives, and does not reach the store
        ("ab", "", "", "ab"),
        ("abc", "", "", ""),  # most may go on by themselves
        ("abc", "c", "", "ab"),
        ("abc", "", "a", "abc"),
        ("abcd", "", "a", "a"),
        ("abcd", "", "abcd", "abcd"),  # a dead node does not go on
    ],
)
def test_who_is_given_up_of_four(silent: str, answering: str, gone: str, lost: str) -> None:
    assert given_up(silent, answering, gone, 4) == frozenset(lost)


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

    def make(looks: Looks, on_cut_off: Callable[[str], None], sent: float | None = None) -> Fence:
        fence = Fence(0.4, looks, on_cut_off)
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
    assert coordinator._fence is not None and coordinator._fence._sent == sent
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
