"""``flashrun status`` and ``flashrun nodes``."""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import replace

import pytest

from flashrun.control.overview import node_lines, overview_of, status_lines
from flashrun.control.records import Job, Member, Plan
from flashrun.control.silence import SilenceBook
from flashrun.overview_command import _cordon
from flashrun.rendezvous.kv import MemoryKeyValue
from flashrun.rendezvous.table import RankTable, assign_ranks
from flashrun.rendezvous.tcp_kv import ConnectTimeout, connect
from tests import helpers
from tests.test_recovery_nodes import Start, start  # noqa: F401  # a fixture

JOB = Job("j", "flash", "elastic", 2, 2, 3, "in-place", "0", "0")


def member(order: int, state: str = "running", host: bool = False) -> Member:
    return Member(f"n{order}", order, 2, "default", f"10.0.0.{order}", host=host, state=state)  # type: ignore[arg-type]


def running(*members: Member) -> Plan:
    nodes = assign_ranks([m.seat for m in members])
    table = RankTable(1, 1, 3, "j", 4, "10.0.0.1", 1, True, nodes)
    return Plan(phase="running", round=1, restart_count=1, table=table)


def test_a_job_with_a_spare_and_a_lost_node() -> None:
    first, second, spare = member(2, host=True), member(1), member(3, "waiting")
    members = [(second, True), (first, False), (spare, False), (member(4), False)]
    state = {"generation": 2, "phase": "hold", "dead": {"3": "SIGKILL"}, "restart_only": None}
    view = overview_of(JOB, running(first, second), members, "", state)
    assert status_lines(view) == [
        "job 'j': running, 2 node(s), 4 ranks, round 1, restart 1 of at most 3",
        "recovery: generation 2, hold, lost: 3 (SIGKILL)",
    ]
    assert node_lines(view) == [
        "node  address   ranks  state",
        "0     10.0.0.2  0-1    running  hosts the store",
        "1     10.0.0.1  2-3    lost",
        "s3    10.0.0.3  -      spare",
        "-     10.0.0.4  -      lost",  # and another has its number
    ]


def test_a_job_that_waits() -> None:
    view = overview_of(JOB, Plan(), [(member(1, "waiting"), False)], "1 of at least 2", None)
    assert status_lines(view) == [
        "job 'j': forming, 0 node(s), 0 ranks, round 0, restart 0 of at most 3",
        "1 of at least 2",
    ]
    assert node_lines(view)[1] == "s1    10.0.0.1  -      waiting"


def test_who_is_silent_is_shown_whoever_leads() -> None:
    """A note says at which heartbeat: void when that moves on; another leader keeps what it has not
    seen for long enough itself."""
    kv = MemoryKeyValue()
    kv.put("x/beat/1", b"7")
    kv.put("x/beat/2", b"3")
    beats: dict[int, bytes | None] = {1: b"7", 2: b"3", 3: None}
    now = time.time()
    SilenceBook(kv, "x/").note(beats, {2: 20.0, 3: 30.0}, now)
    found = SilenceBook(kv, "x/").read([1, 2, 3])
    assert {order: round(seconds / 10) for order, seconds in found.items()} == {2: 2, 3: 3}
    SilenceBook(kv, "x/").note(beats, {}, now + 5)
    assert sorted(SilenceBook(kv, "x/").read([1, 2, 3])) == [2, 3]
    kv.put("x/beat/2", b"4")
    assert sorted(SilenceBook(kv, "x/").read([1, 2, 3])) == [3]
    SilenceBook(kv, "x/").note({**beats, 2: b"4"}, {}, now + 5)
    kv.put("x/beat/2", b"3")
    assert sorted(SilenceBook(kv, "x/").read([1, 2, 3])) == [3], "it was taken back"
    first, second, spare = member(2), member(1), member(3, "waiting")
    members = [(m, False) for m in (first, second, spare)]
    view = overview_of(JOB, running(first, second), members, "", None, None, {2: 20.3, 3: 117.0})
    assert node_lines(view)[1:] == [
        "0     10.0.0.2  0-1    silent   no heartbeat for 20 s",
        "1     10.0.0.1  2-3    running",
        "s3    10.0.0.3  -      silent   no heartbeat for 117 s",
    ]


def test_what_a_cordon_takes_is_told() -> None:
    """It goes by the address, which several nodes may have."""
    first, second, spare = member(2, host=True), member(1), member(3, "waiting")
    twin = replace(member(4), addr=second.addr)
    members = [(m, False) for m in (second, first, spare, twin)]
    view = overview_of(JOB, running(first, second, twin), members, "", None)
    kv = MemoryKeyValue()
    assert _cordon(kv, view, "s3", "noisy fan") == "10.0.0.3 gets no ranks from the next round on"
    assert _cordon(kv, view, "1", "hot").splitlines() == [
        "10.0.0.1 (nodes 1, 2) gets no ranks from the next round on; it keeps ranks 2, 3, 4, 5"
        " until then",
        "warning: 1 other node(s) are left, and job 'j' needs 2: after the next restart it waits"
        " for more nodes, or for flashrun uncordon 10.0.0.1",
    ]
    assert _cordon(kv, view, "10.0.0.1", None).startswith("10.0.0.1 (nodes 1, 2) may have ranks")
    fixed = overview_of(replace(JOB, policy="static"), running(first, second), members, "", None)
    assert "nobody else can take its place" in _cordon(kv, fixed, "0", "hot")
    members.append((member(5), False))
    view = overview_of(JOB, running(first, second), members, "", None)
    for nobody in ("9", ""):  # one that is gone has no number
        with pytest.raises(LookupError, match=r"has 0 \(10\.0\.0\.2\), 1 \(.*, 10\.0\.0\.5$"):
            _cordon(kv, view, nobody, "hot")


def show(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*helpers.launcher("flashrun"), *arguments], capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip


def test_a_running_job_is_shown_and_not_disturbed(start: Start) -> None:  # noqa: F811
    body = 'tell("ready"); await_release("go")\n'
    with start(2, body=body, fifos=("go",)) as nodes:
        for node in nodes.jobs:
            node.await_told("ready", timeout=200)
        endpoint = next(
            flag.partition("=")[2]
            for flag in nodes.jobs[0].command
            if flag.startswith("--rdzv-endpoint")
        )
        shown = show("nodes", endpoint)
        assert shown.returncode == 0, shown.stderr
        assert [line.split()[:4] for line in shown.stdout.splitlines()[1:]] == [
            ["0", "127.0.0.1", "0-1", "running"], ["1", "127.0.0.1", "2-3", "running"],
        ]  # fmt: skip
        told = json.loads(show("status", "--json", endpoint).stdout)
        assert told["phase"] == "running" and len(told["nodes"]) == 2
        for node in nodes.jobs:
            node.signal(15)
        for node in nodes.jobs:
            assert node.ended() == 1


def test_nobody_there() -> None:
    shown = show("status", f"127.0.0.1:{helpers.free_port()}")
    assert shown.returncode == 1
    assert "nobody answers at 127.0.0.1" in shown.stderr
    assert "the job may have ended" in shown.stderr
    # Where connections are refused nobody is waited for, whatever the wait would be.
    with pytest.raises(ConnectTimeout, match="within 0 s"):
        connect("127.0.0.1", helpers.free_port(), 600, refused_s=0)
    shown = show("nodes", "no.such.host.invalid:29400")
    assert shown.returncode == 2
    assert "The name 'no.such.host.invalid' can't be resolved" in shown.stderr
