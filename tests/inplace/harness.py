"""A small supervisor, agent and zygote in one process, around the recovery machine.

The parent has imported torch and has one thread, so it may fork workers at any time. It hosts the
store in a forked process, serves the workers' channel with a selector, sees exits through pidfds,
and does what the machine says. Faults are injected at moments drawn from a seed, or when something
is seen (`Trigger`).
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import random
import runpy
import select
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # what a first optimizer imports; the zygote has it in memory as well
import torch.distributed.fsdp
import torch.nn.parallel
import torch.utils.data

from flashrun import messages
from flashrun.control import recovery as machines
from flashrun.control.recovery import RecoveryMachine
from flashrun.rendezvous.server import open_listener, serve
from flashrun.worker import runtime as runtimes

SCRIPTS = Path(__file__).parent / "scripts"
TOKEN = "a-token-of-the-tests"


@dataclass
class Fault:
    """Kill `ranks` (their present incarnations).

    Attributes:
        after: s after the first worker's first boundary..., or None
        when: called with the harness after each event; the fault happens once it returns True.
    """

    ranks: list[int]
    after: float | None = None
    when: Callable[[Job], bool] | None = None
    signal: int = signal.SIGKILL
    done: bool = False


@dataclass
class Outcome:
    """How a job ended.

    Attributes:
        end: "done", "script", "fail", "restart" or "timeout".
        results: rank -> what the script saved.
        lines: the log for people.
        incarnations: rank -> how often it was started, minus one.
        pids: rank -> pids in order.
        seconds: wall time.
    """

    end: str
    reason: str
    results: dict[int, Any]
    lines: list[str]
    events: list[dict[str, Any]]
    incarnations: list[int]
    pids: dict[int, list[int]]
    seconds: float
    output: str = ""


@dataclass
class Job:
    script: str
    world: int = 3
    arguments: tuple[str, ...] = ()
    faults: list[Fault] = field(default_factory=list)
    limits: machines.Limits = field(default_factory=machines.Limits)
    replay: str = "real"
    timeout: float = 60.0
    environ: dict[str, str] = field(default_factory=dict)
    in_child: Callable[[int, int], None] | None = None  # rank, incarnation; before the script
    make: Any = None

    def run(self) -> Outcome:
        self.folder = Path(tempfile.mkdtemp(prefix="flashrun-inplace-", dir="/dev/shm"))
        try:
            return self._run()
        finally:
            # A process that is forked later closes these itself, and reuses their numbers: were
            # they left to be collected there, that would close what is not theirs.
            for key in list(self.selector.get_map().values()):
                self.selector.unregister(key.fileobj)
                if isinstance(key.fileobj, int):
                    os.close(key.fileobj)
                else:
                    key.fileobj.close()  # type: ignore[attr-defined]
            self.selector.close()
            for pid in list(self.alive):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            os.kill(self.store_pid, signal.SIGKILL)
            os.waitpid(self.store_pid, 0)
            shutil.rmtree(self.folder)

    def _run(self) -> Outcome:
        self.alive: dict[int, tuple[int, int]] = {}  # pid -> rank, incarnation
        self.connections: dict[int, socket.socket] = {}  # rank -> of the present incarnation
        self.buffers: dict[socket.socket, bytes] = {}
        self.who: dict[socket.socket, tuple[int, int]] = {}
        self.pids: dict[int, list[int]] = {r: [] for r in range(self.world)}
        self.lines: list[str] = []
        self.events: list[dict[str, Any]] = []
        self.end, self.reason = "", ""
        self.machine = RecoveryMachine(self.world, self.limits)
        self.selector = selectors.DefaultSelector()
        self.path = str(self.folder / "agent.sock")
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(self.path)
        self.listener.listen(64)
        self.selector.register(self.listener, selectors.EVENT_READ, "accept")
        self._start_store()
        (self.folder / "out").mkdir()
        started = time.monotonic()
        self.started = started
        for rank in range(self.world):
            self._spawn(rank, 0, 0)
        while self.alive and not self.end:
            self._turn(started + self.timeout)
        if self.end == "done" or self.alive:
            self._settle(started)
        seconds = time.monotonic() - started
        results = {}
        for rank in range(self.world):
            path = self.folder / "out" / f"rank{rank}.pt"
            if path.exists():
                results[rank] = torch.load(path, weights_only=False)
        output = "".join(
            f"--- {p.name}\n{p.read_text()}" for p in sorted(self.folder.glob("*.log"))
        )
        return Outcome(
            self.end or "done", self.reason, results, self.lines, self.events,
            [r.incarnation for r in self.machine.ranks], self.pids, seconds, output,
        )  # fmt: skip

    def _settle(self, started: float) -> None:
        if self.end in ("timeout", "restart", "fail", "script"):
            return
        while self.alive and not self.end:
            self._turn(started + self.timeout)

    # --- processes

    def _start_store(self) -> None:
        listener = open_listener("127.0.0.1", 0)
        self.port = listener.getsockname()[1]
        self.store_pid = os.fork()
        if not self.store_pid:
            _child_of_test()
            server = serve(listener)
            while True:
                signal.pause()
            del server
        listener.close()

    def _spawn(self, rank: int, incarnation: int, generation: int) -> None:
        pid = os.fork()
        if not pid:
            self._become(rank, incarnation, generation)
        self.alive[pid] = (rank, incarnation)
        self.pids[rank].append(pid)
        fd = os.pidfd_open(pid)
        self.selector.register(fd, selectors.EVENT_READ, ("exit", pid))

    def _become(self, rank: int, incarnation: int, generation: int) -> None:
        status = 70
        try:
            _child_of_test()
            gc.freeze()  # nothing of pytest's is collected here, where its descriptors are others
            log = os.open(
                self.folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
            )
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.closerange(3, 256)  # a test passes its own above
            # pytest's own are files that have just been closed
            sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
            sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
            # a second descriptor: the replay mutes the first two
            faulthandler.register(signal.SIGUSR1, os.fdopen(os.dup(2), "w"), all_threads=True)
            os.environ.update(
                {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(self.world),
                    "LOCAL_WORLD_SIZE": str(self.world),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(self.port),
                    "TORCHELASTIC_USE_AGENT_STORE": "True",
                    "TORCHELASTIC_RESTART_COUNT": "0",
                    "TORCHELASTIC_RUN_ID": "none",
                    messages.CHANNEL: self.path,
                    messages.RUN_DIR: str(self.folder),
                    messages.TOKEN: TOKEN,
                    messages.INCARNATION: str(incarnation),
                    messages.GENERATION: str(generation),
                    "OUT": str(self.folder / "out"),
                    **self.environ,
                }
            )
            if self.in_child is not None:
                self.in_child(rank, incarnation)
            if self.replay == "simple":
                from tests.inplace.simple_replay import SimpleReplay as Replay
            else:
                from flashrun.worker.replay.api import Replay  # type: ignore[assignment]
            options = {"choose": lambda backend: self.make} if self.make else {}
            script = str(SCRIPTS / self.script)
            sys.argv = [script, *self.arguments]
            runtime = runtimes.install(Replay(), **options)
            assert runtime is not None
            error: BaseException | None = None
            try:
                runpy.run_path(script, run_name="__main__")
                status = 0
            except SystemExit as ended:
                error = ended
                status = int(ended.code or 0)
            except BaseException as failure:  # noqa: BLE001  # the top of a process
                error = failure
                traceback.print_exc()
                status = 1
            runtime.finish(error)
        except BaseException:  # noqa: BLE001  # the top of a process
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    # --- the loop

    def _turn(self, deadline: float) -> None:
        now = time.monotonic()
        if now > deadline:
            self.end = "timeout"
            for pid in self.alive:  # their stacks go to their logs
                os.kill(pid, signal.SIGUSR1)
            time.sleep(0.3)
            self.reason = f"phase {self.machine.phase}, awaited {self.machine.awaited()}"
            return
        wake = [deadline]
        if (at := self.machine.wake_at()) is not None:
            wake.append(at)
        wake += [self.started + f.after for f in self.faults if not f.done and f.after is not None]
        for key, _ in self.selector.select(max(min(wake) - now, 0)):
            if isinstance(key.data, str):
                self._listen(key)
            else:
                self._reap(key.fd, key.data[1])
            self._inject()
        self._obey(self.machine.tick(time.monotonic()))
        self._inject()

    def _listen(self, key: selectors.SelectorKey) -> None:
        thing: socket.socket = key.fileobj  # type: ignore[assignment]
        if thing.fileno() < 0 or not _readable(thing):
            return  # heard out, or closed, since the selector told of it
        if key.data == "read":
            self._read(thing)
        else:
            connection, _ = self.listener.accept()
            self.buffers[connection] = b""
            self.selector.register(connection, selectors.EVENT_READ, "read")

    def _reap(self, fd: int, pid: int) -> None:
        # As the product's (`WorkersChannel.hear_out`): what it said last comes before its end.
        while said := [k for k, _ in self.selector.select(0) if isinstance(k.data, str)]:
            for key in said:
                self._listen(key)
        self.selector.unregister(fd)
        os.close(fd)
        _, status = os.waitpid(pid, 0)
        rank, incarnation = self.alive.pop(pid)
        if os.WIFSIGNALED(status):
            kind, cause = machines.FAULT, signal.Signals(os.WTERMSIG(status)).name
        elif os.WEXITSTATUS(status) == messages.EXIT_DIVERGED:
            kind, cause = machines.FAULT, "diverged"
        elif os.WEXITSTATUS(status) == 0:
            kind, cause = machines.CLEAN, "ended"
        else:
            kind, cause = machines.SCRIPT, f"exit {os.WEXITSTATUS(status)}"
        self._obey(self.machine.exited(rank, incarnation, kind, cause, time.monotonic()))

    def _read(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(1 << 20)
        except OSError:
            data = b""
        if not data:
            self.selector.unregister(connection)
            connection.close()
            who = self.who.pop(connection, None)
            if who is not None and self.connections.get(who[0]) is connection:
                del self.connections[who[0]]
            return
        *whole, self.buffers[connection] = (self.buffers[connection] + data).split(b"\n")
        for line in whole:
            message = json.loads(line)
            if message["op"] == "hello":
                if message["token"] != TOKEN:
                    raise AssertionError("a stranger on the channel")
                self.who[connection] = (message["rank"], message["incarnation"])
                self.connections[message["rank"]] = connection
            rank, incarnation = self.who[connection]
            self._obey(self.machine.message(rank, incarnation, message, time.monotonic()))

    def _obey(self, commands: list[machines.Command]) -> None:
        for command in commands:
            match command:
                case machines.Send(rank, message):
                    if "donors" in message:  # as flashrun.control.director
                        ports = message["donors"].items()
                        message = {**message, "donors": {r: f"127.0.0.1:{p}" for r, p in ports}}
                    connection = self.connections.get(rank)
                    if connection is not None:
                        try:
                            connection.sendall(json.dumps(message).encode() + b"\n")
                        except OSError:
                            continue  # its exit is coming
                case machines.Spawn(rank, incarnation, generation):
                    self.connections.pop(rank, None)
                    self._spawn(rank, incarnation, generation)
                case machines.Kill(rank, incarnation):
                    for pid, who in self.alive.items():
                        if who == (rank, incarnation):
                            os.kill(pid, signal.SIGKILL)
                case machines.Log(line, event):
                    if line:
                        self.lines.append(line)
                    self.events.append(event)
                case machines.RestartAll(reason):
                    self.end, self.reason = "restart", reason
                case machines.Fail(rank, reason):
                    self.end, self.reason = "fail", reason
                case machines.ScriptFailure(rank):
                    self.end, self.reason = "script", f"rank {rank}"
                case machines.Done():
                    pass

    def _inject(self) -> None:
        now = time.monotonic()
        for fault in self.faults:
            due = (fault.after is not None and now >= self.started + fault.after) or (
                fault.when is not None and fault.when(self)
            )
            if fault.done or not due:
                continue
            fault.done = True
            for pid, (rank, _) in list(self.alive.items()):
                if rank in fault.ranks:
                    os.kill(pid, fault.signal)


def _readable(thing: socket.socket) -> bool:
    poller = select.poll()
    poller.register(thing, select.POLLIN)
    return bool(poller.poll(0))


def _child_of_test() -> None:
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def same(a: Any, b: Any, where: str = "") -> list[str]:
    """Where two results differ; tensors bit for bit."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        equal = a.dtype == b.dtype and a.shape == b.shape and torch.equal(
            a.contiguous().reshape(-1).view(torch.uint8),
            b.contiguous().reshape(-1).view(torch.uint8),
        )
        return [] if equal else [where]
    if isinstance(a, dict) and isinstance(b, dict):
        found = [] if list(a) == list(b) else [f"{where} (keys)"]
        return found + [d for k in a if k in b for d in same(a[k], b[k], f"{where}/{k}")]
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        found = [] if len(a) == len(b) else [f"{where} ({len(a)} and {len(b)})"]
        pairs = enumerate(zip(a, b, strict=False))
        return found + [d for i, (x, y) in pairs for d in same(x, y, f"{where}/{i}")]
    return [] if a == b or repr(a) == repr(b) else [f"{where}: {a!r} is not {b!r}"]  # nan is nan


def random_faults(seed: int, world: int, duration: float, number: int) -> list[Fault]:
    rng = random.Random(seed)
    return [
        Fault([rng.randrange(world)], after=rng.uniform(0.05, duration)) for _ in range(number)
    ]
