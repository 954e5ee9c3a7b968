"""The shell around the recovery machine: connections that end at awkward moments, strangers, and
which end of a worker counts as a fault."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from flashrun import messages
from flashrun.control import recovery
from flashrun.control.commands import Kill
from flashrun.control.recovery import Limits
from flashrun.node.inplace import InPlace, InPlaceState, classify, gpus_are_here
from flashrun.socket_path import address
from flashrun.worker.channel import Channel


class Workers:
    """An agent that notes what it is asked for."""

    def __init__(self) -> None:
        self.replaced: list[tuple[int, int]] = []
        self.asked: list[str] = []
        self.on_replace: Callable[[], None] = lambda: None

    def replace_worker(self, rank: int, incarnation: int, environ: Mapping[str, str]) -> None:
        self.on_replace()
        self.replaced.append((rank, incarnation))

    def kill_worker(self, rank: int) -> None:
        self.asked.append(f"kill {rank}")

    def pids(self) -> dict[int, int]:
        return {}

    def incarnation_of(self, rank: int) -> int:
        return max((i for r, i in self.replaced if r == rank), default=0)

    def excuse_worker(self, rank: int) -> None:
        raise AssertionError("nobody is to be excused here")

    def save(self) -> None:
        self.asked.append("save")


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[tuple[InPlace, selectors.BaseSelector, Workers]]:
    selector, workers = selectors.DefaultSelector(), Workers()
    inplace = InPlace(0, 2, Limits(), str(tmp_path), workers, selector)
    yield inplace, selector, workers
    inplace.close()
    selector.close()


def turn(selector: selectors.BaseSelector) -> None:
    for key, _ in selector.select(5):
        key.data()


def connect(
    inplace: InPlace, rank: int, token: str | None = None, incarnation: int = 0
) -> socket.socket:
    environ = inplace.environment()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(environ[messages.CHANNEL])
    hello = {
        "op": "hello", "rank": rank, "incarnation": incarnation, "pid": 1, "port": 1,
        "generation": 0, "boundary": 0,
        "token": environ[messages.TOKEN] if token is None else token,
    }  # fmt: skip
    sock.sendall(json.dumps(hello).encode() + b"\n" + b'{"op": "formed"}\n')
    return sock


def test_a_connection_that_a_send_found_broken_in_the_same_turn(
    shell: tuple[InPlace, selectors.BaseSelector, Workers],
) -> None:
    """Two ranks die at once: what is said to one while the other's end is dealt with fails, and the
    loop has already seen that there is something to read."""
    inplace, selector, workers = shell
    socks = [connect(inplace, rank) for rank in range(2)]
    for _ in range(4):  # both accepts, both greetings
        turn(selector)
    for sock in socks:
        sock.close()
    seen = selector.select(5)
    assert len(seen) == 2
    inplace.on_exited(0, 0, -signal.SIGKILL, {})  # sends to rank 1, whose socket is broken
    for key, _ in seen:
        key.data()
    assert workers.replaced == [(0, 1)]


def test_survivors_are_woken_before_anything_else_is_done_about_a_loss(
    shell: tuple[InPlace, selectors.BaseSelector, Workers],
) -> None:
    """What a dead rank has left behind takes tens of milliseconds to sweep."""
    inplace, selector, workers = shell
    with connect(inplace, 0), connect(inplace, 1) as survivor:
        for _ in range(4):
            turn(selector)
        survivor.setblocking(False)
        told = []
        workers.on_replace = lambda: told.append(json.loads(survivor.recv(4096)))
        inplace.on_exited(0, 0, -signal.SIGKILL, {})
    assert told == [{"op": "abort", "generation": 1, "dead": [0]}]


def test_the_last_words_of_a_worker_come_before_its_end(
    shell: tuple[InPlace, selectors.BaseSelector, Workers],
) -> None:
    """The supervisor tells of the end, on another connection; what proved the replicas was not
    heard then, and all were restarted."""
    inplace, selector, _ = shell
    told = []
    decides = inplace._decides
    decides.message = lambda rank, incarnation, message: told.append((rank, message["op"]))  # type: ignore[method-assign]
    decides.exited = lambda rank, *_: told.append((rank, "exited"))  # type: ignore[method-assign]
    with connect(inplace, 0), connect(inplace, 1) as dying:
        for _ in range(4):
            turn(selector)
        told.clear()
        dying.sendall(b'{"op": "replicas"}\n')
        inplace.on_exited(1, 0, -signal.SIGKILL, {})
    assert told == [(1, "replicas"), (1, "exited")]


def test_a_worker_that_dies_with_the_agent_has_said_what_it_left(
    shell: tuple[InPlace, selectors.BaseSelector, Workers],
) -> None:
    """It had not found this agent when it was killed."""
    inplace, _, _ = shell
    told = []
    inplace._decides.message = lambda *said: told.append(said)  # type: ignore[method-assign]
    inplace._decides.exited = lambda *_: None  # type: ignore[method-assign]
    path = inplace.environment()[messages.CHANNEL]
    for rank, incarnation in ((0, 1), (1, 0)):  # rank 0's is of a process that came later
        Channel(
            path, dict, print, messages.left(path, rank), incarnation
        ).send({"op": "formed"}, standing="formed")
    inplace.on_exited(0, 0, -signal.SIGKILL, {})
    inplace.on_exited(1, 0, -signal.SIGKILL, {})
    assert told == [(1, 0, {"op": "formed"})]


def test_a_dead_workers_connection_is_read_after_its_replacements(tmp_path: Path) -> None:
    """It was killed as it connected, on a busy machine. (Its replacement was never told of a later
    fault, and waited for ever in a collective.)"""
    with selectors.DefaultSelector() as selector:
        inplace = InPlace(0, 3, Limits(), str(tmp_path), Workers(), selector)
        with connect(inplace, 0), connect(inplace, 1), connect(inplace, 2):
            for _ in range(6):
                turn(selector)
            inplace.on_exited(1, 0, -signal.SIGKILL, {})
            with connect(inplace, 1, incarnation=1) as replacement:
                turn(selector)
                turn(selector)
                with connect(inplace, 1):  # it was in the queue of the listener
                    turn(selector)
                    turn(selector)
                while selector.select(0):
                    turn(selector)
                inplace.on_exited(0, 0, -signal.SIGKILL, {})
                replacement.settimeout(5)
                told = replacement.recv(4096).decode()
        inplace.close()
    assert '"op": "abort", "generation": 2' in told


def test_what_was_told_is_left_for_the_next_agent(
    shell: tuple[InPlace, selectors.BaseSelector, Workers],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An agent was killed between the line "in place" and leaving that the replicas were proved; a
    worker that died before the next proof had all restarted."""
    inplace, selector, workers = shell
    saved: list[str] = []
    monkeypatch.setattr(workers, "save", lambda: saved.append(json.dumps(inplace.state())))
    told: list[tuple[str, str]] = []

    def say(line: str, *_: object, **__: object) -> None:
        told.append((line, saved[-1] if saved else ""))

    monkeypatch.setattr("flashrun.node.inplace.say", say)
    proof = {
        "op": "replicas", "boundary": 2, "tensors": {"w": "1"}, "buffers": [], "bytes": 4,
        "own": {}, "confirm": False,
    }  # fmt: skip
    with connect(inplace, 0) as one, connect(inplace, 1) as two:
        for sock in (one, two):
            for boundary in (1, 2):
                sock.sendall(json.dumps({**proof, "boundary": boundary}).encode() + b"\n")
        while not told:
            turn(selector)
    ((line, left),) = told
    assert line.startswith("recovery: in place, 2 replicas")
    assert '"proved": true' in left
    # The agent dies before the line is out: the next one says it.
    (tmp_path / "next").mkdir()
    with selectors.DefaultSelector() as another:
        state = InPlaceState(**json.loads(left))
        InPlace(0, 2, Limits(), str(tmp_path / "next"), workers, another, state).close()
    assert [text for text, _ in told] == [line, line]


def test_what_was_commanded_at_once_is_left_for_the_next_agent_at_once(
    shell: tuple[InPlace, selectors.BaseSelector, Workers],
) -> None:
    """An agent that died after the first of two hung workers never killed the second: its state
    had no more of the command."""
    inplace, _, workers = shell
    inplace._obey([Kill(0, 0, "hangs"), Kill(1, 0, "hangs")])
    assert workers.asked == ["kill 0", "kill 1", "save"]


def test_a_stranger_is_not_heard(
    shell: tuple[InPlace, selectors.BaseSelector, Workers], capfd: pytest.CaptureFixture[str]
) -> None:
    inplace, selector, _ = shell
    with connect(inplace, 0, token="guess") as sock:
        turn(selector)
        turn(selector)
        assert sock.recv(1) == b""
    assert "without the job's token" in capfd.readouterr().err


GLOO = "/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc"


@pytest.mark.parametrize(
    ("code", "facts", "kind"),
    [
        (0, {}, recovery.CLEAN),
        (-9, {}, recovery.FAULT),
        (-11, {}, recovery.FAULT),
        (messages.EXIT_DIVERGED, {}, recovery.FAULT),
        (1, {"exception": True, "error": "RuntimeError: CUDA error: an illegal"}, recovery.FAULT),
        (1, {"exception": True, "error": "DistBackendError: NCCL error"}, recovery.FAULT),
        (1, {"exception": True, "error": f"RuntimeError: [{GLOO}:534] Connection closed"},
         recovery.FAULT),
        (1, {"exception": True, "error": "DistNetworkError: the client socket"}, recovery.FAULT),
        (1, {"exception": True, "error": f"RuntimeError: [{GLOO}:9] monitoredBarrier: rank 1"},
         recovery.SCRIPT),
        (1, {"exception": False, "error": "CUDA error: printed"}, recovery.SCRIPT),
        (1, {"exception": True, "error": "ValueError: mine"}, recovery.SCRIPT),
        (3, {"exception": False, "error": "SystemExit: 3"}, recovery.SCRIPT),
        (1, {}, recovery.SCRIPT),
    ],
)  # fmt: skip
def test_who_counts(code: int, facts: dict[str, object], kind: str) -> None:
    assert classify(code, facts)[0] == kind


@pytest.mark.parametrize(
    ("environ", "files", "found"),
    [
        ({}, [], False),
        ({}, ["/dev/nvidiactl"], True),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, ["/dev/nvidiactl"], True),
        ({"CUDA_VISIBLE_DEVICES": ""}, ["/dev/nvidiactl"], False),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, ["/dev/nvidiactl"], False),
        ({"CUDA_VISIBLE_DEVICES": ""}, ["/dev/kfd"], True),
        ({"HIP_VISIBLE_DEVICES": ""}, ["/dev/kfd"], False),
    ],
)
def test_gpus_are_seen_before_anything_is_loaded(
    environ: dict[str, str], files: list[str], found: bool
) -> None:
    assert gpus_are_here(environ, files.__contains__) is found


def test_a_socket_at_a_long_path(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    selector = selectors.DefaultSelector()
    inplace = InPlace(0, 2, Limits(), str(folder), Workers(), selector)
    path = inplace.environment()[messages.CHANNEL]
    assert len(path) > 107
    with socket.socket(socket.AF_UNIX) as sock, address(path) as short:
        sock.connect(short)
    inplace.close()
    selector.close()
    assert not os.path.exists(path)
