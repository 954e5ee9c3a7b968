"""No room where recovery keeps what it needs: the job trains, and one line says what it cannot do
and how to change that. The small file systems are in mount namespaces of the launchers."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import helpers
from tests.jobs import Job, running, write_script
from tests.test_recovery import RANKS, TRAIN, Run, results

_CLONE_NEWNS = 0x20000
_MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x1, 0x20, 0x1000, 0x4000, 0x40000
_libc = ctypes.CDLL(None, use_errno=True)


def _mount(source: bytes, target: bytes, kind: bytes, flags: int, data: bytes) -> None:
    if _libc.mount(source, target, kind, flags, data) != 0:
        raise OSError(ctypes.get_errno(), f"mount {target!r}")


READ_ONLY = "read-only"


def _with_small(folder: Path, **sizes: str) -> Callable[[], None]:
    """For a child before exec, in a mount namespace of its own: a small tmpfs over each path, or
    the path itself for reading only (`folder` can be written nevertheless)."""

    def prepare() -> None:
        if _libc.unshare(_CLONE_NEWNS) != 0:
            raise OSError(ctypes.get_errno(), "unshare")
        _mount(b"none", b"/", b"", _MS_REC | _MS_PRIVATE, b"")
        _mount(bytes(folder), bytes(folder), b"", _MS_BIND | _MS_REC, b"")
        for path, size in sizes.items():
            if size == READ_ONLY:
                _mount(path.encode(), path.encode(), b"", _MS_BIND | _MS_REC, b"")
                _mount(b"none", path.encode(), b"", _MS_REMOUNT | _MS_BIND | _MS_RDONLY, b"")
            else:
                _mount(b"tmpfs", path.encode(), b"tmpfs", 0, f"size={size}".encode())

    return prepare


@contextmanager
def training(
    folder: Path,
    body: str,
    env: dict[str, str],
    small: Path,
    sizes: dict[str, str],
    *more: str,
) -> Iterator[Job]:
    """40 steps with one restart to spare; temporary files go to `small`. It is started in a folder
    that nobody can write to."""
    flags = [f"--nproc-per-node={RANKS}", "--max-restarts=1", *more]
    script = str(write_script(folder, body))
    set_up = ["env", "-C", "/proc", f"TMPDIR={small}"]
    command = [*set_up, *helpers.launcher("flashrun"), *flags, script, "40"]
    given = {"OUT": str(folder), **env}
    prepare = _with_small(folder, **sizes)
    with running(command, folder, given, prepare, forked=True, recovery="in-place") as job:
        yield job


@pytest.fixture
def small(tmp_path: Path) -> Path:
    folder = tmp_path / "small"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("undisturbed")
    flags = [f"--nproc-per-node={RANKS}", str(write_script(folder, TRAIN)), "40"]
    with running([*helpers.launcher("flashrun"), *flags], folder, {"OUT": str(folder)}) as job:
        assert job.ended() == 0, job.describe()
    return results(folder)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mount namespaces need root")


@needs_root
def test_no_room_for_the_log(
    tmp_path: Path, small: Path, undisturbed: dict[str, str]
) -> None:
    """A restart by torchrun's rules is left, and works."""
    with training(tmp_path, TRAIN, {}, small, {"/dev/shm": "4k", str(small): "256k"}) as job:
        run = Run(job, tmp_path)
        run.await_step(15, 1)
        run.kill(1)
        assert job.ended() == 0, job.describe()
    assert results(tmp_path) == undisturbed
    assert "recovery: restart only:" in job.err
    assert "No space left on device; make room in" in job.err
    assert "restart 1 of at most 1" in job.err


@needs_root
@pytest.mark.parametrize("needed", ["for logs", "for all", "not"])
def test_no_place_for_temporary_files(tmp_path: Path, small: Path, needed: str) -> None:
    """What needs none runs, as under torchrun; else one line names the remedy."""
    places = ["/tmp", "/var/tmp", str(small), *(["/dev/shm"] if needed == "for all" else [])]
    flags = [] if needed == "for logs" else [f"--log-dir={tmp_path / 'logs'}"]
    with training(tmp_path, "", {}, small, dict.fromkeys(places, READ_ONLY), *flags) as job:
        assert job.ended() == (0 if needed == "not" else 2), job.describe()
    if needed == "not":
        assert "are kept in shared memory" in job.err
        return
    (line,) = [line for line in job.err.splitlines() if "torch/distributed/run.py" not in line]
    assert line.startswith("flashrun: error: no ") or "No usable temporary" in line, job.err
    assert line.endswith("; set TMPDIR to a folder that can be written"), job.err


@pytest.mark.parametrize("how", ["shorter", "a byte of another"])
def test_a_damaged_log(
    tmp_path: Path, small: Path, undisturbed: dict[str, str], how: str
) -> None:
    """What a lost worker has left is not what it wrote: all are restarted, and one line says so."""
    tell = 'tell("at", place=os.environ["FLASHRUN_RUN_DIR"])'
    body = TRAIN.replace("steps = int", f"{tell}\nsteps = int")
    with training(tmp_path, body, {}, small, {}) as job:
        run = Run(job, tmp_path)
        run.await_step(15, 1)
        helpers.freeze(run.pid(1))
        (place,) = {e["place"] for e in job.told("at")}
        damaged = sorted(Path(place, "replay", "rank1").glob("log.*"))
        assert damaged
        for log in damaged:
            whole = log.read_bytes()
            end = len(whole.rstrip(b"\0"))
            middle = end // 2 if how == "shorter" else end - 2000  # some steps ago
            with log.open("r+b") as file:
                file.seek(middle)
                file.write(bytes(len(whole) - middle) if how == "shorter" else
                           bytes([whole[middle] ^ 0x10]))
        run.kill(1)
        assert job.ended() == 0, job.describe()
    assert results(tmp_path) == undisturbed
    assert "rank 1 can't be replaced in place:" in job.err
    assert "restart 1 of at most 1" in job.err


@needs_root
@pytest.mark.parametrize("room", ["none", "enough", "same file system", READ_ONLY])
def test_no_room_for_old_files(
    tmp_path: Path, small: Path, undisturbed: dict[str, str], room: str
) -> None:
    """A file that was there at the start is overwritten by the job: the old one has to be kept."""
    old = tmp_path / "old.bin"
    old.write_bytes(bytes(3 << 20))
    body = TRAIN.replace(
        'tell("step", step=step)',
        'tell("step", step=step)\n'
        '        if step == 9 and RANK == 0 and first: await_release("go")\n'
        '        if step == 10 and RANK == 0: open(os.environ["OLD"], "wb").write(b"new")',
    )
    os.mkfifo(tmp_path / "go")
    first = 'first = os.environ["FLASHRUN_INCARNATION"] == "0" and ATTEMPT == 0'
    body = body.replace("steps = int", f"{first}\nsteps = int")
    body = body.replace("steps = int", 'size = os.path.getsize(os.environ["OLD"])\nsteps = int')
    body += "\ntell('size', size=size)\n"
    sizes = {
        "none": {str(small): "1m"},
        "enough": {str(small): "16m"},
        READ_ONLY: {str(small): "16m"},
    }
    logs = f"--log-dir={tmp_path / 'logs'}"
    with training(tmp_path, body, {"OLD": str(old)}, small, sizes.get(room, {}), logs) as job:
        run = Run(job, tmp_path)
        run.await_step(9, 0)
        if room == READ_ONLY:
            inside = ["nsenter", f"--mount=/proc/{job.pid}/ns/mnt"]
            subprocess.run([*inside, "mount", "-o", "remount,ro", str(small)], check=True)
        job.release("go")
        run.await_step(20, 0)
        run.kill(0)
        assert job.ended() == 0, job.describe()
    seen = {e["size"] for e in job.events if e["what"] == "size" and e["rank"] == 0}
    assert results(tmp_path) == undisturbed
    assert ("kept in shared memory" in job.err) == (room == READ_ONLY)  # after the restart
    if room in ("none", READ_ONLY):
        assert "recovery: restart only: rank 0:" in job.err
        if room == "none":
            assert str(old) in job.err and "No space left on device" in job.err
            assert "; make room in" in job.err
        else:
            assert "Read-only file system" in job.err and " writable, or let the job" in job.err
        assert "stopping this round: it cannot go on in place, see above\n" in job.err
        assert "restart 1 of at most 1" in job.err
    else:
        assert "no step lost" in job.err
        assert seen == {3 << 20}, "the replacement saw the new file"
