"""Guard of the whole suite: no test leaves anything behind.

After each test the following must be as before it: processes started by the test (descendants of
pytest, or carrying this session's or a job's tag in their environment, whoever their parent is
now), listening sockets, network namespaces, entries of /dev/shm, temporary files and folders.

What can be told apart on a machine that others use at the same time is always checked. With
``FRTEST_ALONE=1`` (set by ``.ci/run``) the machine is ours, and the rest is checked too.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil
import pytest

from tests import helpers

_ALONE = os.environ.get("FRTEST_ALONE") == "1"
_GRACE = 5.0  # seconds that a dying process gets to be gone

_TABLES = {socket.AF_INET: "tcp", socket.AF_INET6: "tcp6"}
_LISTENS = (socket.SOL_SOCKET, socket.SO_ACCEPTCONN)

# Set at import, before any test module is imported: everything started from here on inherits it.
_SESSION = uuid.uuid4().hex
os.environ[helpers.SESSION_VARIABLE] = _SESSION
_HOME = Path(tempfile.mkdtemp(prefix="frt-"))  # short: unix socket paths end at 107 bytes
_TEMPORARY = _HOME / "tmp"
_TEMPORARY.mkdir()
os.environ["PYTEST_DEBUG_TEMPROOT"] = str(_HOME)  # tmp_path is not a leftover
os.environ["TMPDIR"] = str(_TEMPORARY)
tempfile.tempdir = str(_TEMPORARY)


def _stop_all(number: int, frame: FrameType | None) -> None:
    """Interrupt the processes that run the tests (scripts/test), and this one, which waits."""
    for process in psutil.Process().children():
        process.send_signal(signal.SIGTERM)
    signal.default_int_handler(number, frame)


def pytest_configure(config: pytest.Config) -> None:
    # A suite that is stopped (timeout sends SIGTERM; a shell's background jobs ignore SIGINT) still
    # ends what it started, so that nobody has to hunt for it by hand.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        signal.signal(signal.SIGTERM, _stop_all)  # Ctrl-C reaches them all by itself
    # What whoever starts the tests ignores (nohup, a background job) would be ignored by every
    # launcher and worker, and their tests would see that instead of what they are about.
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def pytest_unconfigure() -> None:
    shutil.rmtree(_HOME, ignore_errors=True)


@dataclass(frozen=True)
class _State:
    """What is compared.

    Attributes:
        machine: what is new on the whole machine; None if it is not ours alone, or while commands
            of tests to come run ahead (their sockets and folders are no leftovers).
    """

    processes: dict[tuple[int, float], str]
    listening: frozenset[str]
    temporary: frozenset[str]
    machine: frozenset[str] | None


# torch's own cache for all runs of a user: whoever imports torch._dynamo first makes it.
_CACHES = "torchinductor_"


def _names(folder: str | Path) -> frozenset[str]:
    try:
        names = [name for name in os.listdir(folder) if not name.startswith(_CACHES)]
        return frozenset(f"{folder}/{name}" for name in names)
    except FileNotFoundError:
        return frozenset()


def _running_ahead() -> set[int]:
    """Processes of commands that tests to come have started (see helpers.Ahead)."""
    found = set()
    for pid in list(helpers.active_runs.values()):
        try:
            found |= {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
        except psutil.NoSuchProcess:
            continue  # just ended
    return found


_MARKS = (helpers.SESSION_VARIABLE, helpers.RUN_VARIABLE, helpers.JOB_TAG_VARIABLE)


def _is_certainly_ours(process: psutil.Process, descendants: set[int]) -> bool:
    environment = helpers.environment_of(process.pid, _MARKS)
    return process.pid in descendants or environment.get(helpers.SESSION_VARIABLE) == _SESSION


def _is_ours(process: psutil.Process, descendants: set[int]) -> bool:
    environment = helpers.environment_of(process.pid, _MARKS)
    if environment.get(helpers.RUN_VARIABLE) in helpers.active_runs:
        return False
    if process.pid in descendants or environment.get(helpers.SESSION_VARIABLE) == _SESSION:
        return True
    # A process that wiped its environment and was handed to PID 1, or a job of flashrun that lost
    # the session's variable: only ours for certain when nobody else is on the machine.
    return _ALONE and (helpers.JOB_TAG_VARIABLE in environment or process.ppid() == 1)


def _processes() -> dict[tuple[int, float], str]:
    me = psutil.Process()
    descendants = {child.pid for child in me.children(recursive=True)} - _running_ahead()
    found = {}
    for process in psutil.process_iter():
        try:
            if process.pid == me.pid or not _is_ours(process, descendants):
                continue
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            line = " ".join(process.cmdline()) or process.name()
            found[process.pid, process.create_time()] = f"pid {process.pid}: {line[:200]}"
        except psutil.NoSuchProcess:
            continue
    return found


def _run_folders() -> frozenset[str]:
    """Private folders of jobs in shared memory whose other half is in this session's TMPDIR."""
    found = set()
    for folder in Path("/dev/shm").glob("flashrun_*"):
        try:
            if os.readlink(folder / "view").startswith(f"{_TEMPORARY}/"):
                found.add(str(folder))
        except OSError:
            continue  # it is just being made, or removed
    return frozenset(found)


def _listening() -> frozenset[str]:
    """Of this process. (The kernel's table of all costs milliseconds, twice for each test.)"""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.family in _TABLES and one.getsockopt(*_LISTENS):
                    found.add(f"{_TABLES[one.family]} port {one.getsockname()[1]}")
        except OSError:
            continue  # the descriptor of this very listing; one that a thread has just closed
    return frozenset(found)


def _all_listening() -> frozenset[str]:
    found = set()
    for table in _TABLES.values():
        path = Path(f"/proc/self/net/{table}")
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            fields = line.split()
            if fields[3] == "0A":
                found.add(f"{table} port {int(fields[1].rpartition(':')[2], 16)}")
    return frozenset(found)


def _state() -> _State:
    return _State(
        processes=_processes(),
        listening=_listening(),
        temporary=_names(_TEMPORARY) | _run_folders(),
        machine=_machine(),
    )


def _machine() -> frozenset[str] | None:
    if not _ALONE or helpers.active_runs:
        return None
    folders = ("/run/netns", "/dev/shm", _HOME.parent)
    return _all_listening().union(*(_names(folder) for folder in folders))


def _leftovers(before: _State, after: _State) -> list[str]:
    lines = [
        f"process {text}" for key, text in after.processes.items() if key not in before.processes
    ]
    for kind in ("listening", "temporary"):
        new = getattr(after, kind) - getattr(before, kind)
        lines += [f"{kind}: {name}" for name in sorted(new)]
    if before.machine is not None and after.machine is not None:
        known = after.listening | after.temporary
        lines += [
            f"on this machine: {name}" for name in sorted(after.machine - before.machine - known)
        ]
    return lines


def _existing(keys: list[tuple[int, float]]) -> list[psutil.Process]:
    return [p for p in psutil.process_iter() if (p.pid, p.create_time()) in keys]


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fails the test that left something behind, names it, and cleans it up for the next one."""
    before = _state()
    yield
    deadline = time.monotonic() + _GRACE
    while True:
        after = _state()
        left = _leftovers(before, after)
        new = [key for key in after.processes if key not in before.processes]
        remaining = deadline - time.monotonic()
        if not left or remaining <= 0:
            break
        if not new:
            break  # files and sockets do not go away by waiting
        helpers.await_exit(_existing(new), timeout=min(remaining, 0.2))
    if not left:
        return
    # What is only believed to be ours is named, never killed: FRTEST_ALONE may be set by mistake.
    descendants = {child.pid for child in psutil.Process().children(recursive=True)}
    helpers.kill_all([p for p in _existing(new) if _is_certainly_ours(p, descendants)])
    for name in after.temporary - before.temporary:
        if os.path.isdir(name) and not os.path.islink(name):
            shutil.rmtree(name, ignore_errors=True)
        else:
            Path(name).unlink(missing_ok=True)
    pytest.fail("left behind:\n  " + "\n  ".join(left), pytrace=False)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed for a test that uses randomness, shown when it fails.

    Set FRTEST_SEED to run it again.
    """
    value = int(os.environ.get("FRTEST_SEED") or uuid.uuid4().int % 2**32)
    print(f"seed of {request.node.nodeid}: FRTEST_SEED={value}")
    return value


@pytest.fixture(scope="session")
def has_ipv6() -> bool:
    """Whether this machine has the IPv6 loopback address."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True
