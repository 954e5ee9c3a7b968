"""The nodes of a soak: where each is, which ranks it serves, and how to hit it."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests import etcd, helpers, netns
from tests.jobs import Job, running

SCRIPT = Path(__file__).with_name("train.py")
RUN_ID = "soak"
BOUND_S = 150.0  # of every wait; a hang meets it, and a crowded machine does not
LINE = re.compile(rb"^rank (\d+) step (\d+) pid (\d+) loss (\S+)$", re.MULTILINE)
_PORT = 29400


Loss = tuple[int, int, str]
"""Rank, step, and the bits."""


def losses_in(out: bytes) -> set[Loss]:
    """What workers have printed of their losses."""
    return {(int(rank), int(step), loss.decode()) for rank, step, _, loss in LINE.findall(out)}


class Failed(AssertionError):
    """The soak has found something."""


@dataclass(eq=False)
class Node:
    """One launcher.

    Attributes:
        place: which address it is at.
        away: frozen or cut off: what it prints is not the job's any more.
        frozen: its processes that stand still.
    """

    name: str
    place: int
    addr: str
    job: Job
    away: bool = False
    frozen: list[int] = field(default_factory=list)
    read: int = 0

    @property
    def alive(self) -> bool:
        return self.job.process.poll() is None

    def __str__(self) -> str:
        return f"{self.name} ({self.addr})"


@dataclass
class At:
    """Where a rank is: its node and process, its last step, and how many steps it has told of."""

    node: Node
    pid: int
    step: int
    lines: int


@dataclass(frozen=True)
class Plan:
    """What a soak runs.

    Attributes:
        nodes: that have ranks; each ``slots``.
        spares: that are to wait beside them.
        backend: flash or flash-etcd.
        pace: seconds of a forward.
    """

    nodes: int = 4
    slots: int = 2
    spares: int = 2
    backend: str = "flash"
    pace: float = 0.08

    @property
    def ranks(self) -> int:
        return self.nodes * self.slots


class Fleet:
    """See the module; a context manager that leaves nothing.

    Attributes:
        nodes: all that were ever started, the dead ones included.
        at: rank -> where it is.
        members: of the etcd cluster.
        network: None: all nodes are on loopback, at addresses of their own.
    """

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        self.folder = folder
        self.out = folder / "out"
        self.out.mkdir()
        self.stop = folder / "stop"
        self.nodes: list[Node] = []
        self.at: dict[int, At] = {}
        self.network: netns.Network | None = None
        self.members: list[etcd.Member] = []
        self._stack = ExitStack()
        self._peek: subprocess.Popen[str] | None = None

    def __enter__(self) -> Fleet:
        try:
            self._begin()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for node in self.nodes:
            self.thaw(node)
        if self._peek is not None:
            self._peek.kill()
            self._peek.communicate()
        self._stack.close()

    def _begin(self) -> None:
        plan = self.plan
        if netns.why_not() is None:
            self.network = self._stack.enter_context(netns.Network(plan.nodes + plan.spares + 2))
        self.places = plan.nodes + plan.spares + 2
        if plan.backend == "flash-etcd":
            self.where = self._start_etcd()
        else:
            self.where = f"{self.address(0)}:{_PORT if self.network else helpers.free_port()}"
        for place in range(plan.nodes + plan.spares):
            self.add(place)
        self.await_progress(3, "the start")

    def _start_etcd(self) -> str:
        why_not = etcd.why_not()
        if why_not is not None:
            raise Failed(f"{why_not}; or give --backend flash")
        cluster = etcd.Cluster(self.folder / "etcd", 3)
        host = "127.0.0.1" if self.network is None else self.network.switch_address
        within = self._within_switch()
        for member in cluster.members:
            member.arguments = within + [a.replace("127.0.0.1", host) for a in member.arguments]
        self.members = cluster.members
        self._stack.callback(cluster.kill)
        for member in cluster.members:
            member.start()
        return ",".join(f"{host}:{member.port}" for member in cluster.members)

    def _within_switch(self) -> list[str]:
        return [] if self.network is None else ["ip", "netns", "exec", self.network.switch]

    def within(self, place: int) -> list[str]:
        """What runs a command at a node's place."""
        return [] if self.network is None else self.network.within(place)

    def address(self, place: int) -> str:
        return f"127.0.1.{place + 1}" if self.network is None else self.network.address(place)

    # --- nodes ----------------------------------------------------------------------------------

    def add(self, place: int) -> Node:
        """Start a launcher; its ranks are its own business."""
        plan, addr = self.plan, self.address(place)
        name = f"n{len(self.nodes)}"
        conf = ["--rdzv-conf=last_call_timeout=2"]
        if plan.backend == "flash":
            conf = [f"--rdzv-conf=last_call_timeout=2,read_timeout=8,is_host={int(place == 0)}"]
        command = [
            *self.within(place), *helpers.launcher("flashrun"), f"--nnodes={plan.nodes}",
            f"--nproc-per-node={plan.slots}", f"--spares={plan.spares}", f"--local-addr={addr}",
            *self.flags, *conf, "--max-restarts=99", "--heartbeat-interval=1",
            "--detection-timeout=4", f"--events={self.folder / f'{name}.events'}",
            str(SCRIPT), str(self.out), str(self.stop), str(10**9), str(plan.pace),
        ]  # fmt: skip
        home = self.folder / name
        home.mkdir()
        env = {"OMP_NUM_THREADS": "1"}
        launched = running(command, home, env, forked=True, recovery="in-place")
        job = self._stack.enter_context(launched)
        node = Node(name, place, addr, job)
        self.nodes.append(node)
        return node

    @property
    def flags(self) -> list[str]:
        """By which the job is found."""
        return [f"--rdzv-backend={self.plan.backend}", f"--rdzv-endpoint={self.where}",
                f"--rdzv-id={RUN_ID}"]  # fmt: skip

    def living(self) -> list[Node]:
        return [n for n in self.nodes if n.alive and not n.away]

    def active(self) -> list[Node]:
        """Those that serve ranks."""
        self.look()
        found = {at.node.name: at.node for at in self.at.values()}
        return [n for n in found.values() if n.alive and not n.away]

    def spares(self) -> list[Node]:
        active = self.active()
        return [n for n in self.living() if n not in active]

    def free_places(self) -> list[int]:
        taken = {n.place for n in self.nodes if n.alive}
        return [place for place in range(self.places) if place not in taken]

    def of(self, node: Node) -> list[int]:
        """The ranks that it serves."""
        return [rank for rank, at in sorted(self.at.items()) if at.node is node]

    # --- what is seen ---------------------------------------------------------------------------

    def look(self) -> None:
        """Take in what the workers have printed."""
        for node in self.nodes:
            out = node.job.output["out"]
            end = out.rfind(b"\n", node.read) + 1
            if end <= node.read:
                continue
            part, node.read = out[node.read : end], end
            if node.away:
                continue
            for who, step, pid, _ in LINE.findall(part):
                before = self.at.get(int(who))
                lines = 1 if before is None else before.lines + 1
                self.at[int(who)] = At(node, int(pid), int(step), lines)

    def await_progress(self, lines: int, after: str) -> None:
        """Until each rank has told of so many further steps. Raises Failed."""
        self.look()
        before = {rank: at.lines for rank, at in self.at.items()}

        def further() -> bool:
            self.look()
            return all(
                rank in self.at and self.at[rank].lines >= before.get(rank, 0) + lines
                for rank in range(self.plan.ranks)
            )

        self.wait_for(further, f"{lines} more steps of each rank after {after}")

    def wait_for(
        self, condition: Callable[[], bool], what: str, seconds: float = BOUND_S, ends: bool = False
    ) -> None:
        """Raises Failed: not within the bound, or a node has ended by itself that should not.

        Args:
            ends: the job is over; nodes may end well.
        """
        well = (None, 0) if ends else (None,)

        def either() -> bool:
            return condition() or bool(self._fallen(well))

        with suppress(TimeoutError):
            helpers.wait_until(either, what, seconds)
        if not condition():
            fallen = ", ".join(map(str, self._fallen(well)))
            why = f"; {fallen} ended" if fallen else f" for {seconds:g} s"
            raise Failed(f"waited for {what} in vain{why}\n{self.describe()}")

    def _fallen(self, well: Sequence[int | None]) -> list[Node]:
        found = [n for n in self.nodes if not n.away]
        return [n for n in found if n.job.process.poll() not in (*well, -signal.SIGKILL)]

    def describe(self) -> str:
        self.look()
        where = {rank: (str(at.node), at.step) for rank, at in sorted(self.at.items())}
        lines = [f"ranks: {where}"]
        for node in self.nodes:
            own = [line for line in node.job.err.splitlines() if "debug_logger" not in line]
            lines += [f"--- {node}, status {node.job.process.poll()}, away {node.away}",
                      *(own if len(own) < 120 else [*own[:20], "…", *own[-100:]])]  # fmt: skip
        return "\n".join(lines)

    def _outside(self) -> list[Node]:
        """Those that have not joined the job yet."""
        joined = {
            event["node"]
            for event in self.told()
            if event["event"] in ("started", "takes-place")
            or (event["event"] == "waiting" and "this node" in event["line"])
        }
        return [n for n in self.living() if n.name not in joined]

    def losses(self) -> set[Loss]:
        """What all ranks have told in all rounds."""
        return {loss for node in self.nodes for loss in losses_in(node.job.output["out"])}

    def told(self) -> list[dict[str, Any]]:
        """All events of all nodes."""
        found = []
        for node in self.nodes:
            with suppress(OSError):
                text = (self.folder / f"{node.name}.events").read_text()
                # (The last line of a node that was killed may be cut.)
                for line in text.splitlines():
                    with suppress(ValueError):
                        found.append({"node": node.name, **json.loads(line)})
        return found

    def leaders(self) -> dict[str, str]:
        """Addresses of the nodes that lead the membership and the recovery; {}: no answer."""
        if self._peek is None or self._peek.poll() is not None:
            command = [sys.executable, "-m", "tests.nodes_soak.peek", self.plan.backend, self.where]
            self._peek = subprocess.Popen(
                [*self._within_switch(), *command, RUN_ID], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                env=helpers.clean_environment({}),
            )  # fmt: skip
        assert self._peek.stdin is not None and self._peek.stdout is not None
        with suppress(OSError, ValueError):
            self._peek.stdin.write("?\n")
            self._peek.stdin.flush()
            if select.select([self._peek.stdout], [], [], 30)[0]:
                return dict(json.loads(self._peek.stdout.readline()))
        return {}

    # --- what is done ---------------------------------------------------------------------------

    def kill_workers(self, ranks: Iterable[int]) -> None:
        self.look()
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(self.at[rank].pid, signal.SIGKILL)

    def kill_agent(self, node: Node) -> None:
        with suppress(ProcessLookupError, TimeoutError):
            os.kill(node.job.helper("agent"), signal.SIGKILL)

    def kill(self, *nodes: Node) -> None:
        """The supervisors, and with them all of the nodes."""
        for node in nodes:
            node.job.process.kill()
        for node in nodes:
            node.job.process.wait()

    def freeze(self, node: Node) -> None:
        node.frozen = [row.pid for row in node.job.rows()]
        helpers.freeze(*node.frozen)

    def thaw(self, node: Node) -> None:
        for pid in node.frozen:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        node.frozen = []

    def command(self, *words: str) -> str:
        """``flashrun WORDS`` about the job; what it says. Raises Failed."""
        done = subprocess.run(
            [*self.within(0), *helpers.launcher("flashrun"), *words, *self.flags],
            capture_output=True, text=True, timeout=BOUND_S, check=False,
            env=helpers.clean_environment({}),
        )  # fmt: skip
        return (done.stdout or done.stderr).strip()

    def end(self) -> None:
        """Let the job end; every node that is there must end well, and each rank once."""
        # (One that comes after the end would wait for another job.)
        self.wait_for(lambda: not self._outside(), "the last nodes to join")
        self.stop.touch()
        left = [n for n in self.nodes if n.alive]
        self.wait_for(lambda: not any(n.alive for n in left), "the end of all", 2 * BOUND_S, True)
        bad = [str(n) for n in left if n.job.process.returncode != 0]
        for node in self.nodes:
            if not node.alive:
                node.job.close()
        if bad:
            raise Failed(f"{', '.join(bad)} ended with a failure\n{self.describe()}")
        saved: list[bytes] = []
        for node in self.nodes:
            saved += re.findall(rb"^rank (\d+) saved", node.job.output["out"], re.MULTILINE)
        if sorted(map(int, saved)) != list(range(self.plan.ranks)):
            raise Failed(f"these ranks have come to the end: {saved}\n{self.describe()}")
