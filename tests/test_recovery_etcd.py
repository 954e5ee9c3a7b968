"""In-place recovery of nodes that meet in etcd, and what happens to a job while that fails:
training goes on, and a worker that is lost meanwhile is replaced when etcd is back."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import etcd, helpers
from tests.test_overview import show
from tests.test_recovery_nodes import (
    FOREVER,
    WAITING,
    Start,
    results,
    start,  # noqa: F401  # a fixture
    undisturbed,  # noqa: F401  # a fixture
)


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[etcd.Cluster]:
    etcd.need()
    with etcd.Cluster(tmp_path / "etcd", getattr(request, "param", 1)) as found:
        yield found


def where(cluster: etcd.Cluster) -> dict[str, str]:
    return {"backend": "flash-etcd", "endpoint": ",".join(cluster.config().endpoints)}


def left_in(cluster: etcd.Cluster) -> list[str]:
    """The keys that are there, but for tokens, which go by themselves."""
    found = cluster.ask(
        cluster.members[0], "KVStub", "Range", "RangeRequest", key=b"/flashrun/",
        range_end=b"/flashrun0",
    )
    return [kv.key.decode() for kv in found.kvs if b"/w/" not in kv.key]


def test_workers_and_agents(
    start: Start, undisturbed: Any, cluster: etcd.Cluster  # noqa: F811
) -> None:
    with start(2, spares=1, body=WAITING, fifos=("go",), **where(cluster)) as nodes:
        nodes.await_step(20, 1)
        (spare,) = nodes.await_spares()
        flags = [f for f in nodes.jobs[0].command if f.startswith("--rdzv")]
        told = json.loads(show("status", "--json", *flags).stdout)
        assert told["phase"] == "running" and len(told["nodes"]) == 3
        shown = [line.split() for line in show("nodes", *flags).stdout.splitlines()[1:]]
        assert [line[3] for line in shown] == ["running", "running", "spare"]
        ports = [member.port for member in cluster.members]
        for node in nodes.jobs:  # one client, which membership and recovery share
            opened = psutil.Process(node.helper("agent")).net_connections("tcp")
            assert [c.raddr.port for c in opened if c.raddr and c.raddr.port in ports] == ports
        nodes.of(1).release("go")
        nodes.await_step(30, 3)
        nodes.kill(3)
        nodes.of(0).await_output("rank 3 lost", "err")
        for node in nodes.jobs:
            os.kill(node.helper("agent"), signal.SIGKILL)
        nodes.await_step(60, 1)
        nodes.kill(0, 2)
        nodes.ended()
    assert results(nodes.out, 4) == undisturbed(4), nodes.describe()
    assert nodes.processes() == {0: 2, 1: 1, 2: 2, 3: 2}, "survivors keep their processes"
    for node in nodes.jobs:
        assert "the new agent has taken over" in node.err or node is spare
    assert left_in(cluster) == []


@pytest.mark.slow
def test_a_spare_takes_a_lost_nodes_place(
    start: Start, undisturbed: Any, cluster: etcd.Cluster  # noqa: F811
) -> None:
    options = {"body": WAITING.replace("RANK == 1", "RANK == 0"), "fifos": ("go",), "spares": 1}
    with start(2, *FOREVER, **options, **where(cluster)) as nodes:
        nodes.await_step(20, 0)
        (spare,) = nodes.await_spares()
        lost, left = nodes.of(3), nodes.of(0)
        lost.process.kill()
        left.release("go")
        for node in (left, spare):
            node.wait(180)
            assert node.ended() == 0, nodes.describe()
    assert results(nodes.out, 4) == undisturbed(4), nodes.describe()
    assert nodes.processes() == {0: 1, 1: 1, 2: 2, 3: 2}, "survivors keep their processes"


@pytest.mark.parametrize(
    ("cluster", "fault"),
    [
        pytest.param(3, "leader-killed", marks=pytest.mark.slow),
        pytest.param(3, "leader-frozen", marks=pytest.mark.slow),
        (1, "gone"),
        pytest.param(1, "frozen", marks=pytest.mark.slow),
        pytest.param(1, "gone-and-agents-killed", marks=pytest.mark.slow),
    ],
    indirect=["cluster"],
)
def test_the_control_plane_fails(
    start: Start, undisturbed: Any, cluster: etcd.Cluster, fault: str  # noqa: F811
) -> None:
    with start(2, **where(cluster)) as nodes:
        nodes.await_step(10, 3)
        if fault.startswith("gone"):
            cluster.kill()
        elif fault == "frozen":
            cluster.members[0].freeze()
        elif fault == "leader-killed":
            cluster.leader().kill()
        else:
            frozen = cluster.leader()
            frozen.freeze()
        nodes.await_step(30, 1)  # training goes on
        nodes.kill(3)
        if fault == "gone-and-agents-killed":
            for node in nodes.jobs:
                node.kill_helper("agent")
        if fault.startswith("gone"):
            nodes.of(3).await_output("no answer", "err")
            for member in cluster.members:
                member.start()
        elif fault == "frozen":
            nodes.of(3).await_output("no answer", "err")
            cluster.members[0].signal(signal.SIGCONT)
        nodes.ended()
        if fault == "leader-frozen":
            frozen.signal(signal.SIGCONT)
    assert results(nodes.out, 4) == undisturbed(4), nodes.describe()
    assert nodes.processes() == {0: 1, 1: 1, 2: 1, 3: 2}, "survivors keep their processes"


QUICK = ("--heartbeat-interval=0.5", "--detection-timeout=4")
TWICE = WAITING.replace(
    "        if step == 20",
    '        if step == 40 and RANK == 1: await_release("again")\n        if step == 20',
)


def heard_of(cluster: etcd.Cluster) -> dict[str, bytes]:
    """The heartbeats of all nodes."""
    found = cluster.ask(
        cluster.members[0], "KVStub", "Range", "RangeRequest", key=b"/flashrun/",
        range_end=b"/flashrun0",
    )
    return {kv.key.decode(): kv.value for kv in found.kvs if b"/flashrun/beat/" in kv.key}


def stay_away(cluster: etcd.Cluster) -> None:
    """Be gone for more than twice the detection timeout, then back with the data."""
    threading.Event().wait(10)
    for member in cluster.members:
        member.start()
    cluster.await_health()


@pytest.mark.slow
def test_away_for_longer_than_the_detection_timeout(
    start: Start, undisturbed: Any, cluster: etcd.Cluster  # noqa: F811
) -> None:
    """Nobody is lost by it, twice; a worker that is lost in the second outage is replaced."""
    options = {"spares": 1, "body": TWICE, "fifos": ("go", "again")}
    with start(2, *QUICK, **options, **where(cluster)) as nodes:
        nodes.await_step(10, 3)
        (spare,) = nodes.await_spares()
        cluster.kill()
        nodes.await_step(20, 0)  # training goes on
        stay_away(cluster)
        before = heard_of(cluster)
        assert len(before) == 3
        # All beat again, and whoever leads has had time to look at it.
        helpers.wait_until(
            lambda: all(int(beat) > int(before[k]) + 12 for k, beat in heard_of(cluster).items()),
            "heartbeats of all nodes", 30,
        )  # fmt: skip
        nodes.of(1).release("go")
        nodes.await_step(30, 3)
        cluster.kill()
        nodes.await_step(40, 1)
        nodes.kill(3)
        stay_away(cluster)
        nodes.of(1).release("again")
        nodes.ended()
    assert results(nodes.out, 4) == undisturbed(4), nodes.describe()
    assert nodes.processes() == {0: 1, 1: 1, 2: 1, 3: 2}, "survivors keep their processes"
    assert not spare.told("step"), nodes.describe()
    for node in nodes.jobs:
        assert "was lost" not in node.err, nodes.describe()
        assert "restart 1" not in node.err, nodes.describe()


@pytest.mark.slow
def test_a_node_is_lost_while_etcd_is_away(
    start: Start, undisturbed: Any, cluster: etcd.Cluster  # noqa: F811
) -> None:
    """Those that are left reach each other, and wait for it; then the spare has the place."""
    options = {"spares": 1, "body": WAITING.replace("RANK == 1", "RANK == 0"), "fifos": ("go",)}
    with start(3, *QUICK, **options, **where(cluster)) as nodes:
        nodes.await_step(20, 0)
        nodes.await_spares()
        lost = nodes.of(3)
        nodes.await_copied(20, 2, 3)
        cluster.kill()
        lost.process.kill()
        lost.process.wait()
        nodes.of(0).release("go")
        stay_away(cluster)
        nodes.ended(lost)
    assert results(nodes.out, 6) == undisturbed(6), nodes.describe()
    assert nodes.processes() == {r: 1 + (r in (2, 3)) for r in range(6)}, nodes.describe()
    for node in (nodes.of(0), nodes.of(4)):  # without rank 2 and 3, they could do nothing
        assert node.err.count("its workers are paused") == 1, nodes.describe()
        assert node.err.count("etcd answers again, and the ranks are still this node's") == 1


@pytest.mark.slow
def test_a_fault_does_not_wait_for_ever(start: Start, cluster: etcd.Cluster) -> None:  # noqa: F811
    with start(2, "--recovery-timeout=4", **where(cluster)) as nodes:
        nodes.await_step(10, 3)
        cluster.kill()
        nodes.await_step(30, 1)
        nodes.kill(3)
        for node in nodes.jobs:
            node.wait(120)
            assert node.ended() == 1, nodes.describe()
        assert "while this node waited for it (--recovery-timeout=4)" in nodes.of(3).err
