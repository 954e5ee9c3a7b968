"""Processes for the tests: run a command under a deadline, find and end what it left behind.

Everything that a test starts carries ``FRTEST_SESSION`` in its environment (set by
``conftest.py``), so that what outlives a test is found even after it was handed to PID 1.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import psutil
import pytest

SESSION_VARIABLE = "FRTEST_SESSION"
JOB_TAG_VARIABLE = "FLASHRUN_JOB_TAG"
RUN_VARIABLE = "FRTEST_RUN"  # one value for each command run by `run`
ROOT = Path(__file__).resolve().parent.parent

# Variables of the developer's shell that would steer a launcher or a worker.
_STEERING = ("PET_", "FLASHRUN_", "TORCHELASTIC_", "TORCH_", "OMP_", "MKL_", "PYTHON", "NCCL_")
_STEERING_NAMES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "GROUP_RANK", "ROLE_RANK", "CUDA_VISIBLE_DEVICES", "LOGLEVEL",
)  # fmt: skip


def launcher(name: str) -> list[str]:
    """The command of ``torchrun`` or ``flashrun`` of the environment that runs the tests."""
    script = Path(sys.executable).parent / name
    if script.exists():
        return [str(script)]
    module = {"torchrun": "torch.distributed.run", "flashrun": "flashrun"}[name]
    return [sys.executable, "-m", module]


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of the tests without what would steer launcher or worker, plus ``extra``."""
    keep = {
        name: value
        for name, value in os.environ.items()
        if name == SESSION_VARIABLE or not (name.startswith(_STEERING) or name in _STEERING_NAMES)
    }
    keep.update(extra or {})
    return keep


def shared_folder() -> Path:
    """The folder ``shared`` of the checkout; skips the test with a clear message without it."""
    folder = ROOT / "shared"
    if not folder.is_dir():
        pytest.skip(f"needs the folder {folder}, which this checkout does not have")
    return folder


def free_port() -> int:
    """A TCP port that was free on loopback a moment ago, outside the range the kernel hands out
    by itself, so that no other process of a parallel test gets it before its user binds it."""
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(200):
        port = 10000 + uuid.uuid4().int % max(1, low - 10000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue  # in use: the next one
            return port
    raise RuntimeError(f"no free port between 10000 and {low} in 200 tries")


@contextmanager
def silent_port() -> Iterator[int]:
    """A port where somebody listens, with a full queue: connections neither come nor fail."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        fillers = []
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
            fillers.append(filler)
        try:
            yield port
        finally:
            for filler in fillers:
                filler.close()


def environment_of(pid: int, names: Sequence[str] = ()) -> dict[str, str]:
    """The environment a process was started with, empty if it is gone or not ours to read.

    Args:
        names: not taken apart unless one of these is there.
    """
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            raw = file.read()
    except OSError:
        return {}
    if names and not any(name.encode() + b"=" in raw for name in names):
        return {}
    pairs = (item.partition(b"=") for item in raw.split(b"\0") if b"=" in item)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def tagged_processes(variable: str, value: str) -> list[psutil.Process]:
    """Live processes (no zombies) whose start environment holds ``variable=value``.

    Raises:
        ValueError: an empty name or value, which would fit processes that are not ours.
    """
    if not variable or not value:
        raise ValueError(f"a tag has a name and a value, not {variable!r}={value!r}")
    found = []
    for process in psutil.process_iter():
        if environment_of(process.pid).get(variable) == value and is_alive(process):
            found.append(process)
    return found


def is_alive(process: psutil.Process) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def await_exit(processes: Sequence[psutil.Process], timeout: float) -> list[psutil.Process]:
    """Wait until the processes have ended; those that have not after ``timeout`` seconds.

    Unlike psutil's waits this never reaps: the exit status of a child of ours belongs to the
    subprocess.Popen that started it, which would report 0 without it.
    """
    deadline = time.monotonic() + timeout
    for process in processes:
        try:
            descriptor = os.pidfd_open(process.pid)
        except ProcessLookupError:
            continue
        try:
            # The pid may have been taken over by another process; is_alive compares start times.
            remaining = max(0.0, deadline - time.monotonic())
            if is_alive(process):
                select.select([descriptor], [], [], remaining)
        finally:
            os.close(descriptor)
    return [process for process in processes if is_alive(process)]


def kill_all(processes: Sequence[psutil.Process], timeout: float = 10.0) -> None:
    """SIGKILL and wait until they are gone.

    Raises:
        RuntimeError: some are still there after ``timeout`` seconds.
    """
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    left = await_exit(processes, timeout)
    if left:
        raise RuntimeError(f"not gone {timeout} s after SIGKILL: {left}")


def wait_until(condition: Callable[[], bool], what: str, timeout: float = 30.0) -> None:
    """Wait for a condition that nobody can signal to us (files and processes of others).

    Raises:
        TimeoutError: naming ``what`` was waited for.
    """
    deadline = time.monotonic() + timeout
    pause = threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout} s for {what}")
        pause.wait(0.02)


def freeze(*pids: int) -> None:
    """SIGSTOP, and wait until every thread of the processes stands still (or is gone).

    `os.kill` only leaves the signal: one thread of the process is to take it, and the others run
    on until it has (a server still answers, a rank still sends).

    Raises:
        TimeoutError: a thread went on for 30 s.
    """
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    for pid in pids:
        wait_until(lambda pid=pid: _stands_still(pid), f"process {pid} to stand still")  # type: ignore[misc]


def _stands_still(pid: int) -> bool:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return True
    for thread in threads:
        try:
            stat = Path(f"/proc/{pid}/task/{thread}/stat").read_text()
        except OSError:
            continue  # gone
        if stat.rpartition(")")[2].split()[0] not in "TtZX":
            return False
    return True


@dataclass(frozen=True)
class Finished:
    """A command that has ended. ``status`` as subprocess gives it: -N for signal N."""

    command: tuple[str, ...]
    status: int
    stdout: str
    stderr: str

    def describe(self) -> str:
        return (
            f"$ {' '.join(self.command)}\nstatus {self.status}\n"
            f"--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"
        )


# Runs in progress, by the value of RUN_VARIABLE, with the process of each: the suite may run ahead
# of the test that asks for a result, so these are not leftovers of the test that just ended.
active_runs: dict[str, int] = {}


def _tree_of(pid: int, run: str) -> list[psutil.Process]:
    processes = {p.pid: p for p in tagged_processes(RUN_VARIABLE, run)}
    try:
        parent = psutil.Process(pid)
        processes.update({p.pid: p for p in [parent, *parent.children(recursive=True)]})
    except psutil.NoSuchProcess:
        pass  # the launcher itself is gone; the tag finds the rest
    return [p for p in processes.values() if is_alive(p)]


class Running:
    """A started command; its output is collected by threads so that it never blocks on a pipe."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        stdin: str | bytes | None = None,
        stdin_fd: int | None = None,
        preexec: Callable[[], None] | None = None,
    ) -> None:
        self.command = tuple(command)
        self.run = uuid.uuid4().hex
        environment = dict(clean_environment() if env is None else env)
        environment[RUN_VARIABLE] = self.run
        if stdin_fd is None:
            stdin_fd = subprocess.DEVNULL if stdin is None else subprocess.PIPE
        self.process = subprocess.Popen(
            self.command,
            env=environment,
            cwd=cwd,
            stdin=stdin_fd,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C at the test's terminal is the test's own
            preexec_fn=preexec,
        )
        self.pid = self.process.pid
        self._input = stdin.encode() if isinstance(stdin, str) else stdin
        self._output: tuple[bytes, bytes] = (b"", b"")
        self._thread = threading.Thread(target=self._collect)
        self._thread.start()

    def _collect(self) -> None:
        try:
            self._output = self.process.communicate(self._input)
        except BrokenPipeError:  # the command ended without reading its input
            self._output = self.process.communicate()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def tree(self) -> list[psutil.Process]:
        """The live processes of this run: by the tag that all of them inherit, and by descent."""
        return _tree_of(self.pid, self.run)

    def wait(self, timeout: float = 60.0) -> Finished:
        """Wait for the command and for the end of its output.

        Raises:
            TimeoutError: not ended in ``timeout`` seconds; the tree was killed and the message
                shows its output.
        """
        self._thread.join(timeout)
        late = self._thread.is_alive()
        if late:
            names = [f"{p.pid} {' '.join(p.cmdline())}" for p in self.tree()]
            kill_all(self.tree())
            self._thread.join(10)
        out, err = (stream.decode(errors="replace") for stream in self._output)
        status = self.process.returncode
        finished = Finished(self.command, 0 if status is None else status, out, err)
        if late:
            raise TimeoutError(
                f"not ended (or its output held open) after {timeout} s by\n"
                + "\n".join(names) + "\n" + finished.describe()
            )  # fmt: skip
        return finished


@contextmanager
def start(command: Sequence[str], **options: object) -> Iterator[Running]:
    """Start a command (arguments of :class:`Running`); it does not outlive the block.

    If it is still there at the end of the block, its whole tree is killed. If it had ended by
    itself, what it left behind is left for the suite's guard to find.
    """
    running = Running(command, **options)  # type: ignore[arg-type]
    active_runs[running.run] = running.pid
    try:
        yield running
    finally:
        if running.process.poll() is None:
            kill_all(running.tree())
        running._thread.join(10)
        del active_runs[running.run]


def run(command: Sequence[str], timeout: float = 60.0, **options: object) -> Finished:
    """Run a command to its end (arguments of :class:`Running`).

    Raises:
        TimeoutError: see :meth:`Running.wait`.
    """
    with start(command, **options) as running:
        return running.wait(timeout)


def signal_name(status: int) -> str:
    """``-15`` as ``SIGTERM``, for messages."""
    return signal.Signals(-status).name if status < 0 else str(status)


Item = TypeVar("Item")
Result = TypeVar("Result")


class Ahead(Generic[Item, Result]):
    """Computes the results of the next items while a test looks at the one before.

    A launcher waits much of its time, so that one run at a time leaves the cores idle.

    Args:
        function: computes a result; it runs in a thread.
        items: in the order in which they will be asked for.
        workers: how many run at once; ``depth``: how many are started before they are asked for.
    """

    def __init__(
        self, function: Callable[[Item], Result], items: Sequence[Item], workers: int, depth: int
    ) -> None:
        self._function = function
        self._items = list(items)
        self._depth = depth
        self._pool = ThreadPoolExecutor(workers)
        self._futures: dict[int, Future[Result]] = {}

    def get(self, item: Item, timeout: float) -> Result:
        """The result for ``item``; raises what its computation raised."""
        index = self._items.index(item)
        for i in range(index, min(index + self._depth + 1, len(self._items))):
            if i not in self._futures:
                self._futures[i] = self._pool.submit(self._function, self._items[i])
        return self._futures[index].result(timeout)

    def close(self) -> None:
        """Drop what was not started and end what nobody asks for any more."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for run, pid in list(active_runs.items()):  # only what this process started and recorded
            kill_all([p for p in _tree_of(pid, run) if is_alive(p)])
        self._pool.shutdown(wait=True)


def ends_of_communicators() -> list[threading.Event]:
    """For each communicator of gloo in this process an event that is set when it has ended; one
    that was cut ends in a thread."""
    from flashrun.worker.communicator import Gloo

    ends = []
    for thing in gc.get_objects():
        if type(thing) is Gloo:
            ends.append(threading.Event())
            weakref.finalize(thing._group, ends[-1].set)
    return ends
