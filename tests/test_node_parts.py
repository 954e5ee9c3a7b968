"""The pure pieces of flashrun.node: tables, no processes."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashrun.node import process_tree, run_folder, stderr_tail, tags, worker_env
from flashrun.node.eligibility import reason_for_plain, shadowed, variables_set_by
from flashrun.node.failure_report import describe_failure, first_failure, report
from flashrun.node.log_tee import PARTIAL_DELAY, LogTee, Sink, Tail, split_lines
from flashrun.node.process_tree import Seen, belonging
from flashrun.node.supervisor import watched_signals
from flashrun.node.torch_gate import changed_load_time_variables, is_load_time, omp_threads
from flashrun.node.wire import pair
from flashrun.rendezvous.table import RankTable, Seat, assign_ranks

# -- log_tee -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "lines", "rest"),
    [
        (b"", [], b""),
        (b"a", [], b"a"),
        (b"a\n", [(b"a\n", 2)], b""),
        (b"a\nb", [(b"a\n", 2)], b"b"),
        (b"a\r\nb\r\n", [(b"a\n", 3), (b"b\n", 3)], b""),
        (b"1%\r2%\r3%", [(b"1%\n", 3), (b"2%\n", 3)], b"3%"),
        (b"1%\r", [], b"1%\r"),  # may yet become \r\n
        (b"\n\n", [(b"\n", 1), (b"\n", 1)], b""),
        ("é\n".encode(), [("é\n".encode(), 3)], b""),
    ],
)
def test_split_lines(data: bytes, lines: list[tuple[bytes, int]], rest: bytes) -> None:
    assert split_lines(data) == (lines, rest)


@given(st.lists(st.sampled_from([b"a", b"\n", b"\r", b"\r\n", b"xyz"])), st.data())
def test_split_lines_does_not_depend_on_the_pieces(parts: list[bytes], data: Any) -> None:
    whole = b"".join(parts)
    cut = data.draw(st.integers(0, len(whole)))
    first, rest = split_lines(whole[:cut])
    second, last = split_lines(rest + whole[cut:])
    assert (first + second, last) == split_lines(whole)
    assert sum(length for _, length in first + second) + len(last) == len(whole)


class _Screen:
    """A file that stands for the terminal, and tails of two ranks that show on it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "screen"
        self.sink = Sink(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
        self.folder = folder
        self.open: list[Tail] = []

    def tail(self, name: str, keep: str = "", raw: bool = False) -> Tail:
        tail = Tail(
            str(self.folder / name),
            f"[{name}]:".encode(),
            self.sink,
            lambda line: keep.encode() in line,
            str(self.folder / f"{name}.offset"),
            raw=raw,
        )
        tail.open()
        self.open.append(tail)
        return tail

    def write(self, name: str, data: str) -> None:
        with open(self.folder / name, "a", newline="") as file:
            file.write(data)

    def close(self) -> None:
        for tail in self.open:
            tail.close()
        os.close(self.sink.fd)

    @property
    def shown(self) -> str:
        return self.path.read_text()


@pytest.fixture
def screen(tmp_path: Path) -> Any:
    result = _Screen(tmp_path)
    yield result
    result.close()


def test_whole_lines_are_shown_at_once_and_pieces_wait(screen: _Screen) -> None:
    a = screen.tail("a")
    screen.write("a", "one\ntw")
    a.advance(now=0.0)
    a.show_partial(now=PARTIAL_DELAY / 2)
    assert screen.shown == "[a]:one\n"
    screen.write("a", "o\n")
    a.advance(now=PARTIAL_DELAY)
    assert screen.shown == "[a]:one\n[a]:two\n"


def test_an_unfinished_line_is_shown_after_a_while_and_goes_on(screen: _Screen) -> None:
    a = screen.tail("a")
    screen.write("a", "50 %")
    a.advance(now=0.0)
    a.show_partial(now=PARTIAL_DELAY)
    assert screen.shown == "[a]:50 %"
    screen.write("a", " done\nnext\n")
    a.advance(now=1.0)
    assert screen.shown == "[a]:50 % done\n[a]:next\n"


def test_lines_of_two_ranks_never_mix(screen: _Screen) -> None:
    a, b = screen.tail("a"), screen.tail("b")
    screen.write("a", "begin")
    a.advance(now=0.0)
    a.show_partial(now=1.0)
    screen.write("b", "other\n")
    b.advance(now=1.0)
    screen.write("a", " end\n")
    a.advance(now=2.0)
    # The interrupted line is ended, and shown whole when it is complete.
    assert screen.shown == "[a]:begin\n[b]:other\n[a]:begin end\n"


def test_two_unfinished_lines_stand_on_lines_of_their_own(screen: _Screen) -> None:
    a, b = screen.tail("a"), screen.tail("b")
    for name, tail in (("a", a), ("b", b)):
        screen.write(name, f"{name}?")
        tail.advance(now=0.0)
        tail.show_partial(now=1.0)
    a.finish(now=2.0)
    b.finish(now=2.0)
    assert screen.shown == "[a]:a?\n[b]:b?"


def test_last_lines_without_an_end_do_not_run_together(screen: _Screen) -> None:
    a, b = screen.tail("a"), screen.tail("b")
    screen.write("a", "a")
    screen.write("b", "b")
    a.finish(now=0.0)
    b.finish(now=0.0)
    assert screen.shown == "[a]:a\n[b]:b"


def test_carriage_returns_end_lines(screen: _Screen) -> None:
    a = screen.tail("a")
    screen.write("a", "1 %\r2 %\r")
    a.advance(now=0.0)
    assert screen.shown == "[a]:1 %\n"
    a.finish(now=1.0)
    assert screen.shown == "[a]:1 %\n[a]:2 %\n"


def test_filter_keeps_what_matches(screen: _Screen) -> None:
    a = screen.tail("a", keep="loss")
    screen.write("a", "loss 1\nnoise\nloss 2\nno")
    a.advance(now=0.0)
    a.show_partial(now=1.0)
    a.finish(now=2.0)
    assert screen.shown == "[a]:loss 1\n[a]:loss 2\n"


def test_raw_passes_bytes_on(screen: _Screen) -> None:
    a = screen.tail("a", raw=True)
    screen.write("a", "x\r\ny")
    a.advance(now=0.0)
    assert screen.path.read_bytes() == b"x\r\ny"


@pytest.mark.parametrize("before", ["one\n", "one\ntw", ""])
def test_the_next_agent_goes_on_where_the_last_one_was(screen: _Screen, before: str) -> None:
    a = screen.tail("a")
    screen.write("a", before)
    a.advance(now=0.0)
    del a  # killed: nothing was closed or flushed
    rest = "one\ntwo\nthree\n"[len(before) :]
    screen.write("a", rest)
    screen.tail("a").advance(now=1.0)
    assert screen.shown == "[a]:one\n[a]:two\n[a]:three\n"


def test_long_output_is_shown_whole(screen: _Screen) -> None:
    lines = [f"{i} {'x' * 1000}" for i in range(1000)]  # four times the chunk
    screen.write("a", "\n".join(lines) + "\n")
    screen.tail("a").advance(now=0.0)
    assert screen.shown == "".join(f"[a]:{line}\n" for line in lines)


def test_tee_follows_files_and_tells_when_to_look_again(screen: _Screen) -> None:
    tee = LogTee()
    try:
        tail = screen.tail("a")
        tail.close()
        tee.follow([tail])
        assert tee.timeout() is None
        screen.write("a", "one\ntw")
        tee.on_readable()
        assert screen.shown == "[a]:one\n"
        waits = tee.timeout()
        assert waits is not None
        assert waits <= PARTIAL_DELAY
        tee.finish()
        assert screen.shown == "[a]:one\n[a]:tw"
        assert tee.timeout() is None
    finally:
        tee.close()


# -- processes -----------------------------------------------------------------------------------


def _rows(*rows: tuple[int, int, int, str]) -> list[Seen]:
    return [Seen(pid, parent, session, tag, False) for pid, parent, session, tag in rows]


@pytest.mark.parametrize(
    ("rows", "roots", "keep", "expected"),
    [
        pytest.param([(10, 1, 10, "x")], [], [], {10}, id="by its tag"),
        pytest.param([(10, 1, 10, "y")], [], [], set(), id="another tag"),
        pytest.param([(10, 1, 10, "")], [], [], set(), id="no tag"),
        pytest.param([(10, 1, 10, "x"), (11, 10, 11, "")], [], [], {10, 11}, id="a child"),
        pytest.param([(10, 1, 10, "x"), (12, 1, 10, "")], [], [], {10, 12}, id="its session"),
        pytest.param([(12, 1, 10, "")], [10], [], {12}, id="session of one that has ended"),
        pytest.param(
            [(10, 1, 10, "x"), (11, 10, 11, ""), (12, 11, 12, "")], [], [], {10, 11, 12},
            id="grandchild",
        ),
        pytest.param([(10, 1, 10, "x"), (11, 10, 11, "y")], [], [], {10, 11}, id="nested job"),
        pytest.param([(10, 1, 10, "x")], [], [10], set(), id="kept"),
        pytest.param(
            [(10, 1, 10, "x"), (11, 10, 11, "x"), (12, 11, 12, "")], [], [10], {11, 12},
            id="child of one that is kept",
        ),
        pytest.param([(10, 1, 10, "x"), (11, 10, 11, "")], [], [10], set(), id="only through it"),
    ],
)  # fmt: skip
def test_belonging(
    rows: list[tuple[int, int, int, str]], roots: list[int], keep: list[int], expected: set[int]
) -> None:
    assert belonging(_rows(*rows), lambda tag: tag == "x", roots, keep) == expected


def test_zombies_do_not_belong() -> None:
    rows = [Seen(10, 1, 10, "x", True), *_rows((11, 10, 10, "x"))]
    assert belonging(rows, lambda tag: tag == "x", [], []) == {11}


def test_what_cannot_be_killed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL that has no effect: the sweep ends at its deadline and names the process."""
    mine = os.getpid()
    monkeypatch.setattr(process_tree, "kill", lambda pids: None)
    monkeypatch.setattr(process_tree, "table", lambda: _rows((mine, 1, mine, "x")))
    assert process_tree.sweep(lambda tag: tag == "x", [], patience=0.05) == {mine}
    assert process_tree.wait_until_gone([mine], time.monotonic()) == {mine}


def test_who_is_gone_is_not_waited_for() -> None:
    process = psutil.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    assert process_tree.wait_until_gone([process.pid], time.monotonic() + 60) == set()
    process_tree.kill([process.pid])  # no error


def test_tags() -> None:
    tag = f"{'0123456789abcdef'}:{'-' * 8}:{'-' * 4}"
    agent = tags.with_role(tag, "agent")
    rank = tags.with_role(agent, "12", "3")
    assert len(tag) == len(agent) == len(rank)
    assert rank == "0123456789abcdef:12------:3---"
    assert [tags.role_of(t) for t in (tag, agent, rank, "")] == ["", "agent", "12", ""]
    assert {tags.job_of(t) for t in (tag, agent, rank)} == {"0123456789abcdef"}
    assert [tags.is_helper(t) for t in (tag, agent, rank, "")] == [False, True, False, False]
    assert len(tags.with_role(tag, "a long role", "123456")) == len(tag)


@pytest.mark.parametrize(
    ("names", "ignored", "stop", "forward"),
    [
        ("SIGTERM,SIGINT", [], {15, 2}, {10, 12}),
        ("SIGTERM, SIGUSR1", [], {15, 10}, {12}),
        ("SIGTERM,SIGHUP", ["SIGHUP"], {15}, {10, 12}),  # nohup
        ("SIGTERM", ["SIGUSR2"], {15}, {10}),
        ("", [], set(), {10, 12}),
    ],
)
def test_watched_signals(names: str, ignored: list[str], stop: set[int], forward: set[int]) -> None:
    handlers: dict[int, Any] = {int(n): signal.SIG_DFL for n in signal.valid_signals()}
    handlers |= {int(getattr(signal, name)): signal.SIG_IGN for name in ignored}
    assert watched_signals(names, handlers) == (stop, forward)


def test_wire_keeps_messages_apart_and_tells_the_end() -> None:
    one, other = pair()
    one.send({"a": 1})
    one.send({"a": 2})
    assert other.receive(wait=False) == {"a": 1}
    assert other.receive() == {"a": 2}
    assert other.receive(wait=False) is None
    assert not other.closed
    one.send({"last": "words"})
    one.close()
    assert other.receive(wait=False) == {"last": "words"}
    assert other.receive() is None
    assert other.closed
    assert other.send({}) is False
    with pytest.raises(ValueError, match="too large"):
        pair()[0].send({"op": "x", "text": "y" * 200_000})
    other.close()


# -- torch_gate and eligibility --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("OMP_NUM_THREADS", True),
        ("MKL_DEBUG_CPU_TYPE", True),
        ("TORCH_LOGS", True),
        ("TORCHINDUCTOR_CACHE_DIR", True),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", True),
        ("TORCH_NCCL_BLOCKING_WAIT", False),
        ("PYTORCH_CUDA_ALLOC_CONF", False),
        ("TORCHELASTIC_RUN_ID", False),
        ("NCCL_DEBUG", False),
        ("HOME", False),
    ],
)
def test_is_load_time(name: str, expected: bool) -> None:
    assert is_load_time(name) is expected


def test_changed_load_time_variables() -> None:
    before = {"OMP_NUM_THREADS": "1", "MKL_X": "a", "HOME": "/"}
    now = {"OMP_NUM_THREADS": "4", "MKL_X": "a", "HOME": "/root", "TORCH_LOGS": "dynamo"}
    assert changed_load_time_variables(before, now) == {
        "OMP_NUM_THREADS": ("1", "4"),
        "TORCH_LOGS": (None, "dynamo"),
    }
    assert changed_load_time_variables(now, {}) == {
        "OMP_NUM_THREADS": ("4", None),
        "MKL_X": ("a", None),
        "TORCH_LOGS": ("dynamo", None),
    }


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, 7), ("", 7), ("3", 3), ("4,2", 4), (" 5 ", 5), ("0", 7), ("-1", 7), ("many", 7)],
)
def test_omp_threads(value: str | None, expected: int) -> None:
    assert omp_threads(value, default=7) == expected


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import torch", set()),
        ("import os; os.environ['MKL_NUM_THREADS'] = '1'", {"MKL_NUM_THREADS"}),
        ("os.environ.update({'TORCH_LOGS': 'x', 'HOME': 'y'})", {"TORCH_LOGS"}),
        ("# os.environ['MKL_NUM_THREADS']", set()),
        ("def broken(:", set()),
        ("x = b'MKL_NUM_THREADS'", set()),
    ],
)
def test_variables_set_by(source: str, names: set[str]) -> None:
    assert variables_set_by(source) == names


def test_shadowed(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").touch()
    (tmp_path / "random.py").touch()
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "folder").mkdir()
    folder = str(tmp_path)
    assert shadowed(folder, {"numpy", "random"}, {"random"}) == "numpy"
    assert shadowed(folder, {"random"}, {"random"}) is None  # loaded before sys.path[0] counts
    assert shadowed(folder, {"package"}, set()) == "package"
    assert shadowed(folder, {"folder"}, set()) is None  # no package of its own
    assert shadowed(str(tmp_path / "absent"), {"numpy"}, set()) is None


def _job(target: str, **changes: Any) -> Any:
    fields = {
        "kind": "script",
        "target": target,
        "python": sys.executable,
        "args": (),
        "settings": SimpleNamespace(zygote=True),
    }
    return SimpleNamespace(**{**fields, **changes})


@pytest.mark.parametrize(
    ("source", "changes", "expected"),
    [
        ("import torch", {}, None),
        ("", {"kind": "program"}, "--no-python"),
        ("", {"settings": SimpleNamespace(zygote=False)}, "--no-zygote"),
        ("", {"python": "/usr/bin/other"}, "PYTHON_EXEC"),
        ("import os; os.environ['MKL_X'] = '1'", {}, "MKL_X"),
        ("import os; os.environ['OMP_NUM_THREADS'] = '1'", {}, None),  # applied later
        ("import os; os.environ['TORCH_LOGS'] = 'x'", {}, None),
    ],
)
def test_reason_for_plain(
    tmp_path: Path, source: str, changes: dict[str, Any], expected: str | None
) -> None:
    script = tmp_path / "train.py"
    script.write_text(source)
    reason = reason_for_plain(_job(str(script), **changes), {"torch"}, set(), {})
    assert reason is None if expected is None else expected in str(reason)


def test_a_module_beside_the_script_that_hides_a_loaded_one(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    (tmp_path / "yaml.py").touch()
    job = _job(str(script))
    assert "yaml" in str(reason_for_plain(job, {"yaml"}, set(), {}))
    assert reason_for_plain(job, {"yaml"}, set(), {"PYTHONSAFEPATH": "1"}) is None


# -- environment of the workers --------------------------------------------------------------------


def _table() -> RankTable:
    nodes = assign_ranks([Seat("n0", 2, "trainer", "a"), Seat("n1", 3, "trainer", "b")])
    return RankTable(1, 4, 9, "run", 5, "addr", 1234, True, nodes)


def _launch(**changes: Any) -> Any:
    fields = {"virtual_local_rank": False, "signals_to_handle": "SIGTERM", "role": "trainer"}
    return SimpleNamespace(launch=SimpleNamespace(**{**fields, **changes}))


def test_worker_environment() -> None:
    table = _table()
    node = table.of("n1")
    assert node is not None
    env = worker_env.worker_environment(_launch(), table, node, 2, {"OMP_NUM_THREADS": "1"})
    expected = {
        "RANK": "4", "LOCAL_RANK": "2", "GROUP_RANK": "1", "ROLE_RANK": "4",
        "ROLE_NAME": "trainer", "LOCAL_WORLD_SIZE": "3", "WORLD_SIZE": "5",
        "GROUP_WORLD_SIZE": "2", "ROLE_WORLD_SIZE": "5", "MASTER_ADDR": "addr",
        "MASTER_PORT": "1234", "TORCHELASTIC_RESTART_COUNT": "4", "TORCHELASTIC_MAX_RESTARTS": "9",
        "TORCHELASTIC_RUN_ID": "run", "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    assert env == expected


@pytest.mark.parametrize(
    ("visible", "rank", "expected"),
    [
        (None, 1, {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "1"}),
        ("5, 7", 1, {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "7"}),
        ("GPU-a,GPU-b", 0, {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "GPU-a"}),
    ],
)
def test_virtual_local_rank(visible: str | None, rank: int, expected: dict[str, str]) -> None:
    table = _table()
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    job = _launch(virtual_local_rank=True)
    env = worker_env.worker_environment(job, table, table.nodes[0], rank, environ)
    assert {name: env[name] for name in expected} == expected


def test_virtual_local_rank_without_a_device() -> None:
    table = _table()
    job = _launch(virtual_local_rank=True)
    with pytest.raises(ValueError, match="local rank 2 has no entry in CUDA_VISIBLE_DEVICES=0,1"):
        worker_env.worker_environment(
            job, table, table.nodes[1], 2, {"CUDA_VISIBLE_DEVICES": "0,1"}
        )


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (None, "[r1]:"),
        ("", "[r1]:"),
        ("${role_name}/${rank}/${local_rank}> ", "r/5/1> "),
        ("${unknown} ", "${unknown} "),
    ],
)
def test_line_prefix(template: str | None, expected: str) -> None:
    assert worker_env.line_prefix(template, "r", 5, 1) == expected


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("script", ["py", "-u", "t", "--rank", "3", "${other}"]),
        ("module", ["py", "-u", "-m", "t", "--rank", "3", "${other}"]),
        ("program", ["t", "--rank", "3", "${other}"]),
    ],
)
def test_worker_command(kind: str, expected: list[str]) -> None:
    job = _job("t", kind=kind, python="py", args=("--rank", "${local_rank}", "${other}"))
    assert worker_env.worker_command(job, 3) == expected


# -- failures --------------------------------------------------------------------------------------


def _failure(rank: int, **changes: Any) -> dict[str, Any]:
    failure = describe_failure(
        rank=rank, local_rank=rank, pid=100 + rank, exitcode=1, error_file="", host="node",
        facts={}, tail=[],
    )  # fmt: skip
    return {**failure, **changes}


def test_first_failure_is_by_the_error_files_time_and_then_as_seen() -> None:
    early = _failure(3, timestamp=5, seen=2.0)
    assert first_failure([_failure(1, timestamp=6, seen=1.0), early]) is early
    same = _failure(2, timestamp=5, seen=1.5)
    assert first_failure([early, same]) is same


def test_report_names_the_first_and_shows_its_last_lines() -> None:
    failures = [
        _failure(1, timestamp=5, seen=1.0, tail=["the reason"], host="far"),
        _failure(0, timestamp=5, seen=2.0, tail=["another"], host="near"),
    ]
    text = report("train.py", failures)
    assert "train.py FAILED" in text
    root = text[text.index("Root Cause") :]
    assert "rank      : 1 (local_rank: 1)" in root
    assert "host      : far" in root
    assert "host      : near" in text
    assert root.endswith("Last lines of standard error of rank 1 (failed first):\n  the reason\n")
    assert "another" not in text
    # torch's note on how to get a traceback, not for the rank whose last lines are there
    assert "traceback : see the last lines of its standard error, below" in root
    assert text.count("To enable traceback see") == 1
    assert "To enable traceback see" in report("t", [_failure(0)])


def test_report_of_a_recorded_error_shows_that_only() -> None:
    message = {"message": "E: x", "extraInfo": {"py_callstack": "trace", "timestamp": "5"}}
    text = report("t", [_failure(0, message=message, tail=["noise"])])
    assert "E: x" in text or "trace" in text
    assert "noise" not in text


def test_failure_is_json() -> None:
    failure = _failure(0)
    assert json.loads(json.dumps(failure)) == failure
    assert failure["formed_group"]  # nothing is known, so a restart may help
    facts = {"digest": "d", "formed_group": False}
    known = describe_failure(
        rank=0, local_rank=0, pid=1, exitcode=1, error_file="", host="h", facts=facts, tail=[]
    )
    assert not known["formed_group"]
    assert known["error_digest"] == "d"


@pytest.mark.parametrize("size", [1, 100, 16 << 10, (16 << 10) + 1, 100_000])
def test_ring_keeps_the_last_bytes(tmp_path: Path, size: int) -> None:
    """Written by a process of its own in pieces of all sizes, as prints are."""
    path = tmp_path / "ring"
    text = "".join(f"{i}\n" for i in range(size))[:size]
    code = (
        "import sys\n"
        "from flashrun.node import stderr_tail\n"
        f"stderr_tail.install({str(path)!r})\n"
        "text = sys.stdin.read()\n"
        "at, piece = 0, 1\n"
        "while at < len(text):\n"
        "    sys.stderr.write(text[at : at + piece])\n"
        "    at, piece = at + piece, piece * 3 % 5003\n"
        "import os; os._exit(1)\n"
    )
    process = psutil.Popen(
        [sys.executable, "-c", code], stdin=-1, stderr=-1, text=True, cwd=os.getcwd()
    )
    _, shown = process.communicate(text)
    assert shown == text
    assert stderr_tail.read(str(path)) == text[-(16 << 10) :]


def test_ring_that_is_not_there(tmp_path: Path) -> None:
    assert stderr_tail.read(str(tmp_path / "absent")) == ""
    (tmp_path / "short").write_bytes(b"x")
    assert stderr_tail.read(str(tmp_path / "short")) == ""


def test_last_lines() -> None:
    assert stderr_tail.last_lines("a\n\n  \nb  \nc\n", 2) == ["b", "c"]
    assert stderr_tail.last_lines("", 5) == []


def test_last_lines_have_a_progress_bar_once() -> None:
    bar = "\r 0%|  | 0/2\r50%|# | 1/2\r100%|##| 2/2 \r"
    text = f"before\r\n{bar}\n{bar}Traceback:\nthe reason"
    wanted = ["before", "100%|##| 2/2", "Traceback:", "the reason"]
    assert stderr_tail.last_lines(text, 5) == wanted


def test_what_was_passed_on_does_not_stay_on_the_disk(tmp_path: Path) -> None:
    """Of a relayed standard error, which may go on for weeks; its end stays for the report."""
    text = b"".join(b"line %d\n" % i for i in range(400_000))
    (tmp_path / "stderr").write_bytes(text)
    with open(tmp_path / "shown", "wb") as shown:
        tail = Tail(str(tmp_path / "stderr"), b"", Sink(shown.fileno()), lambda line: True, "",
                    raw=True)  # fmt: skip
        tail.open()
        tail.finish(0.0)
        tail.close()
    assert (tmp_path / "shown").read_bytes() == text
    left = (tmp_path / "stderr").stat()
    assert left.st_size == len(text)
    assert left.st_blocks * 512 < len(text) / 2
    assert (tmp_path / "stderr").read_bytes()[-(16 << 10) :] == text[-(16 << 10) :]


@pytest.mark.parametrize("written", ["", "the reason"])
def test_a_temporary_log_folder_goes_with_the_run_folder(tmp_path: Path, written: str) -> None:
    """Whoever removes that; not where there is something to read."""
    logs = tmp_path / "torchelastic_x"
    (logs / "attempt_0").mkdir(parents=True)
    (logs / "attempt_0" / "stderr.log").write_text(written)
    folder, mark = run_folder.make(str(logs))
    run_folder.remove(folder)
    os.close(mark)
    assert logs.exists() == bool(written)
    assert not os.path.exists(folder)
