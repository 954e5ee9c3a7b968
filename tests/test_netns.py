"""Jobs whose nodes are network namespaces: other networks than loopback, links that are cut, nodes
that stand still. Whatever happens, one process acts as a rank, and the weights are those of an
undisturbed run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import etcd, helpers, netns
from tests.jobs import Job, job, write_script
from tests.test_default_store import homed
from tests.test_recovery import TRAIN
from tests.test_recovery_nodes import (
    SLOTS,
    STEPS,
    WAITING,
    Nodes,
    results,
    undisturbed,  # noqa: F401  # a fixture
)

Start = Callable[..., Any]
# Rank 1 waits again, so that there is time to look at what came after a fault.
HELD = WAITING.replace(
    "        if step == 20",
    '        if step == 75 and RANK == 1: await_release("end")\n        if step == 20',
)
QUICK = ("--heartbeat-interval=1", "--detection-timeout=4")
PROXY = {f"{name}_proxy": "http://10.77.0.99:3128" for name in ("http", "https", "all", "HTTP")}


class Lan(Nodes):
    """A job on a network; ``nodes`` of its agents take part, the rest are spares."""

    def __init__(
        self, network: netns.Network, jobs: Sequence[Job], ranks: int, out: Path
    ) -> None:
        super().__init__(jobs, out)
        self.network = network
        self.ranks = ranks

    def index(self, node: Job) -> int:
        return list(self.jobs).index(node)

    def freeze(self, node: Job) -> list[int]:
        """SIGSTOP everything of it; the pids, for `thaw`."""
        pids = [row.pid for row in node.rows()]
        helpers.freeze(*pids)
        return pids

    def thaw(self, pids: Sequence[int]) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def workers(self, node: Job) -> list[psutil.Process]:
        """The processes of its workers that have spoken."""
        return [psutil.Process(pid) for pid in {e["pid"] for e in node.told("step")}
                if psutil.pid_exists(pid)]  # fmt: skip

    def split(self, away: Sequence[Job], cut: bool = True) -> None:
        """Those reach each other, and neither the rest nor the switch; or as before."""
        there = [self.network.address(i) for i, job in enumerate(self.jobs) if job not in away]
        for node in away:
            for address in (self.network.switch_address, *there):
                change = self.network.forget if cut else self.network.remember
                change(self.index(node), address)

    def await_stopped(self, workers: Sequence[psutil.Process], *spares: Job) -> None:
        """Workers on the wrong side of a cut end before others act as their ranks."""
        assert not helpers.await_exit(workers, 90), self.describe()
        for spare in spares:
            assert b"this node takes a lost" not in spare.output["err"], self.describe()

    def await_paused(self, *nodes: Job) -> list[psutil.Process]:
        """Their workers stand still on the wrong side of a cut; these."""
        for node in nodes:
            node.await_output("its workers are paused", "err", timeout=90)
        found = [worker for node in nodes for worker in self.workers(node)]
        assert found and all(w.status() == psutil.STATUS_STOPPED for w in found), self.describe()
        return found

    def check(self, expected: Callable[[int], dict[str, str]]) -> None:
        """The weights, and that one process of each rank has come to the end."""
        assert results(self.out, self.ranks) == expected(self.ranks), self.describe()
        saved = [e["rank"] for j in self.jobs for e in j.told("saved")]
        assert sorted(saved) == list(range(self.ranks)), self.describe()


def _etcd(network: netns.Network, folder: Path, stack: ExitStack, members: int) -> str:
    """Start servers in the switch's namespace; where they are."""
    etcd.need()
    cluster = etcd.Cluster(folder / "etcd", members)
    stack.callback(cluster.kill)
    where = network.switch_address
    where = f"[{where}]" if ":" in where else where
    for server in cluster.members:
        away = [word.replace("127.0.0.1", where) for word in server.arguments]
        server.arguments = ["ip", "netns", "exec", network.switch, *away]
        server.start()
    return ",".join(f"{where}:{server.port}" for server in cluster.members)


@pytest.fixture
def lan(tmp_path: Path) -> Start:
    netns.need()

    @contextmanager
    def run(
        nodes: int, *flags: str, kind: str = "flat", backend: str = "flash",
        spares: int = 0, body: str = TRAIN, env: dict[str, str] | None = None,
        fifos: Sequence[str] = (), local_addr: bool = False, members: int = 1,
        bad: dict[int, tuple[float, float]] | None = None, seed: int = 0, slots: int = SLOTS,
        least: int = 0,
    ) -> Iterator[Lan]:  # fmt: skip
        out = tmp_path / "out"
        out.mkdir()
        with ExitStack() as stack:
            network = stack.enter_context(netns.Network(nodes + spares, kind, bad, seed))
            host = network.address(0)
            where = f"[{host}]:29400" if ":" in host else f"{host}:29400"
            if backend == "flash-etcd":
                where = _etcd(network, tmp_path, stack, members)
            jobs = []
            script = write_script(tmp_path, body)
            for node in range(nodes + spares):
                own = [f"--local-addr={network.address(node)}"] if local_addr else []
                jobs.append(stack.enter_context(job(
                    tmp_path, body, f"--nnodes={least or nodes}:{nodes}",
                    f"--nproc-per-node={slots}",
                    f"--rdzv-backend={backend}", f"--rdzv-endpoint={where}", "--rdzv-id=j",
                    "--rdzv-conf=last_call_timeout=2", f"--spares={spares}",
                    *own, *flags, args=[str(STEPS)], env={"OUT": str(out), **(env or {})},
                    name=f"n{node}", forked=True, recovery="in-place", fifos=fifos,
                    within=network.within(node), script=script,
                )))  # fmt: skip
            yield Lan(network, jobs, slots * nodes, out)

    return run


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param("routed", {"env": PROXY}, id="subnets-proxy-no-names"),
        pytest.param("ipv6", {}, id="ipv6", marks=pytest.mark.slow),
        pytest.param("two", {"local_addr": True}, id="two-interfaces", marks=pytest.mark.slow),
        pytest.param("two", {}, id="two-interfaces-by-route", marks=pytest.mark.slow),
    ],
)
def test_a_worker_is_replaced(
    lan: Start, undisturbed: Any, kind: str, options: dict[str, Any]  # noqa: F811
) -> None:
    with lan(2, kind=kind, **options) as nodes:
        nodes.await_step(30, 3)
        nodes.kill(3)
        nodes.await_step(50, 3)
        nodes.kill(0)
        nodes.ended()
    nodes.check(undisturbed)
    assert nodes.processes() == {0: 2, 1: 1, 2: 1, 3: 2}, nodes.describe()


def test_a_bad_cable_is_one() -> None:
    """Of its own: what is said of it below would hold on a good one as well."""
    netns.need()
    there = "import socket; s = socket.create_server(('', 7777)); print(); s.accept()[0].recv(1)"
    here = (
        "import socket, sys, time; began = time.monotonic()\n"
        "try: socket.create_connection((sys.argv[1], 7777), 3)\n"
        "except OSError: print('never')\n"
        "else: print(time.monotonic() - began)"
    )
    with netns.Network(3, bad={1: (0.1, 0.0), 2: (0.0, 1.0)}) as network:
        found = []
        for node in (1, 2):
            server = subprocess.Popen(
                [*network.within(node), sys.executable, "-c", there], stdout=subprocess.PIPE
            )
            assert server.stdout is not None
            server.stdout.readline()
            found.append(subprocess.run(
                [*network.within(0), sys.executable, "-c", here, network.address(node)],
                capture_output=True, text=True, check=True, timeout=60,
            ).stdout)  # fmt: skip
            server.kill()
            server.communicate()
    assert float(found[0]) >= 0.1  # there and back, each at least half of it
    assert found[1] == "never\n"


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["flash", "flash-etcd"])
def test_frames_come_late_or_never(
    lan: Start, undisturbed: Any, backend: str, seed: int  # noqa: F811
) -> None:
    """No node is taken for lost, and workers on both sides of a bad cable are replaced."""
    bad = {1: (0.01, 0.01), 2: (0.002, 0.03)}
    with lan(3, backend=backend, bad=bad, seed=seed) as nodes:
        nodes.await_step(15, 3)
        nodes.kill(3)
        nodes.await_step(30, 0)
        nodes.kill(0, 4)
        nodes.await_step(50, 5)
        nodes.ended()
    nodes.check(undisturbed)
    assert nodes.processes() == {0: 2, 1: 1, 2: 1, 3: 2, 4: 2, 5: 1}, nodes.describe()
    assert all(b"node was lost" not in node.output["err"] for node in nodes.jobs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "kind"), [("flash", "flat"), ("flash-etcd", "flat"), ("flash-etcd", "ipv6")]
)
def test_a_node_that_is_cut_off(
    lan: Start, undisturbed: Any, backend: str, kind: str  # noqa: F811
) -> None:
    """It is alive and alone: the others go on, and its workers have stopped by then: for good, or
    (with etcd) until it can learn that their ranks are another's."""
    # (With etcd any may be lost: here, the one with rank 0 and the store of the workers.)
    cut, waits = (2, 1) if backend == "flash" else (0, 3)
    body = WAITING.replace("RANK == 1", f"RANK == {waits}")
    options = {"spares": 1, "body": body, "fifos": ("go",), "backend": backend, "kind": kind}
    with lan(2, "--max-restarts=1", *QUICK, **options) as nodes:
        nodes.await_step(20, waits)
        (spare,) = nodes.await_spares()
        lost = nodes.of(cut)
        nodes.await_copied(20, cut, cut + 1)
        workers = nodes.workers(lost)
        nodes.network.cut(nodes.index(lost))
        nodes.of(waits).release("go")
        if backend == "flash":
            nodes.await_stopped(workers, spare)
            assert lost.ended() == 1, nodes.describe()
            assert "This node is cut off" in lost.err
            nodes.ended(lost)
        else:
            assert nodes.await_paused(lost)
            assert b"this node takes a lost" not in spare.output["err"], nodes.describe()
            nodes.ended(lost)
            _learns_that_it_is_over(nodes, [lost], workers)
    _went_on_without(nodes, lost, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("connected", [False, True])
def test_a_part_of_the_default_store_is_cut_off(
    lan: Start, undisturbed: Any, connected: bool  # noqa: F811
) -> None:
    """Of all others one rank alone asks there for a key, while nobody knows yet."""
    key = homed(0, 2)
    body = WAITING.replace("RANK == 1", "RANK == 3").replace(
        'dist.init_process_group("gloo")',
        'dist.init_process_group("gloo")\n'
        "store = dist.distributed_c10d._get_default_store()\n"
        f"if {connected} or RANK < 2: store.add({key!r}, 1)",
    )
    body = body.replace(
        'await_release("go")', f'await_release("go"); tell("n", n=store.add({key!r}, 1))'
    )
    options = {"spares": 1, "body": body, "fifos": ("go",), "backend": "flash-etcd"}
    with lan(2, "--max-restarts=1", *QUICK, **options) as nodes:
        nodes.await_step(20, 3)
        (_spare,) = nodes.await_spares()
        lost, asks = nodes.of(0), nodes.of(3)
        nodes.await_copied(20, 0, 1)
        nodes.network.cut(nodes.index(lost))
        asks.release("go")
        nodes.ended(lost)
        assert [t["n"] for t in asks.told("n")] == [5 if connected else 3], nodes.describe()
    _went_on_without(nodes, lost, undisturbed)


def _learns_that_it_is_over(
    nodes: Lan, lost: Sequence[Job], workers: Sequence[psutil.Process]
) -> None:
    """Nodes whose workers stood still to the end of the job."""
    assert all(w.status() == psutil.STATUS_STOPPED for w in workers), nodes.describe()
    for node in lost:
        nodes.network.mend(nodes.index(node))
    for node in lost:
        assert node.ended() == 1, nodes.describe()
        assert "The job that this node belonged to is over" in node.err


def _went_on_without(nodes: Any, lost: Job, undisturbed: Any) -> None:  # noqa: F811
    """The job ended well without a node, which had lost its part in it."""
    nodes.check(undisturbed)
    assert not lost.told("saved")
    for node in nodes.jobs:
        if node is not lost:
            assert node.err.count("(its node was lost); replacing it") in (0, 2)
            assert "restart 1 of" not in node.err, nodes.describe()


@pytest.mark.slow
def test_half_of_the_nodes_are_cut_off(lan: Start, undisturbed: Any) -> None:  # noqa: F811
    """Two of four, which reach each other; the side that has etcd goes on with two spares."""
    options = {"spares": 2, "backend": "flash-etcd", "members": 3}
    body = WAITING.replace("RANK == 1", "RANK == 0")
    with lan(4, "--max-restarts=1", *QUICK, body=body, fifos=("go",), **options) as nodes:
        nodes.await_step(20, 0)
        spares = nodes.await_spares()
        lost = [nodes.of(2), nodes.of(6)]  # no neighbours in the ring of copies
        nodes.await_copied(20, 2, 3, 6, 7)
        workers = [worker for node in lost for worker in nodes.workers(node)]
        nodes.split(lost)
        nodes.of(0).release("go")
        assert nodes.await_paused(*lost)
        for spare in spares:
            assert b"this node takes a lost" not in spare.output["err"], nodes.describe()
        nodes.ended(*lost)
        nodes.split(lost, cut=False)
        _learns_that_it_is_over(nodes, lost, workers)
    nodes.check(undisturbed)
    assert nodes.processes() == {r: 1 + (r in (2, 3, 6, 7)) for r in range(8)}, nodes.describe()


@pytest.mark.slow
def test_a_node_that_stands_still(lan: Start, undisturbed: Any) -> None:  # noqa: F811
    """The others go on; when it moves again, its workers are stopped."""
    options = {"spares": 1, "body": HELD, "fifos": ("go", "end")}
    with lan(2, "--max-restarts=1", *QUICK, **options) as nodes:
        nodes.await_step(20, 1)
        (spare,) = nodes.await_spares()
        (lost,) = [j for j in nodes.jobs if j.told("step") and j is not nodes.jobs[0]]
        workers = nodes.workers(lost)
        frozen = nodes.freeze(lost)
        nodes.jobs[0].release("go")
        nodes.jobs[0]._await(lambda: spare.told("step", step=70), "the spare's workers", 120)
        nodes.thaw(frozen)
        assert not helpers.await_exit(workers, 60), nodes.describe()
        nodes.jobs[0].release("end")
        nodes.ended()
    _went_on_without(nodes, lost, undisturbed)


@pytest.mark.slow
def test_etcd_is_out_of_reach_for_one_node(lan: Start, undisturbed: Any) -> None:  # noqa: F811
    """Training goes on, since the nodes reach each other: however long its heartbeat stands still,
    no spare has its place. A fault waits until etcd is back."""
    options = {"spares": 1, "body": WAITING, "fifos": ("go",), "backend": "flash-etcd"}
    with lan(2, *QUICK, **options) as nodes:
        nodes.await_step(20, 3)
        (spare,) = nodes.await_spares()
        alone = nodes.index(nodes.of(3))
        nodes.network.forget(alone, nodes.network.switch_address)
        threading.Event().wait(12)  # three times the detection timeout
        nodes.of(1).release("go")
        nodes.await_step(30, 1)
        nodes.kill(0)
        nodes.jobs[alone].await_output("etcd at .* no answer", "err")
        nodes.network.remember(alone, nodes.network.switch_address)
        nodes.ended()
    nodes.check(undisturbed)
    assert nodes.processes() == {0: 2, 1: 1, 2: 1, 3: 1}, nodes.describe()
    assert not spare.told("step")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["flash", "flash-etcd"])
def test_four_nodes_and_a_spare(
    lan: Start, undisturbed: Any, backend: str  # noqa: F811
) -> None:
    """Workers of two nodes die, a node is cut off, and again a worker dies."""
    with lan(4, "--max-restarts=1", *QUICK, spares=1, backend=backend) as nodes:
        nodes.await_step(15, 5)
        nodes.kill(5)
        nodes.await_step(30, 0)
        nodes.kill(2, 7)
        nodes.await_step(50, 6)
        (spare,) = nodes.spares()
        lost = nodes.of(6)
        if lost is nodes.jobs[0]:
            lost = nodes.of(4)
        nodes.network.cut(nodes.index(lost))
        nodes.jobs[nodes.index(spare)].await_told("step", step=30, timeout=180)
        os.kill(max(e["pid"] for e in spare.told("step", step=30)), signal.SIGKILL)
        assert lost.wait(180) == 1, nodes.describe()
        nodes.ended(lost)
    nodes.check(undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["by-hand", "by-faults"])
def test_a_cordoned_node_gives_its_ranks_away(
    lan: Start, undisturbed: Any, how: str  # noqa: F811
) -> None:
    """In the next round, which begins as all workers are lost; then it waits for the end."""
    flags = ["--max-restarts=1", "--cordon-after=3"]
    with lan(2, *flags, spares=1, body=HELD, fifos=("go", "end")) as nodes:
        nodes.await_step(20, 1)
        bad = nodes.of(3)
        addr = nodes.network.address(nodes.index(bad))

        def run(command: str, *arguments: str) -> str:
            words = [*nodes.network.within(0), *helpers.launcher("flashrun"), command, *arguments]
            done = subprocess.run(
                [*words, f"{nodes.network.address(0)}:29400"], capture_output=True, text=True,
                timeout=120, check=True,
            )  # fmt: skip
            return done.stdout

        if how == "by-hand":
            assert "it keeps ranks 2, 3 until then" in run("cordon", addr, "--reason=noisy fan")
        nodes.of(1).release("go")
        nodes.await_step(30, 3)
        if how == "by-faults":
            for step in (30, 42, 54):
                nodes.await_step(step, 3)
                first = nodes.pid(3)
                nodes.kill(3)
                bad._await(lambda first=first: nodes.pid(3) != first, "a replacement", 60)
            bad.await_output(rf"this node \({addr}\) is cordoned: 3 faults within", "err")
        nodes.await_step(60, 2)
        nodes.kill(0, 1, 2, 3)
        (spare,) = nodes.spares()
        spare.await_told("step", step=5, timeout=120)
        shown = next(line for line in run("nodes").splitlines() if addr in line)
        assert ("cordoned: noisy fan" if how == "by-hand" else "cordoned: 3 faults") in shown
        assert "may have ranks again" in run("uncordon", addr)
        nodes.of(1).release("end")
        nodes.ended()
    nodes.check(undisturbed)
    assert spare.told("saved") and not bad.told("saved"), nodes.describe()
