"""Values that a replay does not compute: exact, or refused with the reason. Never another value."""

from __future__ import annotations

import os
import pickle
import runpy
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch._dynamo  # what a first optimizer imports; the children have it from here
from test_replay import DRIVER, SCRIPTS, check
from test_replay import place as place

from flashrun.worker.replay import recent

torch.set_num_threads(1)  # before the forks: OpenMP does not survive them

UNCHECKED = "best again first old total hidden buffer held seen kept x y loss loss_other model"


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPLAY_UNCHECKED", UNCHECKED)


@dataclass
class Ended:
    returncode: int
    stdout: str


def launch(action: str, place: Path, *arguments: object) -> Ended:
    """The driver in a forked child, which has imported torch already."""
    run = place / ("ref" if action == "reference" else "run")
    cwd = place / ("reference" if action == "reference" else "cwd-run")
    for folder in (run, cwd):
        folder.mkdir(exist_ok=True)
    output = place / f"{action}.out"
    pid = os.fork()
    if not pid:
        status = 1
        try:
            fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(fd, 1)
            os.dup2(fd, 2)
            sys.stdout = os.fdopen(1, "w", closefd=False)
            sys.stderr = os.fdopen(2, "w", closefd=False)
            os.chdir(cwd)
            os.environ.update(TMPDIR=str(run), REPLAY_DUMPS=str(run))
            script = SCRIPTS / "unreal.py"
            sys.argv = [str(DRIVER), action, str(run), str(script), *map(str, arguments)]
            runpy.run_path(str(DRIVER), run_name="__main__")
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
            if not isinstance(end.code, int):
                print(end.code)
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return Ended(status, output.read_text())


def reference(place: Path) -> dict:
    ended = launch("reference", place)
    assert ended.returncode == 0, ended.stdout
    return pickle.loads((place / "ref" / "reference.dump").read_bytes())  # noqa: S301


def record(place: Path, kill_at: int) -> None:
    ended = launch("record", place, kill_at, -1)
    assert ended.returncode == -9, ended.stdout


def catch_up(place: Path, target: int) -> Ended:
    return launch("catchup", place, target, place / "ref" / "reference.dump")


def replay(place: Path, case: str, monkeypatch: pytest.MonkeyPatch, kill: int, target: int):
    """Kill in the optimizer's step of interval `kill`, replay to `target` and go on."""
    monkeypatch.setenv("REPLAY_CASE", case)
    wanted = reference(place)
    record(place, kill)
    return wanted, catch_up(place, target)


WAYS_OUT = {
    "unlogged_shape": "'nonzero' reads values that the replay does not compute",
    "dlpack": "__dlpack__ lets out values",
    "storage": "a storage's tolist lets out values",
    "address": "data_ptr lets out values",
    "shared": "a numpy array shares memory",
    "swallowed": "'nonzero' reads values that the replay does not compute",
    "index": "reads values that the replay does not compute",
    "running": "uses a tensor from before the step",
    "hidden": "uses a tensor from before the step",
    "metric": "uses a tensor from before the step",
}
LOGGED = (
    "shapes", "numpy", "array_index", "unused", "zeroed", "identity", "overwritten",
    "read_in_graph",
)  # fmt: skip


@pytest.fixture
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs are over the limit."""
    monkeypatch.setattr(recent, "LARGEST", 0)  # in the children as well


@pytest.mark.parametrize("target", [9, 10])
@pytest.mark.parametrize("case", [*WAYS_OUT, *LOGGED])
def test_exact(case: str, target: int, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The outputs are kept, or nothing but their logged reads and shapes matters."""
    wanted, result = replay(place, case, monkeypatch, 9, target)
    assert result.returncode == 0, result.stdout
    check(place, wanted)


@pytest.mark.parametrize("case", LOGGED)
def test_exact_without_outputs(
    case: str, place: Path, monkeypatch: pytest.MonkeyPatch, nothing_kept: None
) -> None:
    wanted, result = replay(place, case, monkeypatch, 9, 9)
    assert result.returncode == 0, result.stdout
    check(place, wanted)


@pytest.mark.parametrize(("case", "says"), list(WAYS_OUT.items()))
def test_refused_without_outputs(
    case: str,
    says: str,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    nothing_kept: None,
) -> None:
    """With the line of the script."""
    _, result = replay(place, case, monkeypatch, 9, 9)
    assert result.returncode == 3, result.stdout
    assert says in result.stdout
    assert "unreal.py:" in result.stdout


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("best", "the script keeps best['0.weight'] (and 3 more)"),
        ("best_in_memory", "the script keeps kept['best']['0.weight']"),
        ("best_in_file", "the script keeps again['0.weight']"),
        ("first_weights", "'sub' uses a tensor from before the step"),
        ("gradients", "uses a tensor from before the step"),
        ("accumulated", "gradients that are not zeroed between its steps"),
        ("attribute", "uses a tensor from before the step"),
        ("hook", "uses a tensor from before the step"),
    ],
)
def test_refused(case: str, says: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, result = replay(place, case, monkeypatch, 9, 9)
    assert result.returncode == 3, result.stdout
    assert says in result.stdout
    assert "unreal.py:" in result.stdout or case == "accumulated"


@pytest.mark.parametrize("target", [8, 9, 10])
def test_exact_or_refused(target: int, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph from before the step: its gradients would be those of stand-ins."""
    wanted, result = replay(place, "two_losses", monkeypatch, 9, target)
    if result.returncode == 3:
        assert "from before the step" in result.stdout
    else:
        assert result.returncode == 0, result.stdout
        check(place, wanted)


@pytest.mark.parametrize("at", [0, 1, 9])
def test_answers_of_the_interval_in_flight_stay(
    at: int, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the dead worker was told by the outside world, others may have been told by it."""
    monkeypatch.setenv("REPLAY_CASE", "told")
    reference(place)
    record(place, at)
    result = catch_up(place, at)
    assert result.returncode == 0, result.stdout
    lines = (place / "run" / "told").read_text().splitlines()
    for step in range(at + 1):
        told = [line for line in lines if line.startswith(f"{step} ")]
        assert len(told) == 2, lines  # the dead worker's, and the replay's or its own
        assert told[0] == told[1]
    got = pickle.loads((place / "run" / "catchup.dump").read_bytes())  # noqa: S301
    assert got["events"] == []
