"""Runs one row under one launcher and observes everything that is compared.

What is observed is one flat mapping from a dotted key to a plain value, with what differs from
run to run (ports, process ids, temporary names, times) replaced by a word in angle brackets.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import sys
import zipfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests import helpers
from tests.conformance.differences import FILTERED
from tests.conformance.rows import Row

SCRIPTS = Path(__file__).parent / "scripts"
Observed = dict[str, Any]
TIMEOUT = 60.0  # s for one launcher; the slowest row takes about 8 s on two busy cores


def _inherited() -> None:
    os.umask(0o027)
    os.nice(3)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, 1024))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    os.dup2(os.open("/dev/null", os.O_RDONLY), 33, inheritable=True)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


PREPARATIONS: dict[str, Callable[[], object]] = {
    "inherited": _inherited,
    "ignore_sighup": lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    "close_stdin": lambda: os.close(0),
}

_PLUGIN = """
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
class Mine(DefaultLogsSpecs):
    def __init__(self, log_dir=None, redirects=Std.NONE, tee=Std.NONE, local_ranks_filter=None):
        super().__init__(log_dir, Std.ALL, {0: Std.OUT}, local_ranks_filter)
"""


def prepare(work: Path) -> None:
    """Lay out the scripts of all rows in ``work``."""
    probe = (SCRIPTS / "probe.py").read_text()
    relative = probe.replace(
        "import atexit", "from . import sibling\nprint(sibling.__name__)\nimport atexit", 1
    )
    steps = (SCRIPTS / "torch_steps.py").read_text().partition('"""\n')[2]
    files = {
        "probe.py": probe,
        "torch_probe.py": probe.replace("TORCH_STEPS = {}\n", steps),
        "sub/real.py": probe,
        "grüße 2.py": probe,
        "noext": probe,
        "app/__main__.py": probe,
        "pkg/__init__.py": "",
        "pkg/sibling.py": "",
        "pkg/__main__.py": relative,
        "pkg/mod.py": relative,
        "run.sh": f'#!/bin/sh\necho "shell $# $1 $2"\nexec {sys.executable} probe.py "$@"\n',
        "executable.py": f"#!{sys.executable}\n{probe}",
        "mypython": f'#!/bin/sh\nexport MY_PYTHON=yes\nexec {sys.executable} "$@"\n',
        "plugin/mine_specs.py": _PLUGIN,
        "plugin/mine_specs-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: mine-specs\n"
        "Version: 1.0\n",
        "plugin/mine_specs-1.0.dist-info/entry_points.txt": "[torchrun.logs_specs]\n"
        "mine = mine_specs:Mine\n",
    }
    for name, text in files.items():
        path = work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name in ("run.sh", "executable.py", "mypython"):
        (work / name).chmod(0o755)
    (work / "link.py").symlink_to("sub/real.py")
    with zipfile.ZipFile(work / "app.zip", "w") as archive:
        archive.writestr("__main__.py", probe)


@dataclass(frozen=True)
class Place:
    """The folders and the port of one run; every run has its own."""

    base: Path
    port: int

    @property
    def work(self) -> Path:
        return self.base / "work"

    @property
    def out(self) -> Path:
        return self.base / "out"

    def fill(self, text: str) -> str:
        for name, value in (
            ("{work}", self.work), ("{out}", self.out),
            ("{logs}", self.base / "logs"), ("{port}", self.port),
        ):  # fmt: skip
            text = text.replace(name, str(value))
        return text


def observe(row: Row, name: str, base: Path) -> Observed:
    """Run ``row`` under the launcher ``name`` with everything below ``base``; what was seen."""
    place = Place(base, helpers.free_port())
    for folder in ("work", "out", "tmp"):
        (base / folder).mkdir(parents=True)
    prepare(place.work)
    env = helpers.clean_environment({k: place.fill(v) for k, v in row.env.items()})
    env.update(PROBE_OUT=str(place.out), PROBE_DO=row.do, TMPDIR=str(base / "tmp"), LANG="C.UTF-8")
    if "LC_ALL" not in row.env:
        env.pop("LC_ALL", None)
    script = [place.fill(word) for word in (row.script, *row.script_args)]
    finished = []
    with ExitStack() as stack:
        agents = []
        for extra in row.agents:
            arguments = [place.fill(word) for word in (*row.args, *extra)]
            command = [*helpers.launcher(name), *arguments, *script]
            if row.closed_stdout:
                shell = '"$@" | true; exit "${PIPESTATUS[0]}"'
                command = ["/bin/bash", "-c", shell, "bash", *command]
            agents.append(stack.enter_context(helpers.start(
                command, env=env, cwd=place.work / row.cwd, stdin=row.stdin,
                preexec=PREPARATIONS.get(row.preexec))))  # fmt: skip
        if row.signal:
            helpers.wait_until(
                lambda: (
                    sum(map(_sleeps, place.out.glob("ready.*"))) >= row.ready
                    or agents[0].process.poll() is not None
                ),
                f"{row.ready} files ready.* of sleeping probes of {row.name} under {name}",
            )
            agents[0].signal(getattr(signal, row.signal))
        finished = [agent.wait(TIMEOUT) for agent in agents]
        tree = [process for agent in agents for process in agent.tree()]
        left = sorted(" ".join(process.cmdline())[:80] for process in tree)
        helpers.kill_all(tree)
    observed = _collect(finished, place, row)
    observed["left_running"] = left
    observed["raw"] = "\n".join(f.describe() for f in finished)  # for the message, not compared
    shutil.rmtree(base)
    return observed


def _sleeps(mark: Path) -> bool:
    """Whether the probe that has made it has come to where it waits: a signal that meets it before
    gives another traceback."""
    try:
        return psutil.Process(int(mark.read_text())).status() == psutil.STATUS_SLEEPING
    except psutil.NoSuchProcess:
        return False


# -- from what was seen to what is compared ---------------------------------------------------

_REPORT = re.compile(r"^={4,60}\n(?P<body>.*? FAILED\n.*?)\n={4,60}$", re.S | re.M)
_FAILURE = re.compile(
    r"\[\d+\]:\n  time      : (?P<time>.*)\n  host      : (?P<host>.*)\n"
    r"  rank      : (?P<rank>\d+) \(local_rank: (?P<local_rank>\d+)\)\n"
    r"  exitcode  : (?P<exitcode>-?\d+) \(pid: \d+\) ?(?P<signal>.*)\n"
    r"  error_file: (?P<error_file>.*)\n  traceback : (?P<traceback>(?:.|\n)*?)"
    r"(?=\n\[\d+\]:|\n-{4,}|\Z)"
)


def normaliser(place: Place) -> Callable[[str], str]:
    """Replaces what differs from run to run."""
    rules = [
        (re.escape(str(place.base)), "<BASE>"),
        (r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", "<UUID>"),
        (r"(?<=/logs/)([^/]*)_[a-z0-9_]{8}(?=/|$)", r"\1_<RANDOM>"),
        (r"torchelastic_[a-z0-9_]{8}/([^/ ]*)_[a-z0-9_]{8}", r"torchelastic_<RANDOM>/\1_<RANDOM>"),
        (r"\b[Pp][Ii][Dd]:? \d+", "<PID>"),
        (rf"\b{place.port}\b", "<PORT>"),
    ]

    def normalise(text: str) -> str:
        for pattern, word in rules:
            text = re.sub(pattern, word, text)
        return text

    return normalise


def _deep(value: Any, normalise: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return normalise(value)
    if isinstance(value, list):
        return [_deep(item, normalise) for item in value]
    if isinstance(value, dict):
        return {key: _deep(item, normalise) for key, item in value.items()}
    return value


def _flat(prefix: str, value: Any, into: Observed) -> None:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            _flat(f"{prefix}.{key}", item, into)
    else:
        into[prefix] = value


def report(text: str, normalise: Callable[[str], str]) -> dict[str, Any]:
    match = _REPORT.search(text)
    if not match:
        return {}
    body = match["body"]
    title, _, rest = body.partition("\n")
    others, _, root = rest.partition("Root Cause (first observed failure):\n")
    wanted = ("local_rank", "exitcode", "signal", "error_file", "traceback", "host")

    def failures(part: str) -> dict[str, Any]:
        return {
            m["rank"]: {w: normalise(m[w].strip()) for w in wanted}
            for m in _FAILURE.finditer(part)
        }

    found = {"title": normalise(title), "root": failures(root), "others": failures(others)}
    if not found["root"]:
        raise ValueError(f"a report that this cannot read:\n{body}")
    return found


def is_launcher_line(line: str) -> bool:
    """Whether ``line`` is from the launcher itself: its log, its events."""
    return any(re.fullmatch(f.lines, line) for f in FILTERED if f.lines)


def worker_text(text: str) -> str:
    """What is left of the launcher's stderr without the launcher's own lines."""
    for filtered in FILTERED:
        if filtered.block:
            text = re.sub(filtered.block, "", text, flags=re.M)
    text = _REPORT.sub("", text)  # compared by itself
    return "\n".join(line for line in text.split("\n") if not is_launcher_line(line))


def _lines(text: str, normalise: Callable[[str], str]) -> list[str]:
    """The lines that are not the launcher's own, in no order (ranks write side by side)."""
    return sorted(normalise(line) for line in worker_text(text).split("\n") if line.strip())


def _events(text: str) -> list[str]:
    found = []
    for line in text.split("\n"):
        if not (line.startswith("{") and '"source"' in line):
            continue
        event = json.loads(line)
        metadata = event["metadata"]
        wanted = ("run_id", "global_rank", "group_rank", "role", "state", "rdzv_backend",
                  "agent_restarts", "group_world_size", "entry_point")  # fmt: skip
        summary = {key: metadata.get(key) for key in wanted}
        summary["run_id"] = bool(summary["run_id"])
        details = json.loads(metadata["metadata"])
        summary["entry_point"] = details["entry_point"]
        summary["group_world_size"] = details["group_world_size"]
        summary["exit_code"] = details.get("exit_code")
        found.append(json.dumps([event["name"], event["source"], summary], sort_keys=True))
    return sorted(found)


def _error_file(text: str, normalise: Callable[[str], str]) -> Any:
    data = json.loads(text)
    message = data.get("message")
    if isinstance(message, dict) and "extraInfo" in message:
        message["extraInfo"]["timestamp"] = "<TIME>"
    return _deep(data, normalise)


def _files(folder: Path, normalise: Callable[[str], str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = normalise(f"/logs/{path.relative_to(folder)}")
        if path.is_dir():
            found[name + "/"] = "folder"
        elif path.suffix == ".json":
            found[name] = _error_file(path.read_text(), normalise)
        else:
            text = path.read_bytes().decode(errors="backslashreplace")
            ordered = normalise(text).split("\n")
            # A rank's own file keeps its order; a file of all ranks has none.
            found[name] = sorted(ordered) if "filtered" in path.name else ordered
    return found


def _dump(data: dict[str, Any], place: Place, row: Row) -> dict[str, Any]:
    for key in ("env", "child_env"):
        for name in (
            helpers.RUN_VARIABLE, helpers.SESSION_VARIABLE, "PYTEST_CURRENT_TEST",
            "_",  # the shell's word for the launcher
        ):  # fmt: skip
            data[key].pop(name, None)
        fixed = data[key].get("MASTER_PORT") in (str(place.port), row.env.get("MASTER_PORT"))
        if "MASTER_PORT" in data[key] and not fixed:
            data[key]["MASTER_PORT"] = "<FREE PORT>"
    # Only what differs from os.environ is worth a line.
    child, env = data.pop("child_env"), data["env"]
    data["child_env_differs"] = sorted(
        k for k in child.keys() | env.keys()
        if child.get(k) != env.get(k) and k not in ("_", "SHLVL", "PWD", "OLDPWD")
    )  # fmt: skip
    return data


def _collect(finished: list[helpers.Finished], place: Place, row: Row) -> Observed:
    normalise = normaliser(place)
    stderr = "".join(f.stderr for f in finished)
    stdout = "".join(f.stdout for f in finished)
    observed: Observed = {
        "status": sorted(f.status for f in finished),
        "stdout": _lines(stdout, normalise),
        "stderr": _lines(stderr, normalise),
        "events": _events(stderr),
    }
    _flat("report", report(stderr, normalise), observed)
    for path in sorted(place.out.iterdir()):
        if path.name.startswith("rank") and path.suffix == ".json":
            dump = _deep(_dump(json.loads(path.read_text()), place, row), normalise)
            _flat(path.stem, dump, observed)
        elif path.name == "parent.json":
            observed["parent_error_file"] = _error_file(path.read_text(), normalise)
    _flat("logs", _files(place.base / "logs", normalise), observed)
    temporary = (place.base / "tmp").iterdir()
    observed["tmp"] = sorted({re.split("_|-[a-z0-9_]{8}[.]", path.name)[0] for path in temporary})
    return observed


def compare(expected: Mapping[str, Any], got: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The keys whose values differ, with both values (None where absent)."""
    keys = (expected.keys() | got.keys()) - {"raw"}
    return {
        key: (expected.get(key), got.get(key))
        for key in sorted(keys)
        if expected.get(key) != got.get(key)
    }
