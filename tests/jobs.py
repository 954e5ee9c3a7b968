"""A running job as the process tests see it: what its workers tell, what it prints, its processes.

Workers report through a datagram socket (:data:`WORKER_SIDE`), so that a test waits for an event of
a worker and never for a time; what they print is left for the tests of the output.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import termios
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from flashrun.node import tags
from flashrun.node.process_tree import TAG_VARIABLE, Seen, read_tag, table
from tests import helpers

PATIENCE = 60.0  # seconds; never reached on the way to success
# Workers of tests that are not about being forked start as fresh processes: such a job costs half
# the time, since no zygote loads torch._dynamo. Set it to 1 to run them all forked.
FORKED = os.environ.get("FRTEST_FORKED", "0")

# Put before each worker script. `tell` reports to the test; `ask` also waits for its answer.
WORKER_SIDE = """\
import json, os, signal, socket, subprocess, sys, threading, time

RANK = int(os.environ.get("RANK", -1))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", -1))
ATTEMPT = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", -1))


def tell(what, **fields):
    fields = dict(fields, what=what, rank=RANK, attempt=ATTEMPT, pid=os.getpid())
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.sendto(json.dumps(fields).encode(), os.environ["FRTEST_TELL"])


def await_release(name):
    # Opening a FIFO for reading blocks until the test opens it for writing.
    with open(os.path.join(os.environ["FRTEST_FOLDER"], name)) as fifo:
        fifo.read()


def forever():
    while True:
        signal.pause()


def sleeper(**options):
    # A helper process that says its pid, and does nothing for ever.
    code = "import signal\\nwhile True: signal.pause()"
    return subprocess.Popen([sys.executable, "-S", "-c", code], **options)


def daemon(**options):
    # Two forks and a session of its own; its pid comes through a pipe.
    r, w = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.close(r)
            process = sleeper(**options)
            os.write(w, b"%d %d" % (os.getpid(), process.pid))
            os.close(w)
            forever()
        os._exit(0)
    os.close(w)
    pids = [int(pid) for pid in os.read(r, 100).split()]
    os.close(r)
    os.wait()
    return pids

"""


def seen(pid: int) -> psutil.Process | None:
    """The living process ``pid``, or None."""
    try:
        process = psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None
    return process if helpers.is_alive(process) else None


class Job:
    """One launcher with its workers; see :func:`job`."""

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        env: Mapping[str, str],
        preexec: Callable[[], None] | None,
        terminal: bool,
        forked: bool,
        recovery: str,
    ) -> None:
        self.command = tuple(command)
        self.folder = folder
        self.events: list[dict[str, Any]] = []
        self._news = threading.Condition()
        self.output = {"out": b"", "err": b""}
        self._told = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        # Short: the path of a Unix socket ends at 107 bytes. Also its own, so that what killed
        # processes leave there is the test's.
        self.temporary = Path(tempfile.mkdtemp(prefix="j-"))
        self._told.bind(str(self.temporary / "tell"))
        self._stop_read, self._stop_write = os.pipe()
        self.terminal = -1
        self.left_in_tmp: list[str] = []  # once it is closed
        self.run = os.urandom(8).hex()
        environment = {
            **helpers.clean_environment(env),
            helpers.RUN_VARIABLE: self.run,
            "FRTEST_TELL": str(self.temporary / "tell"),
            "TMPDIR": str(self.temporary),
            "FRTEST_FOLDER": str(folder),
            "FLASHRUN_ZYGOTE": "1" if forked else FORKED,
            "FLASHRUN_RECOVERY": recovery,
        }
        if terminal:
            self.terminal, slave = pty.openpty()

            def take_terminal() -> None:
                fcntl.ioctl(0, termios.TIOCSCTTY, 0)
                if preexec is not None:
                    preexec()

            self.process = subprocess.Popen(
                self.command, env=environment, cwd=folder, start_new_session=True,
                stdin=slave, stdout=slave, stderr=slave, preexec_fn=take_terminal,
            )  # fmt: skip
            os.close(slave)
            streams = {self.terminal: "out"}
        else:
            self.process = subprocess.Popen(
                self.command, env=environment, cwd=folder, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                preexec_fn=preexec,
            )  # fmt: skip
            assert self.process.stdout is not None
            assert self.process.stderr is not None
            streams = {self.process.stdout.fileno(): "out", self.process.stderr.fileno(): "err"}
        self.pid = self.process.pid
        self._thread = threading.Thread(target=self._read, args=(streams,))
        self._thread.start()

    # -- what comes from it ----------------------------------------------------------------------

    def _read(self, streams: dict[int, str]) -> None:
        poller = select.poll()
        for fd in (*streams, self._told.fileno(), self._stop_read):
            poller.register(fd, select.POLLIN)
        open_streams = set(streams)
        while True:
            for fd, _ in poller.poll():
                with self._news:
                    if fd == self._stop_read:
                        return
                    if fd == self._told.fileno():
                        self.events.append(json.loads(self._told.recv(65536)))
                    else:
                        try:
                            data = os.read(fd, 65536)
                        except OSError:  # a terminal whose other side is closed
                            data = b""
                        self.output[streams[fd]] += data
                        if not data:
                            poller.unregister(fd)
                            open_streams.discard(fd)
                    self._news.notify_all()

    def _await(self, condition: Callable[[], Any], what: str, timeout: float) -> Any:
        deadline = time.monotonic() + timeout
        with self._news:
            while True:
                found = condition()
                if found:
                    return found
                left = deadline - time.monotonic()
                ended = self.process.poll() is not None
                if left <= 0 or (ended and left < timeout - 5):
                    raise TimeoutError(f"waited for {what}\n{self.describe()}")
                # An exit is no news of the condition's, so look now and then.
                self._news.wait(min(left, 0.5))

    def told(self, what: str, **fields: Any) -> list[dict[str, Any]]:
        """The events ``what`` so far that have these fields."""
        wanted = {"what": what, **fields}
        return [e for e in list(self.events) if all(e.get(k) == v for k, v in wanted.items())]

    def await_told(
        self, what: str, count: int = 1, timeout: float = PATIENCE, **fields: Any
    ) -> list[dict[str, Any]]:
        """Wait until ``count`` such events have come; gives them."""

        def enough() -> list[dict[str, Any]] | None:
            found = self.told(what, **fields)
            return found if len(found) >= count else None

        found: list[dict[str, Any]] = self._await(
            enough, f"{count} events {what} {fields}", timeout
        )
        return found

    def await_output(
        self, pattern: str, stream: str = "out", timeout: float = PATIENCE, after: int = 0
    ) -> str:
        """Wait until the launcher has shown something that matches; gives the match.

        Args:
            after: bytes of the stream that are not looked at (what was said before).
        """
        expression = re.compile(pattern.encode(), re.MULTILINE)
        found = self._await(
            lambda: expression.search(self.output[stream], after), f"output {pattern!r}", timeout
        )
        return str(found.group().decode())

    @property
    def out(self) -> str:
        return self.output["out"].decode(errors="replace")

    @property
    def err(self) -> str:
        return self.output["err"].decode(errors="replace")

    def describe(self) -> str:
        return (
            f"$ {' '.join(self.command)}\nstatus {self.process.returncode}\n"
            f"--- events\n{self.events}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"
        )

    # -- what is done to it ----------------------------------------------------------------------

    def release(self, name: str) -> None:
        """Let the worker that waits in ``await_release(name)``, or will, go on."""

        def opened() -> bool:
            try:
                fd = os.open(self.folder / name, os.O_WRONLY | os.O_NONBLOCK)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                return False  # nobody reads yet
            os.close(fd)
            return True

        try:
            helpers.wait_until(opened, f"a worker that waits for {name}", PATIENCE)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.describe()}") from None

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def rows(self) -> list[Seen]:
        """The living processes that carry the job's tag."""
        mine = tags.job_of(read_tag(self.pid))
        return [row for row in table() if tags.job_of(row.tag) == mine and mine and not row.zombie]

    def helper(self, role: str, but: int | None = None) -> int:
        """Wait for the helper ``role`` (agent, zygote, store) and give its pid.

        Args:
            but: not this one (it was killed, and another is to come).
        """
        found: list[int] = []

        def there() -> bool:
            found[:] = self._helpers(role, but)
            return bool(found)

        try:
            helpers.wait_until(there, f"a {role}", PATIENCE)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.describe()}") from None
        return found[0]

    def next_helper(self, role: str, but: int) -> int | None:
        """As :meth:`helper`; None if the launcher ends instead."""
        found: list[int] = []

        def either() -> bool:
            found[:] = self._helpers(role, but)
            return bool(found) or self.process.poll() is not None

        helpers.wait_until(either, f"another {role}, or the end", PATIENCE)
        return found[0] if found else None

    def _helpers(self, role: str, but: int | None) -> list[int]:
        return [
            row.pid
            for row in self.rows()
            if row.parent == self.pid and tags.role_of(row.tag) == role and row.pid != but
        ]

    def kill_helper(self, role: str) -> int:
        """SIGKILL the helper and wait until the supervisor has started another; its pid."""
        pid = self.helper(role)
        os.kill(pid, signal.SIGKILL)
        return self.helper(role, but=pid)

    def wait(self, timeout: float = PATIENCE) -> int:
        """The exit status, once the launcher has ended.

        Raises:
            TimeoutError: with everything that is known.
        """
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(
                f"not ended after {timeout} s: {[(r.pid, r.tag) for r in self.rows()]}\n"
                + self.describe()
            ) from None
        return self.process.returncode

    def ended(self) -> int:
        """:meth:`wait`, and all output is in."""
        status = self.wait()
        self.close()
        return status

    def await_gone(self, pids: Sequence[int], timeout: float = PATIENCE) -> None:
        """Wait until all of these processes have ended (pidfd)."""
        left = helpers.await_exit([p for p in map(seen, pids) if p is not None], timeout)
        assert not left, f"still there: {left}\n{self.describe()}"

    def close(self) -> None:
        """Kill what is left of it and collect the output to its end."""
        if self.process.poll() is None:
            processes = helpers.tagged_processes(helpers.RUN_VARIABLE, self.run)
            # The supervisor alone: its helpers remove the job's folder, which nobody else would.
            self.process.kill()
            self.process.wait()
            helpers.kill_all(helpers.await_exit(processes, 20))
        if self._stop_write < 0:
            return
        os.write(self._stop_write, b"!")
        self._thread.join()
        self._drain()
        for fd in (self._stop_read, self._stop_write, self.terminal):
            if fd >= 0:
                os.close(fd)
        self._stop_write = -1
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        self._told.close()
        left = set(os.listdir(self.temporary)) - {"tell"}
        # torch's own cache, made as torch._dynamo is imported, by whoever imports it.
        self.left_in_tmp = sorted(n for n in left if not n.startswith("torchinductor_"))
        shutil.rmtree(self.temporary)

    def _drain(self) -> None:
        streams = (
            ("out", self.process.stdout.fileno() if self.process.stdout else self.terminal),
            ("err", self.process.stderr.fileno() if self.process.stderr else -1),
        )
        for name, fd in streams:
            while fd >= 0 and select.select([fd], [], [], 0)[0]:
                try:
                    data = os.read(fd, 65536)
                except OSError:
                    break
                if not data:
                    break
                self.output[name] += data
        while select.select([self._told], [], [], 0)[0]:
            self.events.append(json.loads(self._told.recv(65536)))


# Of epoll_wait and epoll_pwait on x86-64, of epoll_pwait on aarch64.
_EPOLL_WAIT = {"232", "281", "22"}


def waits_without_timeout(pid: int) -> bool:
    """Whether the main thread of ``pid`` is in epoll_wait with no timeout at this moment.

    A loop that polls would be found there with one (proc_pid_syscall(5)).
    """
    fields = Path(f"/proc/{pid}/task/{pid}/syscall").read_text().split()
    return fields[0] in _EPOLL_WAIT and int(fields[4], 16) & 0xFFFFFFFF == 0xFFFFFFFF


def write_script(folder: Path, body: str, name: str = "work.py") -> Path:
    """A worker script in a folder of its own, with :data:`WORKER_SIDE` before ``body``."""
    home = folder / "s"
    home.mkdir(exist_ok=True)
    path = home / name
    path.write_text(WORKER_SIDE + textwrap.dedent(body))
    return path


@contextmanager
def job(
    folder: Path,
    body: str,
    *flags: str,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    fifos: Sequence[str] = (),
    preexec: Callable[[], None] | None = None,
    terminal: bool = False,
    name: str = "",
    forked: bool = False,
    recovery: str = "restart",
    within: Sequence[str] = (),
    script: Path | None = None,
) -> Iterator[Job]:
    """Run ``flashrun FLAGS script ARGS`` with the script ``body``; nothing outlives the block.

    Args:
        folder: the test's tmp_path.
        fifos: names for ``await_release``.
        terminal: run in a terminal of its own (both streams are ``out`` then).
        name: tells several jobs of one test apart.
        forked: workers are forks of the zygote in any case.
        recovery: these tests are about the launcher; what is replaced in place has its own.
        within: a command that executes the launcher (``ip netns exec NAME``).
        script: that one, instead of ``body`` (nodes of one job have it at the same place).
    """
    home = folder / (name or "j")
    home.mkdir()
    for fifo in fifos:
        os.mkfifo(home / fifo)
    if script is None:
        script = write_script(home, body)
    command = [*within, *helpers.launcher("flashrun"), *flags, str(script), *args]
    with running(command, home, env or {}, preexec, terminal, forked, recovery) as result:
        yield result


@contextmanager
def running(
    command: Sequence[str],
    folder: Path,
    env: Mapping[str, str],
    preexec: Callable[[], None] | None = None,
    terminal: bool = False,
    forked: bool = False,
    recovery: str = "restart",
) -> Iterator[Job]:
    """A command with :class:`Job` around it."""
    result = Job(command, folder, env, preexec, terminal, forked, recovery)
    try:
        yield result
    finally:
        result.close()


__all__ = ["PATIENCE", "TAG_VARIABLE", "Job", "job", "running", "seen", "write_script"]
