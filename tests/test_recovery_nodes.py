"""In-place recovery over several nodes: several agents on one host, each with its own workers. A
worker that is lost is replaced on its node; the final weights, optimizer state and histories of
every rank are bit for bit those of an undisturbed run, whoever leads and dies.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from flashrun.rendezvous.server import open_listener, serve
from flashrun.seals import Seal
from tests import helpers
from tests.jobs import Job, job, write_script
from tests.test_recovery import TRAIN, digest

STEPS = 90
SLOTS = 2


def results(out: Path, ranks: int) -> dict[str, str]:
    """``"rank 0, model"`` -> hash."""
    return {
        f"rank {rank}, {name}": digest(value)
        for rank in range(ranks)
        for name, value in torch.load(out / f"rank{rank}.pt", weights_only=True).items()
    }


_LOCK = re.compile(r"/flashrun_[^/]+/lock$")  # of a node's private folder


class Nodes:
    """A job of several nodes; the first one hosts the store."""

    def __init__(
        self, jobs: Sequence[Job], out: Path, add: Callable[[], None] = lambda: None, port: int = 0
    ) -> None:
        self.jobs = jobs
        self.out = out
        self.add = add
        self.port = port
        self.ranks = SLOTS * len(jobs)

    def of(self, rank: int) -> Job:
        return next(j for j in self.jobs if any(e["rank"] == rank for e in list(j.events)))

    def pid(self, rank: int) -> int:
        return int([e for e in list(self.of(rank).events) if e["rank"] == rank][-1]["pid"])

    def await_step(self, step: int, rank: int) -> None:
        living = next((j for j in self.jobs if j.process.poll() is None), self.jobs[0])
        living._await(
            lambda: any(j.told("step", step=step, rank=rank) for j in self.jobs),
            f"step {step} of rank {rank}", 120,
        )  # fmt: skip

    def kill(self, *ranks: int) -> None:
        for pid in [self.pid(rank) for rank in ranks]:
            os.kill(pid, signal.SIGKILL)

    def spares(self) -> list[Job]:
        """The nodes that have no ranks (yet)."""
        return [j for j in self.jobs if not j.told("step")]

    def await_spares(self) -> list[Job]:
        """These, once they have said that they wait."""
        found = self.spares()
        for spare in found:
            spare.await_output("this node is a spare", "err")
        return found

    def await_copied(self, boundary: int, *ranks: int) -> None:
        """What these ranks have left up to `boundary` has arrived at the node that holds it."""

        def there(rank: int) -> bool:
            for node in self.jobs:
                with suppress(OSError):  # it has ended, or a file has just been replaced
                    opened = [os.readlink(fd) for fd in Path(f"/proc/{node.pid}/fd").iterdir()]
                    views = [Path(lock).with_name("view") for lock in opened if _LOCK.search(lock)]
                    for path in [p for v in views for p in v.resolve().rglob(f"sealed.{rank}")]:
                        seal = Seal.read(path.parent, rank)
                        if seal is not None and seal.boundary >= boundary:
                            return True
            return False

        for rank in ranks:
            what = f"the copy of what rank {rank} has left up to boundary {boundary}"
            helpers.wait_until(lambda rank=rank: there(rank), what, 60)

    def ended(self, *but: Job) -> None:
        """All, but for these, end well."""
        for node in self.jobs:
            if node not in but:
                node.wait(180)
                assert node.ended() == 0, self.describe()

    def describe(self) -> str:
        return "\n".join(f"--- node {i}\n{j.err}" for i, j in enumerate(self.jobs))

    def processes(self) -> dict[int, int]:
        """How many have spoken for each rank."""
        found: dict[int, set[int]] = {}
        for event in [e for j in self.jobs for e in j.events]:
            found.setdefault(event["rank"], set()).add(event["pid"])
        return {rank: len(pids) for rank, pids in found.items()}


Start = Callable[..., Any]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    @contextmanager
    def run(
        nodes: int, *flags: str, backend: str = "flash", endpoint: str = "", body: str = TRAIN,
        spares: int = 0, fifos: Sequence[str] = (), least: int = 0, late: int = 0,
        hosted: bool = True, env: Mapping[str, str] | None = None,
        before: Callable[[Path], None] | None = None,
        within: Callable[[int], Sequence[str]] = lambda node: (),
    ) -> Iterator[Nodes]:  # fmt: skip
        """
        Args:
            before: called with the folder for results.
            within: a command for each node, which executes the launcher.
            least: of ``--nnodes``.
            late: nodes that are started by ``Nodes.add``.
            hosted: one of the nodes hosts the store.
        """
        out = tmp_path / "out"
        out.mkdir()
        if before is not None:
            before(out)
        port = helpers.free_port()
        outside = None if hosted else serve(open_listener("127.0.0.1", port))
        script = write_script(tmp_path, body)
        with ExitStack() as stack:
            jobs: list[Job] = []

            def add() -> None:
                node = len(jobs)
                if backend == "static":
                    where = [f"--node-rank={node}", "--master-addr=127.0.0.1",
                             f"--master-port={port}"]  # fmt: skip
                elif backend == "flash-etcd":
                    where = [f"--rdzv-endpoint={endpoint}"]
                else:
                    conf = f"is_host={int(hosted and node == 0)},last_call_timeout=2"
                    where = [f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-conf={conf}"]
                if backend != "static":
                    where += [f"--rdzv-backend={backend}", f"--rdzv-id=j{os.getpid()}"]
                several = f"--nnodes={least}:{nodes}" if least else f"--nnodes={nodes}"
                jobs.append(stack.enter_context(job(
                    tmp_path, body, several, f"--nproc-per-node={SLOTS}", *where,
                    f"--spares={spares}", *flags, args=[str(STEPS)],
                    env={"OUT": str(out), **(env or {})}, name=f"n{node}", within=within(node),
                    forked=True, recovery="in-place", fifos=fifos, script=script,
                )))  # fmt: skip

            for _ in range(nodes + spares - late):
                add()
            yield Nodes(jobs, out, add, port)
        del outside

    return run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, str]]:
    """What every rank of a world has after a run that nobody disturbs, under ``--recovery=off``."""
    known: dict[int, dict[str, str]] = {}

    def of(ranks: int) -> dict[str, str]:
        if ranks not in known:
            folder = tmp_path_factory.mktemp("undisturbed")
            out = folder / "out"
            out.mkdir()
            with job(folder, TRAIN, f"--nproc-per-node={ranks}", args=[str(STEPS)],
                     env={"OUT": str(out)}, forked=True, recovery="off") as run:  # fmt: skip
                assert run.wait(180) == 0, run.err
            known[ranks] = results(out, ranks)
        return known[ranks]

    return of


@pytest.mark.parametrize("backend", ["flash", "c10d", "static"])
def test_a_worker_of_another_node(start: Start, undisturbed: Any, backend: str) -> None:
    with start(2, backend=backend) as nodes:
        nodes.await_step(30, 3)
        nodes.kill(3)
        nodes.ended()
    assert results(nodes.out, 4) == undisturbed(4), nodes.describe()
    assert nodes.processes() == {0: 1, 1: 1, 2: 1, 3: 2}, "survivors keep their processes"
    both = [job.err for job in nodes.jobs]
    assert "".join(both).count("recovery: in place, 4 replicas") == 1, nodes.describe()
    for words in ("rank 3 lost (SIGKILL)", "catch-up", "recovery: done in"):  # on its own node, too
        assert [err.count(words) for err in both] == [1, 1], nodes.describe()


def test_rank_0_and_one_after_the_other(start: Start, undisturbed: Any) -> None:
    with start(2) as nodes:
        for rank, step in ((0, 15), (2, 40), (1, 65)):
            nodes.await_step(step, rank)
            nodes.kill(rank)
        nodes.ended()
    assert results(nodes.out, 4) == undisturbed(4), nodes.describe()
    assert nodes.processes() == {0: 2, 1: 2, 2: 2, 3: 1}


@pytest.mark.parametrize("ranks", [(0, 3), (2, 3)], ids=["one-of-each-node", "a-whole-node"])
def test_two_at_once(start: Start, undisturbed: Any, ranks: tuple[int, int]) -> None:
    with start(2) as nodes:
        nodes.await_step(30, 1)
        nodes.kill(*ranks)
        nodes.ended()
    assert results(nodes.out, 4) == undisturbed(4), nodes.describe()


@pytest.mark.parametrize("seed", [1, 2])
def test_three_nodes_random_ranks_and_again_during_the_recovery(
    start: Start, undisturbed: Any, seed: int
) -> None:
    print(f"seed {seed}")
    draw = random.Random(seed)
    with start(3) as nodes:
        for step in (15, 45, 70):
            first, second = draw.sample(range(6), 2)
            nodes.await_step(step, first)
            nodes.kill(first)
            nodes.jobs[0].await_output(f"rank {first} lost", "err")
            if draw.random() < 0.7:
                nodes.kill(second)
        nodes.ended()
    assert results(nodes.out, 6) == undisturbed(6), nodes.describe()


def connected(pid: int) -> set[int]:
    """Ports of servers to which a process has a connection."""
    return {c.raddr.port for c in psutil.Process(pid).net_connections("tcp") if c.raddr}


def test_a_shard_of_the_bootstrap_store_is_lost(start: Start, undisturbed: Any) -> None:
    """Each worker is connected to its own node's. Another server takes the place of one that has
    died, at the same port, and the next generation is built through it."""
    with start(2) as nodes:
        nodes.await_step(30, 3)
        shards = [job.helper("shard") for job in nodes.jobs]
        for rank in range(nodes.ranks):
            listens = [c.laddr.port for c in psutil.Process(shards[rank // SLOTS]).net_connections()
                       if c.status == psutil.CONN_LISTEN]  # fmt: skip
            assert set(listens) <= connected(nodes.pid(rank)), nodes.describe()
        lost = nodes.jobs[nodes.jobs.index(nodes.of(2))]
        lost.kill_helper("shard")
        nodes.kill(3)
        nodes.await_step(60, 0)
        nodes.kill(0)
        nodes.ended()
    assert results(nodes.out, 4) == undisturbed(4), nodes.describe()
    assert nodes.processes() == {0: 2, 1: 1, 2: 1, 3: 2}, "survivors keep their processes"
    assert lost.err.count("the shard (pid ") == 1, nodes.describe()


MOMENTS = ["at once", "lost", "catch-up", "done"]


@pytest.mark.parametrize(
    ("which", "when"),
    [
        *(pytest.param((0, 1), when, id=f"both-{when}") for when in MOMENTS),
        *(
            pytest.param((node,), when, id=f"{node}-{when}",
                         marks=() if when == "lost" else pytest.mark.slow)
            for node in (0, 1) for when in MOMENTS
        ),
    ],
)  # fmt: skip
def test_agents_die_as_well(
    start: Start, undisturbed: Any, when: str, which: tuple[int, ...]
) -> None:
    """One of them is the controller. Whoever is next goes on from what is in the store."""
    with start(2) as nodes:
        nodes.await_step(30, 3)
        agents = [nodes.jobs[i].helper("agent") for i in which]
        first = nodes.pid(3)
        nodes.kill(3)
        if when in ("lost", "done"):
            word = "rank 3 lost" if when == "lost" else "recovery: done in"
            nodes.jobs[0].await_output(word, "err")
        elif when == "catch-up":
            nodes.jobs[1]._await(lambda: nodes.pid(3) != first, "a word of the replacement", 60)
        for pid in agents:
            os.kill(pid, signal.SIGKILL)
        nodes.await_step(60, 0)
        nodes.kill(0)
        nodes.ended()
    assert results(nodes.out, 4) == undisturbed(4), nodes.describe()
    assert nodes.processes() == {0: 2, 1: 1, 2: 1, 3: 2}, "survivors keep their processes"
    for i in which:
        assert "the new agent has taken over" in nodes.jobs[i].err


def test_a_scripts_own_exception_ends_all_nodes(start: Start) -> None:
    body = TRAIN.replace(
        'tell("step", step=step)',
        'tell("step", step=step)\n        if step == 20 and RANK == 2: raise ValueError("mine")',
    )
    with start(2, body=body) as nodes:
        for node in nodes.jobs:
            assert node.ended() == 1, nodes.describe()
            assert "ValueError: mine" in node.err
            assert "replacing it in place" not in node.err


def test_all_at_once_restarts_all_nodes(start: Start, undisturbed: Any) -> None:
    with start(2, "--max-restarts=1") as nodes:
        nodes.await_step(30, 2)
        nodes.kill(0, 1, 2, 3)
        nodes.ended()
    assert results(nodes.out, 4) == undisturbed(4), nodes.describe()
    for node in nodes.jobs:
        assert "no survivor holds the state" in node.err
        assert "restart 1 of at most 1" in node.err


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
def test_one_fault_after_the_other(start: Start, undisturbed: Any, seed: int) -> None:
    """Random ranks, one or two at once, now and then with an agent or again a moment later."""
    print(f"seed {seed}")
    draw = random.Random(seed)
    with start(2) as nodes:
        step = 5 + draw.randint(3, 12)
        while step < STEPS - 2:
            nodes.await_step(step, draw.randrange(4))
            agents = [j.helper("agent") for j in nodes.jobs if draw.random() < 0.15]
            nodes.kill(*draw.sample(range(4), draw.choice([1, 1, 1, 2])))
            for pid in agents:
                os.kill(pid, signal.SIGKILL)
            if draw.random() < 0.3:
                time.sleep(draw.random() * 0.2)  # not to wait for anything: any moment will do
                with suppress(ProcessLookupError):
                    nodes.kill(draw.randrange(4))
            step += draw.randint(3, 12)
        nodes.ended()
    assert results(nodes.out, 4) == undisturbed(4), nodes.describe()


# Rank 1 waits in the first attempt, so that there is time to look.
WAITING = TRAIN.replace(
    'tell("step", step=step)',
    'tell("step", step=step)\n'
    '        if step == 20 and RANK == 1 and ATTEMPT == 0: await_release("go")',
)
FOREVER = ("--detection-timeout=600", "--heartbeat-interval=60")  # nobody is found silent


def test_a_spare_that_nobody_needed_ends_well(start: Start, undisturbed: Any) -> None:
    with start(2, spares=1, body=WAITING, fifos=("go",)) as nodes:
        nodes.await_step(20, 1)
        (spare,) = nodes.await_spares()
        loaded = Path(f"/proc/{spare.helper('zygote')}/maps")  # before anybody needs it
        helpers.wait_until(lambda: "libtorch" in loaded.read_text(), "a warm zygote", 60)
        nodes.jobs[0].release("go")
        nodes.await_step(30, 3)
        nodes.kill(3)
        nodes.ended()
    assert results(nodes.out, 4) == undisturbed(4), nodes.describe()
    assert not spare.told("step")
