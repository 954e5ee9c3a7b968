"""What goes wrong inside of a recovery: tried again where that helps, otherwise a restart of all
with the reason; never an exception in the script, never a hang."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable

import pytest
import torch

from flashrun.control.commands import Command, Send
from flashrun.control.recovery import Limits
from flashrun.worker import peers, proof
from flashrun.worker.communicator import Superseded
from flashrun.worker.peers import Peers
from flashrun.worker.replay.api import Divergence, Replay
from flashrun.worker.runtime import Runtime
from flashrun.worker.transfer import Fetch
from tests.inplace.harness import Job, same
from tests.inplace.test_recovery import at_collective, check

torch.set_num_threads(1)  # before the forks: OpenMP does not survive them

STEPS = "14"
Prepare = Callable[[int, int], None]


def dies_in_interval(who: int, interval: int) -> Prepare:
    """Rank `who` kills itself at the first collective that it issues in an interval."""

    def prepare(rank: int, incarnation: int) -> None:
        issue, pid = Runtime.issue, os.getpid()

        def issued(runtime, *args):  # type: ignore[no-untyped-def]
            if runtime.boundary == interval and (rank, incarnation) == (who, 0):
                os.kill(pid, signal.SIGKILL)
            return issue(runtime, *args)

        Runtime.issue = issued  # type: ignore[method-assign]

    return prepare


def also(first: Prepare, then: Prepare) -> Prepare:
    def prepare(rank: int, incarnation: int) -> None:
        first(rank, incarnation)
        then(rank, incarnation)

    return prepare


def killed_and(then: Prepare) -> Job:
    """Rank 1 dies in the middle; `then` prepares each process (rank, incarnation)."""
    return Job("zoo.py", 3, ("plain", STEPS), in_child=also(at_collective({(1, 0): 40}), then))


def test_an_error_of_the_system_is_tried_again() -> None:
    def prepare(rank: int, incarnation: int) -> None:
        fetch, tried = Peers.fetch_state, []

        def fails_once(*args):  # type: ignore[no-untyped-def]
            tried.append(1)
            if len(tried) == 1:
                raise OSError(errno.EMFILE, "too many open files")
            return fetch(*args)

        Peers.fetch_state = fails_once  # type: ignore[method-assign]

    outcome = killed_and(prepare).run()
    check("plain", outcome)
    assert any("trying again" in line and "EMFILE" not in line for line in outcome.lines)
    assert outcome.incarnations == [0, 1, 0]


class LosesSuspicions(Job):
    """The agent ends (its connections with it) before it has read what a rank suspects, once."""

    def _read(self, connection: socket.socket) -> None:
        lost: set[int] = self.__dict__.setdefault("lost", set())
        rank, _ = self.who.get(connection, (-1, 0))
        if rank not in lost and b'"suspect"' in connection.recv(1 << 20, socket.MSG_PEEK):
            lost.add(rank)
            connection.recv(1 << 20)
            connection.shutdown(socket.SHUT_RDWR)
        super()._read(connection)


def test_a_suspicion_outlives_the_connection() -> None:
    def prepare(rank: int, incarnation: int) -> None:
        issue, broken = Runtime.issue, []

        def breaks_once(runtime, *args):  # type: ignore[no-untyped-def]
            op = issue(runtime, *args)
            if runtime.boundary == 4 and rank == 1 and not broken:
                broken.append(1)
                runtime.abort()
            return op

        Runtime.issue = breaks_once  # type: ignore[method-assign]

    job = LosesSuspicions("zoo.py", 2, ("plain", STEPS), in_child=prepare, timeout=240.0)
    outcome = job.run()
    assert outcome.end == "done" and job.__dict__["lost"], outcome
    assert any("trying again" in line for line in outcome.lines)
    assert outcome.incarnations == [0, 0]


def test_one_that_stays_ends_in_a_restart_with_the_reason() -> None:
    def prepare(rank: int, incarnation: int) -> None:
        def fails(*args):  # type: ignore[no-untyped-def]
            raise OSError(errno.EMFILE, "too many open files")

        Peers.fetch_state = fails  # type: ignore[method-assign]

    outcome = killed_and(prepare).run()
    assert outcome.end == "restart" and "too many open files" in outcome.reason, outcome


def test_a_divergence_after_the_state_is_the_reason() -> None:
    def prepare(rank: int, incarnation: int) -> None:
        def diverges(*args):  # type: ignore[no-untyped-def]
            raise Divergence("an output takes collectives of its own")

        Replay.after_state = diverges  # type: ignore[method-assign]

    outcome = killed_and(prepare).run()
    assert outcome.end == "restart", outcome
    assert outcome.reason == (
        "rank 1 can't be replaced in place: an output takes collectives of its own"
    )


def test_a_replacement_that_hangs_on_its_way() -> None:
    def prepare(rank: int, incarnation: int) -> None:
        issue, never = Runtime.issue, threading.Event()

        def hangs(runtime, *args):  # type: ignore[no-untyped-def]
            if incarnation and runtime.boundary == 3:
                never.wait()
            return issue(runtime, *args)

        Runtime.issue = hangs  # type: ignore[method-assign]

    job = killed_and(prepare)
    job.limits = Limits(gather=0.5)
    outcome = job.run()
    assert outcome.end == "restart", outcome
    said = r"rank\(s\) 1 did not come to boundary \d within 0.5 s; .* a longer --recovery-timeout"
    assert re.fullmatch(said, outcome.reason), outcome


@pytest.mark.slow
def test_communicators_that_are_not_there_in_time_are_built_again() -> None:
    def prepare(rank: int, incarnation: int) -> None:
        build, tried = Runtime.build, []

        def waits_once(runtime, group, generation):  # type: ignore[no-untyped-def]
            while incarnation and not tried:  # as for a peer that does not come
                try:
                    runtime.wanted(generation)()
                except Superseded:
                    tried.append(generation)
                    raise
                time.sleep(0.01)
            build(runtime, group, generation)

        Runtime.build = waits_once  # type: ignore[method-assign]

    job = killed_and(prepare)
    job.limits = Limits(rebuild=2.0, flaps=50)
    outcome = job.run()
    check("plain", outcome)
    assert any(
        "trying again (rank(s) " in line and "did not rebuild in time" in line
        for line in outcome.lines
    )
    assert outcome.incarnations == [0, 1, 0]


@pytest.mark.slow
def test_a_donor_that_says_nothing_is_asked_again() -> None:
    def prepare(rank: int, incarnation: int) -> None:
        provide, asked, never = Peers._provide, [], threading.Event()

        def stalls_once(peers, request):  # type: ignore[no-untyped-def]
            asked.append(1)
            if rank == 2 and len(asked) == 1:
                never.wait()
            return provide(peers, request)

        class Impatient(Fetch):
            def __init__(self, address, token, request, deadline):  # type: ignore[no-untyped-def]
                super().__init__(address, token, request, min(deadline, 1.0))

        Peers._provide = stalls_once  # type: ignore[method-assign]
        peers.Fetch = Impatient  # type: ignore[misc]

    outcome = killed_and(prepare).run()
    check("plain", outcome)
    assert any(
        "trying again (rank 1: TransferError: asking the peer" in line and "timed out" in line
        for line in outcome.lines
    )
    assert outcome.incarnations == [0, 1, 0]


class ConfirmsNothing(Job):
    """No word on the comparison after a recovery comes to anybody."""

    def _obey(self, commands: list[Command]) -> None:
        kept = [c for c in commands if not (isinstance(c, Send) and c.message["op"] == "confirmed")]
        self.__dict__["dropped"] = self.__dict__.get("dropped", 0) + len(commands) - len(kept)
        super()._obey(kept)


@pytest.mark.slow
def test_the_script_goes_on_where_no_comparison_comes() -> None:
    def prepare(rank: int, incarnation: int) -> None:
        proof.CONFIRM = 0.5

    job = ConfirmsNothing(
        "zoo.py", 3, ("plain", STEPS), in_child=also(at_collective({(1, 0): 40}), prepare)
    )
    check("plain", job.run())
    assert job.__dict__["dropped"] >= 3


def test_a_survivor_that_never_comes_to_a_collective() -> None:
    job = Job("busy.py", 3, in_child=dies_in_interval(1, 4), limits=Limits(hold=0.5))
    outcome = job.run()
    assert outcome.end == "restart", outcome
    assert outcome.reason == (
        "rank(s) 0 did not come to its next collective within 0.5 s; if that can take longer, give"
        " a longer --recovery-timeout"
    )


def test_collectives_at_the_beginning_of_a_step() -> None:
    """Nothing is changed yet, so who waits there has the state of the boundary."""
    wanted = Job("own_step.py", 3).run()
    outcome = Job("own_step.py", 3, in_child=dies_in_interval(1, 4)).run()
    assert outcome.end == "done", (outcome.reason, outcome.lines, outcome.output)
    assert outcome.incarnations == [0, 1, 0]
    assert not same(wanted.results, outcome.results)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("layers", "differ at boundary 2 in how DDP has put gradients into buckets"),
        pytest.param("line", "differ at boundary 2 in the optimizer call", marks=pytest.mark.slow),
    ],
)
def test_what_is_compared_before_a_rank_goes_live(what: str, says: str) -> None:
    outcome = Job("orders.py", 3, (what, "4"), in_child=dies_in_interval(1, 2)).run()
    assert outcome.end == "restart" and says in outcome.reason, (outcome.reason, outcome.lines)
    assert any("in place, 3 replicas" in line for line in outcome.lines)


def test_replicas_that_begin_to_differ_later_are_found_out() -> None:
    """Local SGD from boundary 6 on, killed before the next proof at 8."""
    for world, said in ((3, "differs between ranks 0, 2 at boundary 7"), (2, "after a recovery")):
        job = Job("local_late.py", world, ("6", "40"), in_child=dies_in_interval(1, 7))
        outcome = job.run()
        assert outcome.end == "restart" and said in outcome.reason, (outcome.reason, outcome.lines)
        assert any(f"in place, {world} replicas" in line for line in outcome.lines)


def test_the_same_without_a_fault() -> None:
    outcome = Job("local_late.py", 2, ("6", "40")).run()
    assert outcome.end == "done"
    assert outcome.lines[-1].endswith(
        "(and 3 more) differs between ranks at boundary 8 (replicas that differ on purpose?)"
    )
