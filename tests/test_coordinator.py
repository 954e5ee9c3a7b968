"""Several coordinators on loopback over a real TCPStore, with fast timers."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from flashrun.control.coordinator import Coordinator
from flashrun.control.events import (
    Connected,
    Event,
    Finish,
    Lost,
    Membership,
    Node,
    Refused,
    Start,
    Stop,
    Timing,
    Waiting,
)
from flashrun.control.overview import node_lines, read_overview
from flashrun.control.records import Job
from flashrun.rendezvous.embedded import connect_embedded
from flashrun.rendezvous.endpoint import Endpoint, parse_endpoint
from flashrun.rendezvous.server import open_listener, serve
from flashrun.rendezvous.tcp_kv import TorchKeyValue, connect
from tests import helpers

DEADLINE = 20.0
FAST = Timing(
    heartbeat_interval=0.1,
    detection_timeout=1.6,
    join_timeout=10.0,
    last_call=2.0,
    read_timeout=5.0,
    poll=0.02,
    waiting_line=0.2,
    verdict_grace=3.0,
)

E = TypeVar("E")


def job(policy: str = "elastic", nodes: str = "1:1", **changes: Any) -> Job:
    least, most = (int(n) for n in nodes.split(":"))
    fields: dict[str, Any] = {
        "run_id": "job-a",
        "backend": "static" if policy == "static" else "c10d",
        "policy": policy,
        "min_nodes": least,
        "max_nodes": most,
        "max_restarts": 3,
        "recovery": "restart",
        "flashrun_version": "0.1",
        "torch_version": "2.13",
    }
    return Job(**{**fields, **changes})


def failure(rank: int, **changes: Any) -> dict[str, Any]:
    return {
        "rank": rank,
        "local_rank": 0,
        "exitcode": 1,
        "timestamp": 100 + rank,
        "formed_group": True,
        "error_digest": f"error of {rank}",
        **changes,
    }


class World:
    """The store processes and agents of one test."""

    def __init__(self) -> None:
        self.servers: list[Any] = []
        self.agents: list[Agent] = []

    def host_store(self, host: str, port: int) -> int:
        listener = open_listener(host, port)
        bound = int(listener.getsockname()[1])
        self.servers.append(serve(listener))
        return bound

    def agent(self, membership: Membership, name: str, **node: Any) -> Agent:
        agent = Agent(self, membership, Node(name, node.pop("slots", 2), "trainer", **node))
        self.agents.append(agent)
        return agent

    def close(self) -> None:
        for agent in self.agents:
            agent.coordinator.close(5.0)
        self.servers.clear()


class Agent:
    def __init__(
        self, world: World, membership: Membership, node: Node, resume: Connected | None = None
    ) -> None:
        self.world, self.membership, self.node = world, membership, node
        self.seen: list[Event] = []
        self.coordinator = Coordinator(
            membership, node, wake=lambda: None, host_store=world.host_store, resume=resume
        )
        self.coordinator.start()

    def get(self, kind: type[E]) -> E:
        """The next event other than Connected and Waiting, which must be a ``kind``."""
        end = time.monotonic() + DEADLINE
        while True:
            event = self.coordinator.events.get(timeout=end - time.monotonic())
            self.seen.append(event)
            if isinstance(event, kind):
                return event
            assert isinstance(event, (Connected, Waiting)), (event, kind)

    def get_waiting(self, text: str) -> None:
        """Until it says that it waits, with this text."""
        end = time.monotonic() + DEADLINE
        while True:
            event = self.coordinator.events.get(timeout=end - time.monotonic())
            assert isinstance(event, (Connected, Waiting)), event
            if isinstance(event, Waiting) and text in event.text:
                return

    def drain(self) -> list[Event]:
        """What has come and nobody looked at."""
        found = []
        while not self.coordinator.events.empty():
            found.append(self.coordinator.events.get())
        return found

    def die(self) -> None:
        """As SIGKILL of the agent and its node: no word to anybody."""
        self.coordinator.close(5.0)

    def again(self, resume: Connected) -> Agent:
        agent = Agent(self.world, self.membership, self.node, resume)
        self.world.agents.append(agent)
        return agent


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def membership(
    terms: Job, endpoint: str | None = None, timing: Timing = FAST, **rest: Any
) -> Membership:
    text = endpoint or f"127.0.0.1:{free_port()}"
    return Membership(terms, parse_endpoint(text, 29400), timing=timing, **rest)


# --- one node -----------------------------------------------------------------------------------


def test_one_node_starts_restarts_and_finishes(world: World) -> None:
    agent = world.agent(membership(job(max_restarts=1), "localhost:0"), "n0")
    table = agent.get(Start).table
    assert (table.round, table.restart_count, table.world_size) == (0, 0, 2)
    assert table.master_addr == "localhost"
    assert table.master_port > 0
    agent.coordinator.report_failed(0, [failure(1)])
    assert agent.get(Stop).restart
    agent.coordinator.report_stopped(0, [failure(1)])
    second = agent.get(Start).table
    assert (second.round, second.restart_count) == (1, 1)
    assert (second.master_addr, second.master_port) == (table.master_addr, table.master_port)
    agent.coordinator.report_failed(1, [failure(0)])
    assert not agent.get(Stop).restart
    agent.coordinator.report_stopped(1, [failure(0), failure(1)])
    verdict = agent.get(Finish)
    assert not verdict.success
    assert [f["rank"] for f in verdict.failures] == [0, 1]


def test_restart_clears_what_the_workers_left_in_the_store(world: World) -> None:
    agent = world.agent(membership(job(), "localhost:0"), "n0")
    table = agent.get(Start).table
    worker = connect("127.0.0.1", table.master_port, 5.0)
    for key in ("default_pg/0//cpu//0/rank_0", "init/", "some key of the script"):
        worker.put(key, b"stale")
    assert len(worker.list_keys("default_pg")) == 1
    agent.coordinator.report_failed(0, [failure(1)])
    agent.get(Stop)
    agent.coordinator.report_stopped(0)
    agent.get(Start)
    assert [k for k in worker.list_keys() if not k.startswith("flashrun/")] == []


def test_same_error_on_every_rank_before_a_group_is_not_restarted(world: World) -> None:
    agent = world.agent(membership(job(), "localhost:0"), "n0")
    agent.get(Start)
    early = [failure(r, formed_group=False, error_digest="ImportError") for r in (0, 1)]
    agent.coordinator.report_failed(0, early[:1])
    agent.get(Stop)
    agent.coordinator.report_stopped(0, early)
    verdict = agent.get(Finish)
    assert not verdict.success
    assert "same error" in verdict.reason


@pytest.mark.parametrize("moment", ["running", "failed", "stopped", "succeeded"])
def test_forked_again_agent_continues(world: World, moment: str) -> None:
    first = world.agent(membership(job(), "localhost:0"), "n0")
    first.get(Start)
    connected = next(e for e in first.seen if isinstance(e, Connected))
    if moment in ("failed", "stopped"):
        first.coordinator.report_failed(0, [failure(1)])
        first.get(Stop)
    first.die()
    second = first.again(connected)
    resumed = second.get(Start)
    assert resumed.resumed
    assert resumed.table.round == 0
    if moment == "succeeded":
        second.coordinator.report_succeeded(0)
        assert second.get(Finish).success
        return
    second.coordinator.report_failed(0, [failure(1)])  # it sees the exit status again
    second.get(Stop)
    second.coordinator.report_stopped(0, [failure(1)])
    table = second.get(Start).table
    assert (table.round, table.restart_count) == (1, 1)


def test_two_jobs_at_one_port_name_the_job_and_the_process(world: World) -> None:
    port = free_port()
    first = world.agent(membership(job("static"), f"127.0.0.1:{port}"), "n0", node_rank=0)
    first.get(Start)
    other = membership(job("static", run_id="job-b"), f"127.0.0.1:{port}")
    refused = world.agent(other, "m0", node_rank=0).get(Refused)
    assert "'job-a'" in refused.reason
    assert "process" in refused.reason
    elastic = membership(job(nodes="1:2", run_id="job-c"), f"127.0.0.1:{port}")
    assert "'job-a'" in world.agent(elastic, "k0").get(Refused).reason


@pytest.mark.parametrize("endpoint", ["[::1]:{}", "127.0.0.1:{}", "localhost:{}"])
def test_listens_on_loopback_only(world: World, endpoint: str) -> None:
    port = free_port()
    agent = world.agent(membership(job("static"), endpoint.format(port)), "n0", node_rank=0)
    table = agent.get(Start).table
    assert table.master_addr == endpoint.rsplit(":", 1)[0].strip("[]")
    assert table.master_port == port
    import psutil

    listening = {
        c.laddr.ip
        for c in psutil.Process().net_connections("tcp")
        if c.status == psutil.CONN_LISTEN and c.laddr.port == port
    }
    assert listening <= {"127.0.0.1", "::1"}
    assert listening


# --- several nodes ------------------------------------------------------------------------------


def test_static_nodes_have_the_ranks_they_were_given(world: World) -> None:
    terms = membership(job("static", "3:3"))
    agents = [
        world.agent(terms, f"n{r}", node_rank=r, slots=s) for r, s in ((2, 1), (0, 2), (1, 3))
    ]
    tables = {a.node.node_id: a.get(Start).table for a in agents}
    assert len(set(tables.values())) == 1
    table = tables["n0"]
    assert [(n.node, n.base_rank) for n in table.nodes] == [("n0", 0), ("n1", 2), ("n2", 5)]
    assert (table.master_addr, table.master_port) == ("127.0.0.1", terms.endpoint.port)
    for agent in agents:
        agent.coordinator.report_succeeded(0)
    assert all(a.get(Finish).success for a in agents)


def test_a_finished_node_ends_when_another_fails(world: World) -> None:
    terms = membership(job("static", "2:2", max_restarts=0))
    one, two = (world.agent(terms, f"n{r}", node_rank=r) for r in (0, 1))
    one.get(Start), two.get(Start)
    one.coordinator.report_succeeded(0)
    two.coordinator.report_failed(0, [failure(2)])
    two.get(Stop)
    two.coordinator.report_stopped(0, [failure(2)])
    for agent in (one, two):
        verdict = agent.get(Finish)
        assert not verdict.success
        assert [f["rank"] for f in verdict.failures] == [2]


def test_restarts_are_counted_once_for_the_job_whoever_fails(world: World) -> None:
    terms = membership(job(nodes="2:2", max_restarts=2))
    agents = [world.agent(terms, f"n{r}") for r in (0, 1)]
    for agent in agents:
        agent.get(Start)
    for round_ in (0, 1):
        for agent in agents if round_ else agents[:1]:
            agent.coordinator.report_failed(round_, [failure(0)])
        for agent in agents:
            agent.get(Stop)
            agent.coordinator.report_stopped(round_)
        assert {a.get(Start).table.restart_count for a in agents} == {round_ + 1}


def test_lost_node_restarts_the_remaining_ones(world: World) -> None:
    terms = membership(job(nodes="1:2"))
    one, two = world.agent(terms, "n0"), world.agent(terms, "n1")
    started = [one.get(Start), two.get(Start)]
    assert started[0].table.group_world_size == 2
    host = next(
        a for a in (one, two) if any(isinstance(e, Connected) and e.hosting for e in a.seen)
    )
    other = two if host is one else one
    other.die()
    assert "lost" in host.get(Stop).reason
    host.coordinator.report_stopped(0)
    table = host.get(Start).table
    assert (table.group_world_size, table.restart_count) == (1, 1)


def test_another_node_leads_when_the_leader_dies(world: World) -> None:
    terms = membership(job(nodes="1:3"))
    agents = [world.agent(terms, f"n{r}") for r in range(3)]
    for agent in agents:
        agent.get(Start)
    host = next(a for a in agents if any(isinstance(e, Connected) and e.hosting for e in a.seen))
    host.die()  # the store process lives on
    rest = [a for a in agents if a is not host]
    for agent in rest:
        agent.get(Stop)
        agent.coordinator.report_stopped(0)
    assert {a.get(Start).table.group_world_size for a in rest} == {2}
    for agent in rest:
        agent.coordinator.report_succeeded(1)
    assert all(a.get(Finish).success for a in rest)


def test_a_leader_that_is_known_to_be_lost_is_replaced_at_once(world: World) -> None:
    """Its heartbeat is not waited for."""
    slow = replace(FAST, heartbeat_interval=200.0, detection_timeout=600.0)
    at = membership(job(nodes="1:3"), timing=slow)
    host, *rest = (world.agent(replace(at, is_host=i == 0), f"n{i}") for i in range(3))
    for agent in (host, *rest):
        agent.get(Start)
    host.die()
    rest[0].coordinator.report_lost("n0", "it refuses connections")
    for agent in rest:
        assert "lost" in agent.get(Stop).reason
        agent.coordinator.report_stopped(0)
    assert {agent.get(Start).table.group_world_size for agent in rest} == {2}


def test_leaving_node_is_not_waited_for(world: World) -> None:
    slow = Timing(heartbeat_interval=0.1, detection_timeout=60.0, poll=0.02, verdict_grace=1.0)
    terms = membership(job("static", "2:2", max_restarts=0), timing=slow)
    one, two = (world.agent(terms, f"n{r}", node_rank=r) for r in (0, 1))
    one.get(Start), two.get(Start)
    two.coordinator.leave("SIGTERM")
    assert two.coordinator.wait_left(5.0)
    two.die()
    assert "SIGTERM" in one.get(Stop).reason
    one.coordinator.report_stopped(0)
    assert not one.get(Finish).success


def test_a_node_that_leaves_before_it_came_waits_for_nobody(world: World) -> None:
    terms = membership(job("static", "2:2"))
    late = world.agent(terms, "n1", node_rank=1)  # nobody hosts the store
    late.coordinator.leave("SIGINT")
    assert not late.coordinator.wait_left(3600.0)
    one, two = (world.agent(terms, f"n{r}", node_rank=r) for r in (0, 1))  # n1 is started again
    for agent in (one, two):
        assert agent.get(Start).table.group_world_size == 2
    late.coordinator.close(60.0)
    assert all(isinstance(event, Waiting) for event in late.drain())


@pytest.mark.parametrize(
    "change",
    [
        {"torch_version": "2.14"}, {"max_restarts": 1}, {"recovery": "off"}, {"max_nodes": 3},
        {"grow": "restart"}, {"flashrun_version": "0.2"}, {"detection_timeout": 7.0},
        {"heartbeat_interval": 3.0}, {"max_retries": 9},
    ],
)
def test_agent_that_differs_is_refused_with_what_differs(
    world: World, change: dict[str, Any]
) -> None:
    terms = membership(job("static", "2:2"))
    assert isinstance(
        world.agent(terms, "n0", node_rank=0).coordinator.events.get(timeout=DEADLINE), Connected
    )
    other = membership(job("static", "2:2", **change), terms.endpoint.text)
    refused = world.agent(other, "n1", node_rank=1).get(Refused)
    assert next(iter(change)) in refused.reason
    assert str(next(iter(change.values()))) in refused.reason


def test_an_agent_of_another_version_is_refused_whatever_that_has_beside(world: World) -> None:
    """And `flashrun nodes` of this version shows the job of that one."""
    terms = membership(job("static", "2:2"))
    agents = [world.agent(terms, f"n{r}", node_rank=r) for r in (0, 1)]
    port = {agent.get(Start).table.master_port for agent in agents}.pop()
    kv = connect("127.0.0.1", port, 5.0)
    (table,) = kv.list_keys("flashrun/table/")
    for key in ("job", "plan", "node/1", "node/2", table.removeprefix("flashrun/")):
        record = json.loads(kv.get(f"flashrun/{key}") or b"")
        record["later"] = 1
        if key == "job":
            record["flashrun_version"] = "9.9"
        for place in record.get("nodes", ()):
            place["later"] = 2
        kv.put(f"flashrun/{key}", json.dumps(record).encode())
    assert "flashrun_version is '0.1' here and '9.9'" in world.agent(terms, "late").get(
        Refused
    ).reason
    view = read_overview(kv, lambda: connect_embedded("127.0.0.1", port, 5.0))
    assert view is not None and [node.state for node in view.nodes] == ["running"] * 2


def test_second_node_with_a_taken_rank_is_refused(world: World) -> None:
    terms = membership(job("static", "2:2"))
    one, two = (world.agent(terms, f"n{r}", node_rank=r) for r in (0, 1))
    one.get(Start), two.get(Start)
    assert "node rank 1" in world.agent(terms, "late", node_rank=1).get(Refused).reason
    for agent in (one, two):
        agent.coordinator.report_succeeded(0)
    assert one.get(Finish).success


def test_waiting_says_what_is_missing_and_ends(world: World) -> None:
    timing = Timing(join_timeout=1.5, poll=0.02, waiting_line=0.2, heartbeat_interval=0.1)
    terms = membership(job("static", "2:2"), timing=timing)
    agent = world.agent(terms, "n0", node_rank=0)
    verdict = agent.get(Finish)
    assert not verdict.success
    assert "node rank 1 missing" in verdict.reason
    assert any(isinstance(e, Waiting) and "node rank 1" in e.text for e in agent.seen)


def test_no_host_ends_with_what_to_do(world: World) -> None:
    timing = Timing(join_timeout=0.5, waiting_line=0.1)
    agent = world.agent(membership(job("static", "2:2"), timing=timing), "n1", node_rank=1)
    assert "node rank 0" in agent.get(Lost).reason


def test_close_ends_the_wait_for_a_host(world: World) -> None:
    agent = world.agent(membership(job("static", "2:2")), "n1", node_rank=1)
    agent.coordinator.close()
    agent.coordinator._thread.join(DEADLINE)
    assert not agent.coordinator._thread.is_alive()


def test_lost_store_is_said(world: World) -> None:
    terms = membership(job("static", "2:2"))
    one, two = (world.agent(terms, f"n{r}", node_rank=r) for r in (0, 1))
    one.get(Start), two.get(Start)
    one.die()
    world.servers.clear()
    reason = two.get(Lost).reason
    assert "start the job again" in reason and "--rdzv-backend=flash-etcd" in reason


def test_workers_host_their_own_store_when_asked(world: World) -> None:
    terms = membership(job(nodes="2:2", use_agent_store=False))
    agents = [world.agent(terms, f"n{r}") for r in (0, 1)]
    tables = {a.get(Start).table for a in agents}
    assert len(tables) == 1
    table = tables.pop()
    assert not table.use_agent_store
    assert table.master_port not in (0, terms.endpoint.port)


def test_file_store(world: World, tmp_path: Any) -> None:
    path = str(tmp_path / "store")
    terms = Membership(
        job(nodes="2:2", use_agent_store=False),
        Endpoint("localhost", 0, path),
        store="file",
        timing=FAST,
    )
    agents = [world.agent(terms, f"n{r}") for r in (0, 1)]
    assert len({a.get(Start).table for a in agents}) == 1
    for agent in agents:
        agent.coordinator.report_succeeded(0)
    assert all(a.get(Finish).success for a in agents)


def test_handler_of_torchs_registry_brings_the_nodes_together(world: World) -> None:
    """torch's own c10d handler stands for any backend of the registry."""
    endpoint = f"localhost:{free_port()}"
    params = RendezvousParameters(
        "c10d", endpoint, "job-a", 2, 2, local_addr="localhost", join_timeout="20"
    )
    terms = Membership(
        job("static", "2:2", backend="c10d"),
        Endpoint("", 0, endpoint),
        timing=FAST,
        handler=params,
    )
    agents = [world.agent(terms, f"n{r}") for r in (0, 1)]
    assert len({a.get(Start).table for a in agents}) == 1
    agents[1].coordinator.report_failed(0, [failure(3)])
    for agent in agents:
        assert agent.get(Stop).restart
        agent.coordinator.report_stopped(0)
    tables = {a.get(Start).table for a in agents}
    assert {(t.round, t.restart_count, t.world_size) for t in tables} == {(1, 1, 4)}
    for agent in agents:
        agent.coordinator.report_succeeded(1)
    assert all(a.get(Finish).success for a in agents)


def test_many_agents_report_at_once(world: World) -> None:
    terms = membership(job(nodes="6:6", max_restarts=1))
    agents = [world.agent(terms, f"n{r}", slots=1) for r in range(6)]
    for agent in agents:
        agent.get(Start)
    barrier = threading.Barrier(6)

    def fail(agent: Agent, rank: int) -> None:
        barrier.wait()
        agent.coordinator.report_failed(0, [failure(rank)])

    threads = [threading.Thread(target=fail, args=(a, r)) for r, a in enumerate(agents)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for agent in agents:
        agent.get(Stop)
        agent.coordinator.report_stopped(0)
    assert {a.get(Start).table.restart_count for a in agents} == {1}


NODE = """
import sys, threading
from flashrun.control.coordinator import Coordinator
from flashrun.control.events import Membership, Node, Timing, Connected, Start
from flashrun.control.overview import node_lines, read_overview
from flashrun.control.records import Job
from flashrun.rendezvous.endpoint import parse_endpoint
from flashrun.rendezvous.server import open_listener, serve
name, rank, port = sys.argv[1], int(sys.argv[2]), sys.argv[3]
servers = []
def host_store(host, port):
    listener = open_listener(host, port)
    bound = listener.getsockname()[1]
    servers.append(serve(listener))
    return bound
job = Job("job-a", "c10d", "elastic", 1, 2, 3, "restart", "0.1", "2.13")
timing = Timing(
    heartbeat_interval=0.1, detection_timeout=3.0, join_timeout=120.0, last_call=120.0, poll=0.02
)
terms = Membership(job, parse_endpoint("localhost:" + port, 1), is_host=rank == 0, timing=timing)
c = Coordinator(terms, Node(name, 1, "t"), wake=lambda: None, host_store=host_store)
c.start()
def commands():
    for line in sys.stdin:
        word, round_ = line.split()
        getattr(c, "report_" + word)(int(round_))
threading.Thread(target=commands, daemon=True).start()
while True:
    event = c.events.get()
    detail = event.table.world_size if isinstance(event, Start) else ""
    print(type(event).__name__, detail, flush=True)
    if type(event).__name__ in ("Finish", "Lost", "Refused"):
        break
"""


def test_what_is_missing_after_a_loss_is_said_again_and_again(world: World) -> None:
    """Each ``waiting_line`` seconds (30 unless a test says otherwise), until enough are there."""
    assert Timing().waiting_line == 30.0
    at = membership(job(nodes="2:3"))
    host, lost = (world.agent(replace(at, is_host=i == 0), f"n{i}") for i in range(2))
    host.get(Start), lost.get(Start)
    lost.die()
    host.get(Stop)
    host.coordinator.report_stopped(0)
    for _ in range(3):
        host.get_waiting("1 of at least 2 nodes are here")
    new = world.agent(replace(at, is_host=False), "n2")
    assert host.get(Start).table.nodes == new.get(Start).table.nodes


def test_killed_node_in_a_process_of_its_own() -> None:
    port = str(free_port())
    nodes = [
        subprocess.Popen(
            [sys.executable, "-c", NODE, f"n{rank}", str(rank), port],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    host, other = nodes

    def line(node: subprocess.Popen[str]) -> str:
        assert node.stdout is not None
        return next(ln for ln in node.stdout if not ln.startswith(("Waiting", "Connected"))).strip()

    def say(node: subprocess.Popen[str], text: str) -> None:
        assert node.stdin is not None
        node.stdin.write(text + "\n")
        node.stdin.flush()

    try:
        assert [line(n) for n in nodes] == ["Start 2", "Start 2"]
        other.kill()
        assert line(host) == "Stop"
        say(host, "stopped 0")
        # min 1 of max 2: the last call would be 120 s, but a third node takes the place at once.
        third = subprocess.Popen(
            [sys.executable, "-c", NODE, "n2", "1", port],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        nodes.append(third)
        assert [line(host), line(third)] == ["Start 2", "Start 2"]
        say(host, "succeeded 1")
        say(third, "succeeded 1")
        assert [line(host), line(third)] == ["Finish", "Finish"]
        assert [host.wait(DEADLINE), third.wait(DEADLINE)] == [0, 0]
    finally:
        for node in nodes:
            node.kill()
            node.wait()
            for pipe in (node.stdin, node.stdout):
                assert pipe is not None
                pipe.close()


def test_an_idle_node_asks_one_question_at_a_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether there is news: nothing else is read again and again, however long nothing happens."""
    slow = replace(FAST, heartbeat_interval=60.0, detection_timeout=180.0)
    at = membership(job(nodes="2:2"), timing=slow)
    agents = [world.agent(replace(at, is_host=i == 0), f"n{i}") for i in range(2)]
    for agent in agents:
        agent.get(Start)
    questions = threading.Semaphore(0)
    others: list[str] = []
    counter = TorchKeyValue.counter

    def asked(kv: TorchKeyValue, key: str) -> int:
        if key.endswith(("/news", "/revision")):  # the latter only who leads
            questions.release()
        else:
            others.append(key)
        return counter(kv, key)

    def read(kv: TorchKeyValue, keys: Sequence[str]) -> list[bytes | None]:
        others.extend(keys)
        return get_many(kv, keys)

    get_many = TorchKeyValue.get_many
    monkeypatch.setattr(TorchKeyValue, "counter", asked)
    monkeypatch.setattr(TorchKeyValue, "get_many", read)
    for _ in range(10):  # what follows on the start ends within two rounds
        others.clear()
        for _ in range(20):
            assert questions.acquire(timeout=DEADLINE)
        if not others:
            return
    raise AssertionError(f"still read after 200 questions: {others}")


def test_who_waits_reads_nothing_when_others_come(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only who leads does; all others look at whether there is a plan."""
    at = membership(job(nodes="9:9"), timing=replace(FAST, heartbeat_interval=60.0))
    agents = [world.agent(replace(at, is_host=i == 0), f"n{i}") for i in range(3)]
    for agent in agents:
        agent.get_waiting("of at least 9 nodes are here")
    readers: dict[int, int] = {}
    asked: dict[int, int] = {}
    get_many, counter = TorchKeyValue.get_many, TorchKeyValue.counter

    def read(kv: TorchKeyValue, keys: Sequence[str]) -> list[bytes | None]:
        if keys != ["flashrun/missing"] and keys != ["flashrun/cordoned"]:  # for the waiting line
            readers[id(kv)] = readers.get(id(kv), 0) + 1
        return get_many(kv, keys)

    def ask(kv: TorchKeyValue, key: str) -> int:
        asked[id(kv)] = asked.get(id(kv), 0) + key.endswith(("/news", "/revision"))
        return counter(kv, key)

    monkeypatch.setattr(TorchKeyValue, "get_many", read)
    monkeypatch.setattr(TorchKeyValue, "counter", ask)
    late = world.agent(replace(at, is_host=False), "late")
    late.get_waiting("4 of at least 9 nodes are here")
    waiting = [id(agent.coordinator._kv) for agent in (*agents[1:], late)]
    before = dict(asked)
    helpers.wait_until(
        lambda: all(asked.get(kv, 0) >= before.get(kv, 0) + 5 for kv in waiting), "further looks"
    )
    first = id(agents[0].coordinator._kv)
    assert readers.get(first, 0) > 0
    assert [readers.get(kv, 0) for kv in waiting[:2]] == [0, 0]


def test_who_has_waited_for_the_store_hears_at_once_that_it_is_a_spare(world: World) -> None:
    """Not with the next line about what it waits for, which comes half a minute later."""
    timing = replace(FAST, waiting_line=3600.0)
    at = membership(job(nodes="2:2"), f"localhost:{free_port()}", spares=1, timing=timing)
    early = world.agent(replace(at, is_host=False), "early")
    early.get_waiting("that hosts the rendezvous store")
    agents = [early, *(world.agent(replace(at, is_host=i == 0), f"n{i}") for i in range(2))]

    def fate(agent: Agent) -> str:
        while True:
            event = agent.coordinator.events.get(timeout=DEADLINE)
            if isinstance(event, Start):
                return "runs"
            if isinstance(event, Waiting) and "is a spare" in event.text:
                return "spare"

    assert sorted(fate(agent) for agent in agents) == ["runs", "runs", "spare"]


def test_a_spare_that_was_killed_is_seen_to_be_silent(world: World) -> None:
    """`flashrun nodes` showed it as a spare for ever; and it is one again when it moves."""
    at = membership(job(nodes="2:2"), spares=1)
    agents = [world.agent(replace(at, is_host=i == 0), f"n{i}") for i in range(2)]
    table, _ = (agent.get(Start).table for agent in agents)
    spare = world.agent(replace(at, is_host=False), "n2")
    spare.get_waiting("is a spare")
    kv = connect("127.0.0.1", table.master_port, 5.0)

    def seen() -> tuple[str, str]:
        view = read_overview(kv, lambda: connect_embedded("127.0.0.1", table.master_port, 5.0))
        assert view is not None
        (node,) = (n for n in view.nodes if not n.ranks)
        return node.state, node_lines(view)[-1]

    assert seen()[0] == "spare"
    spare.die()
    helpers.wait_until(lambda: seen()[0] == "silent", "its silence", DEADLINE)
    assert "no heartbeat for " in seen()[1]
    kv.increment("flashrun/beat/3")
    assert seen()[0] == "spare"
