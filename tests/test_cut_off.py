"""Nodes that are cut off from etcd and from others of the job: their workers stand still until it
is known who has the ranks. If nobody has, nothing was lost; otherwise the others have gone on."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any

import psutil
import pytest

from tests import helpers
from tests.jobs import Job
from tests.test_netns import (
    HELD,
    QUICK,
    Lan,
    Start,
    lan,  # noqa: F401  # a fixture
)
from tests.test_recovery_nodes import WAITING, results, undisturbed  # noqa: F401  # a fixture

FIVE = {"slots": 1, "backend": "flash-etcd"}


def split(nodes: Lan) -> tuple[list[Job], list[Job]]:
    """Two nodes that have etcd, rank 1's and another, and three that have it no more."""
    there = [nodes.of(1), nodes.of(3)]
    away = [node for node in nodes.jobs if node not in there]
    nodes.split(away)
    return there, away


def workers(nodes: Sequence[Job]) -> list[psutil.Process]:
    return [psutil.Process(node.told("step")[-1]["pid"]) for node in nodes]


@pytest.mark.slow
def test_a_split_that_is_mended_costs_nothing(
    lan: Start, undisturbed: Any  # noqa: F811
) -> None:
    """Neither the agent that is killed meanwhile."""
    flags = (*QUICK, "--spare-timeout=300")
    with lan(5, *flags, body=WAITING, fifos=("go",), **FIVE) as nodes:
        for rank in range(5):
            nodes.await_step(20, rank)
        there, away = split(nodes)
        nodes.of(1).release("go")
        stopped = nodes.await_paused(*away)
        there[0]._await(
            lambda: any(b" spare node(s) to take the place" in n.output["err"] for n in there),
            "that they would have been replaced", 60,
        )  # fmt: skip
        away[0].kill_helper("agent")
        away[0].await_output("the new agent has taken over 1 running", "err")
        assert all(worker.status() == psutil.STATUS_STOPPED for worker in stopped)
        nodes.split(away, cut=False)
        for node in away:
            node.await_output("the ranks are still this node's; the workers go on", "err")
        nodes.ended()
    nodes.check(undisturbed)
    assert set(nodes.processes().values()) == {1}, nodes.describe()
    assert not any("was lost" in node.err for node in nodes.jobs), nodes.describe()


@pytest.mark.slow
def test_the_side_that_has_etcd_goes_on(lan: Start, undisturbed: Any) -> None:  # noqa: F811
    """Of five nodes the two, at a smaller world size. The three come back as spares."""
    flags = (*QUICK, "--spare-timeout=2", "--max-restarts=1")
    with lan(5, *flags, body=HELD, fifos=("go", "end"), least=2, **FIVE) as nodes:
        for rank in range(5):
            nodes.await_step(20, rank)
        there, away = split(nodes)
        nodes.of(1).release("go")
        stopped = nodes.await_paused(*away)
        said = [len(node.events) for node in away]
        before = workers(there)
        assert not helpers.await_exit(before, 60), nodes.describe()
        nodes.jobs[0]._await(
            lambda: all(n.told("step", step=70, pid=n.told("step")[-1]["pid"]) for n in there),
            "the workers of the two", 120,
        )  # fmt: skip
        assert all(worker.status() == psutil.STATUS_STOPPED for worker in stopped)
        assert [len(node.events) for node in away] == said
        nodes.split(away, cut=False)
        assert not helpers.await_exit(stopped, 60), nodes.describe()
        for node in away:
            node.await_output("this node waits for a place", "err")
        next(n for n in there if n.told("step", rank=1, attempt=1)).release("end")
        nodes.ended()
    assert results(nodes.out, 2) == undisturbed(2), nodes.describe()
    assert [len(node.told("saved")) for node in (*there, *away)] == [1, 1, 0, 0, 0]


@pytest.mark.slow
def test_a_paused_job_is_stopped_at_once(lan: Start) -> None:  # noqa: F811
    with lan(2, *QUICK, body=WAITING, fifos=("go",), **FIVE) as nodes:
        nodes.await_step(20, 1)
        nodes.of(1).release("go")
        nodes.await_step(21, 0)
        (alone, other) = nodes.of(0), nodes.of(1)
        nodes.split([alone])
        (worker,) = nodes.await_paused(alone)
        alone.process.send_signal(signal.SIGTERM)
        alone.wait(20)
        assert not worker.is_running()
        nodes.split([alone], cut=False)
        other.process.send_signal(signal.SIGTERM)
