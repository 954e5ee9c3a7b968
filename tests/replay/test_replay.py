"""A worker is killed at a random moment; its replay must have what the undisturbed run has.

For each script: an undisturbed run dumps the script's Python values, small tensors, schedulers and
random states at every boundary. A recorded run is killed with SIGKILL. A third process replays to
the target, where everything is compared bitwise; then it takes the undisturbed run's state of that
boundary, goes on for real, and must end with the same values and weights.
"""

from __future__ import annotations

import os
import pickle
import random
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow  # minutes; `scripts/test -m slow` runs them

HERE = Path(__file__).parent
DRIVER = HERE / "driver.py"
SCRIPTS = HERE / "scripts"
TIMEOUT = 240


def launch(
    action: str,
    run_dir: Path,
    script: str,
    cwd: Path,
    *arguments: object,
    dumps: Path | None = None,
):
    return subprocess.run(
        [
            sys.executable,
            str(DRIVER),
            action,
            str(run_dir),
            str(SCRIPTS / f"{script}.py"),
            *map(str, arguments),
        ],
        cwd=cwd,
        env={
            **os.environ,
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(dumps or run_dir),
            "REPLAY_DUMPS": str(dumps or run_dir),
        },
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


def flat(value, path=""):
    if isinstance(value, torch.Tensor):
        return {path: value.numpy().tobytes()}
    if isinstance(value, dict):
        return {k: v for key, m in value.items() for k, v in flat(m, f"{path}/{key}").items()}
    if isinstance(value, (list, tuple)):
        return {k: v for i, m in enumerate(value) for k, v in flat(m, f"{path}/{i}").items()}
    return {path: repr(value)}


@pytest.fixture
def place():
    base = "/dev/shm" if os.path.isdir("/dev/shm") else None
    folder = Path(tempfile.mkdtemp(prefix="flashrun-test-", dir=base))
    yield folder
    shutil.rmtree(folder)


def prepare(script: str, cwd: Path) -> None:
    cwd.mkdir()
    if script == "resumed":
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(4, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1)
        )
        torch.save({"model": model.state_dict(), "lr": 0.01, "step": 100}, cwd / "old.pt")
        (cwd / "config.txt").write_text("as it was")
        (cwd / "log.csv").write_text("step,loss\n")


def reference(script: str, place: Path) -> dict:
    cwd = place / "reference"
    prepare(script, cwd)
    (place / "ref").mkdir()
    result = launch("reference", place / "ref", script, cwd)
    assert result.returncode == 0, result.stderr
    return pickle.loads((place / "ref" / "reference.dump").read_bytes())  # noqa: S301


def record(script: str, place: Path, kill_at: int, microseconds: int, name: str = "run") -> None:
    (place / name).mkdir()
    prepare(script, place / f"cwd-{name}")
    result = launch(
        "record", place / name, script, place / f"cwd-{name}", kill_at, microseconds
    )
    assert result.returncode == -9, f"not killed: {result.returncode}\n{result.stderr}"


def catch_up(script: str, place: Path, target: int, name: str = "run"):
    return launch(
        "catchup",
        place / name,
        script,
        place / f"cwd-{name}",
        target,
        place / "ref" / "reference.dump",
    )


def catch_up_from(script: str, place: Path, target: int, dump: Path, *kill: int):
    return launch("catchup", place / "run", script, place / "cwd-run", target, dump, *kill)


def check(place: Path, wanted: dict, name: str = "run") -> dict:
    got = pickle.loads((place / name / "catchup.dump").read_bytes())  # noqa: S301
    assert got["events"] == []
    assert got["boundaries"] == wanted["boundaries"]
    assert repr(got["final"]["values"]) == repr(wanted["final"]["values"])
    assert got["final"]["random"] == wanted["final"]["random"]
    assert flat(got["final"]["state"]) == flat(wanted["final"]["state"])
    return got


ALL = [
    "plain_loop",
    "while_loop",
    "permutation",
    "early_stopping",
    "trainer",
    "resumed",
    "scaler",
    "augmentation",
    "workers",
    "iterable",
    "gan",
    "warmup_reset",
    "counting_module",
]


@pytest.mark.parametrize("script", ALL)
def test_killed_at_a_random_moment(script: str, place: Path) -> None:
    seed = int(os.environ.get("FLASHRUN_TEST_SEED", random.SystemRandom().randrange(1 << 30)))
    print(f"FLASHRUN_TEST_SEED={seed}")
    rng = random.Random(f"{script} {seed}")
    wanted = reference(script, place)
    boundaries = wanted["boundaries"]
    kill_at = rng.randrange(3, boundaries - 4)
    record(script, place, kill_at, rng.randrange(5000))
    target = max(1, kill_at - rng.randrange(2))
    print(f"killed in interval {kill_at}, replayed to {target} of {boundaries}")
    result = catch_up(script, place, target)
    assert result.returncode == 0, f"{result.stdout[-2000:]}\n{result.stderr[-4000:]}"
    check(place, wanted)
    one, two = place / "reference", place / "cwd-run"
    names = {p.relative_to(one) for p in one.rglob("*")}
    assert names == {p.relative_to(two) for p in two.rglob("*")}
    for path in names:
        if (one / path).is_file():
            assert (one / path).read_bytes() == (two / path).read_bytes(), path


@pytest.mark.parametrize(
    ("script", "workers"), [("workers", "fresh"), ("workers", "stateful"), ("iterable", "1")]
)
def test_loaders_with_workers(
    script: str, workers: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another kind than in the other tests. They are run in a replay, not stood for."""
    if workers == "stateful":
        pytest.importorskip("torchdata")
    monkeypatch.setenv("REPLAY_WORKERS", workers)
    wanted = reference(script, place)
    record(script, place, 22, 700)
    result = catch_up(script, place, 22)
    assert result.returncode == 0, f"{result.stdout[-2000:]}\n{result.stderr[-4000:]}"
    check(place, wanted)


def test_a_replay_does_not_read_what_it_has_a_stand_in_for(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPLAY_UNCHECKED", "fetched")
    wanted = reference("fetches", place)
    assert wanted["boundaries"] == 60
    record("fetches", place, 50, 700)
    result = catch_up("fetches", place, 50)
    assert result.returncode == 0, f"{result.stdout[-2000:]}\n{result.stderr[-4000:]}"
    (fetched,) = re.findall(r"fetched (\d+)", result.stdout)
    real = 2 + 3 + 10  # batches: at the beginning, around the target, after it
    assert 10 * 6 <= int(fetched) <= real * 6


def test_killed_again_after_the_replay(place: Path) -> None:
    """The replacement's log goes on where the dead worker's was cut."""
    wanted = reference("while_loop", place)
    dump = place / "ref" / "reference.dump"
    record("while_loop", place, 12, 700)
    for target, kill_at in ((12, 20), (19, 33), (33, 34)):
        result = catch_up_from("while_loop", place, target, dump, kill_at, 900)
        assert result.returncode == -9, result.stdout + result.stderr
    result = catch_up_from("while_loop", place, 34, dump)
    assert result.returncode == 0, result.stdout + result.stderr
    check(place, wanted)


@pytest.mark.parametrize("script", ["plain_loop", "augmentation", "permutation"])
def test_the_dead_worker_was_one_boundary_behind(script: str, place: Path) -> None:
    """Killed in its optimizer step; the survivors are at the next boundary."""
    wanted = reference(script, place)
    record(script, place, 9, -1)
    result = catch_up(script, place, 10)
    assert result.returncode == 0, result.stdout + result.stderr
    check(place, wanted)


def test_a_read_that_nobody_knows_is_a_divergence(place: Path) -> None:
    """The log ends before GradScaler asks whether the gradients are finite."""
    reference("scaler", place)
    record("scaler", place, 9, -1)
    result = catch_up("scaler", place, 10)
    assert result.returncode == 3
    assert "log ends before the read" in result.stdout


def test_the_outside_world_and_closures(place: Path) -> None:
    """Run name, seeds from entropy, clock: as the dead worker had them; LBFGS; every door."""
    record("world", place, 21, 0)
    result = catch_up_from("world", place, 21, place / "run" / "record.dump")
    assert result.returncode == 0, result.stdout + result.stderr
    got = pickle.loads((place / "run" / "catchup.dump").read_bytes())  # noqa: S301
    assert got["events"] == []
    assert got["final"]["values"]["0.lines"] == 30
    assert len(list((place / "cwd-run" / "runs").iterdir())) == 1


def log_of(place: Path) -> Path:
    return place / "run" / "replay" / "rank0" / "log.0000"


def test_a_damaged_log_is_a_divergence(place: Path) -> None:
    reference("plain_loop", place)
    record("plain_loop", place, 20, 0)
    whole = log_of(place).read_bytes()
    used = len(whole.rstrip(b"\0"))
    rng = random.Random(4)
    for damage in ("flip", "cut", "zero"):
        content = bytearray(whole)
        at = rng.randrange(9000, used * 3 // 4)
        if damage == "flip":
            content[at] ^= 0x10
        elif damage == "cut":
            del content[at:]
        else:
            content[at:used] = bytes(used - at)
        log_of(place).write_bytes(content)
        result = catch_up("plain_loop", place, 20)
        assert result.returncode == 3, (damage, result.stdout, result.stderr)
        assert "log ends before" in result.stdout
    log_of(place).write_bytes(b"something else" + whole[14:])
    result = catch_up("plain_loop", place, 20)
    assert result.returncode == 3
    assert "not a host-read log" in result.stdout


def test_another_script_is_a_divergence(place: Path) -> None:
    reference("plain_loop", place)
    record("plain_loop", place, 20, 0)
    result = catch_up("permutation", place, 20)
    assert result.returncode == 3, result.stdout + result.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_shared_memory_full(place: Path) -> None:
    """Training goes on, with one event that says so; a replay is refused with the reason."""
    for size, script in (("500k", "plain_loop"), ("5900k", "resumed")):
        run = place / f"small-{script}"
        run.mkdir()
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(run)],
            capture_output=True,
            check=False,
        )
        if mounted.returncode:
            pytest.skip(f"no mount: {mounted.stderr!r}")
        try:
            cwd = place / f"cwd-{script}"
            prepare(script, cwd)
            if script == "resumed":  # its old content does not fit where it is to be kept
                (cwd / "config.txt").write_bytes(b"x" * 3_000_000)
            result = launch("record", run, script, cwd, 0, 0, dumps=place)
            assert result.returncode == 0, result.stderr
            got = pickle.loads((place / "record.dump").read_bytes())  # noqa: S301
            assert [e["event"] for e in got["events"]] == ["recovery-class"], got["events"]
            assert got["events"][0]["class"] == "restart-only"
            assert got["events"][0]["remedy"]
            result = launch("catchup", run, script, cwd, 5, place / "record.dump", dumps=place)
            assert result.returncode == 3
            assert "DIVERGENCE" in result.stdout
        finally:
            subprocess.run(["umount", str(run)], check=True)
