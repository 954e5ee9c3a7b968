"""What is shown of the workers' output, when, and what is said of a failure."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests import helpers, jobs


def test_tee_shows_a_line_while_the_worker_goes_on(tmp_path: Path) -> None:
    """A line at once, and the beginning of one (a prompt, a progress bar) too."""
    body = """
        print("hello from", RANK)
        print("to err", RANK, file=sys.stderr)
        if RANK == 0:
            tell("ready")
            await_release("next")
            sys.stdout.write("50 %")
            sys.stdout.flush()
        forever()
    """
    flags = ("--nproc-per-node=2", "--tee=3")
    with jobs.job(tmp_path, body, *flags, fifos=["next"]) as job:
        for rank in (0, 1):
            job.await_output(rf"^\[default{rank}\]:hello from {rank}$")
            job.await_output(rf"^\[default{rank}\]:to err {rank}$", "err")
        job.release("next")
        job.await_output(r"^\[default0\]:50 %\Z")
        job.signal(signal.SIGINT)
        assert job.ended() == 1
        assert job.left_in_tmp == [] or job.left_in_tmp[0].startswith("torchelastic_")


def test_no_line_is_lost_when_agents_die(tmp_path: Path) -> None:
    """Each line at least once and in order; twice only where an agent died while it was shown."""
    body = """
        for block in range(4):
            for i in range(200):
                sys.stdout.write(f"{block}.{i}.\\n")  # one write: half a line may be shown
            tell("block", block=block)
            if block < 3:
                await_release(f"r{RANK}b{block}")
    """
    fifos = [f"r{rank}b{block}" for rank in range(2) for block in range(3)]
    flags = ("--nproc-per-node=2", "--tee=1")
    with jobs.job(tmp_path, body, *flags, fifos=fifos) as job:
        for block in range(3):
            job.await_told("block", 2, block=block)  # written, not yet shown perhaps
            agent = job.helper("agent")
            os.kill(agent, signal.SIGKILL)
            job.release(f"r0b{block}")
            job.release(f"r1b{block}")
        assert job.ended() == 0, job.describe()
        expected = [f"{block}.{i}." for block in range(4) for i in range(200)]
        repeated = 0
        for rank in (0, 1):
            shown = re.findall(rf"^\[default{rank}\]:(.*)$", job.out, re.MULTILINE)
            once = [line for i, line in enumerate(shown) if i == 0 or shown[i - 1] != line]
            assert once == expected
            repeated += len(shown) - len(once)
        assert repeated <= 3


def test_temporary_folders_are_removed(tmp_path: Path) -> None:
    flags = ("--nproc-per-node=2", "--tee=3")
    with jobs.job(tmp_path, 'print("x")\n', *flags, forked=True) as job:
        assert job.ended() == 0, job.describe()
        assert job.left_in_tmp == []


def test_logs_to_read_stay_after_a_failure(tmp_path: Path) -> None:
    with jobs.job(tmp_path, 'print("x"); sys.exit(4)\n', "--redirects=3") as job:
        assert job.ended() == 1, job.describe()
        (folder,) = job.left_in_tmp
        assert folder.startswith("torchelastic_")


def test_interrupted_job_leaves_no_temporary_folder(tmp_path: Path) -> None:
    with jobs.job(tmp_path, 'tell("ready"); forever()\n') as job:
        job.await_told("ready")
        job.signal(signal.SIGINT)
        assert job.ended() == 1
        assert job.left_in_tmp == []


def test_restarted_ranks_keep_the_logs_of_the_attempt_before(tmp_path: Path) -> None:
    body = """
        print("attempt", ATTEMPT, "rank", RANK)
        tell("ready")
        if ATTEMPT == 0:
            if RANK == 1:
                await_release("go")
                os._exit(7)
            forever()
    """
    logs = tmp_path / "logs"
    flags = ("--nproc-per-node=2", "--redirects=3", "--max-restarts=1", f"--log-dir={logs}")
    with jobs.job(tmp_path, body, *flags, fifos=["go"]) as job:
        job.await_told("ready", 2)
        job.release("go")
        assert job.ended() == 0, job.describe()
        for attempt in (0, 1):
            for rank in (0, 1):
                (path,) = logs.glob(f"*/attempt_{attempt}/{rank}/stdout.log")
                assert path.read_text() == f"attempt {attempt} rank {rank}\n"


@pytest.mark.parametrize("flag", ["--redirects=3", pytest.param("--tee=3", marks=pytest.mark.slow)])
def test_a_replacement_goes_on_with_the_log_of_its_rank(tmp_path: Path, flag: str) -> None:
    """It writes the same file: what was there stays, of the other rank's as well."""
    body = """
        import torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        dist.init_process_group("gloo")
        model = DistributedDataParallel(torch.nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for step in range(10):
            model(torch.ones(2)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 6:
                tell("wrote")
                await_release(f"go{RANK}")
            sys.stdout.write(f"out {step}\\n")
            sys.stderr.write(f"err {step}\\n")
        dist.destroy_process_group()
    """
    logs = tmp_path / "logs"
    flags = ("--nproc-per-node=2", flag, f"--log-dir={logs}")
    with jobs.job(tmp_path, body, *flags, fifos=["go0", "go1"], recovery="in-place") as job:
        pids = {e["rank"]: e["pid"] for e in job.await_told("wrote", 2)}
        os.kill(pids[1], signal.SIGKILL)
        job.release("go0")
        job.await_told("wrote", 2, rank=1)
        job.release("go1")
        assert job.ended() == 0, job.describe()
    for name in ("out", "err"):
        wanted = [f"{name} {step}" for step in range(10)]
        for rank in (0, 1):
            (path,) = logs.glob(f"*/attempt_0/{rank}/std{name}.log")
            lines = path.read_text().split("\n")
            assert [line for line in lines if line.startswith(name)] == wanted, job.describe()
            if flag == "--tee=3":
                shown = getattr(job, name)
                for line in wanted:
                    assert shown.count(f"[default{rank}]:{line}\n") == 1, job.describe()


@pytest.mark.parametrize("flag", ["--tee=3", "--redirects=0"])
def test_flashrun_begins_a_line_of_its_own(tmp_path: Path, flag: str) -> None:
    """Where it knows what stands there: of what is tee'd, and of standard error passed on."""
    body = """
        sys.stderr.write("50 %")
        await_release("go")
        os._exit(3)
    """
    with jobs.job(tmp_path, body, flag, fifos=["go"]) as job:
        job.await_output("50 %", "err")
        job.release("go")
        assert job.ended() == 1
        assert "50 %\nflashrun: error: rank 0" in job.err, job.describe()


# -- the report of a failure -----------------------------------------------------------------------


@pytest.mark.parametrize("forked", [True, False])
def test_report_shows_the_last_lines_of_the_rank_that_failed_first(
    tmp_path: Path, forked: bool
) -> None:
    """Without @record; and a rank that flashrun stopped is not listed as a failure."""
    body = """
        tell("ready")
        if RANK == 1:
            await_release("go")
            for i in range(30):
                print("line", i, file=sys.stderr)
            raise ValueError("the reason")
        forever()
    """
    with jobs.job(tmp_path, body, "--nproc-per-node=2", fifos=["go"], forked=forked) as job:
        job.await_told("ready", 2)
        job.release("go")
        assert job.ended() == 1, job.describe()
        report = job.err[job.err.index("Last lines of standard error of rank 1") :]
        assert "ValueError: the reason" in report
        assert "line 29" in report
        assert "line 3\n" not in report
        assert "Root Cause" in job.err
        assert "<NO_OTHER_FAILURES>" in job.err
        assert "rank      : 0" not in job.err


def test_report_shows_native_standard_error_of_a_program(tmp_path: Path) -> None:
    command = [
        *helpers.launcher("flashrun"), "--no-python", "--nproc-per-node=2", "sh", "-c",
        'if [ $RANK = 0 ]; then echo "from the shell" >&2; exit 9; fi; exec sleep 1000',
    ]  # fmt: skip
    with jobs.running(command, tmp_path, {}) as job:
        assert job.ended() == 1, job.describe()
        report = job.err[job.err.index("Last lines of standard error of rank 0") :]
        assert "from the shell" in report
        assert "exitcode  : 9" in job.err
        assert job.err.count("from the shell") == 2  # as it came, and in the report


@pytest.mark.parametrize("redirected", [False, True])
def test_report_shows_what_other_than_python_wrote(tmp_path: Path, redirected: bool) -> None:
    """Of a worker that is a fork: a line of a library, of a child, and of faulthandler."""
    body = """
        import faulthandler

        faulthandler.enable()
        if RANK == 0:
            forever()
        subprocess.run(["sh", "-c", "echo from a child >&2"])
        os.write(2, b"the native reason\\n")
        os.abort()
    """
    flags = ("--nproc-per-node=2", *(["--redirects=2"] if redirected else []))
    with jobs.job(tmp_path, body, *flags, forked=True) as job:
        assert job.ended() == 1, job.describe()
    at = job.err.index("Last lines of standard error of rank 1")
    for line in ("from a child", "the native reason", "Fatal Python error: Aborted"):
        assert line in job.err[at:]
        assert job.err[:at].count(line) == (0 if redirected else 1)  # and as it came
    assert job.err.index("signal SIGABRT") < at


@pytest.mark.parametrize("terminal", [False, True])
def test_both_streams_to_one_place_keep_their_order(tmp_path: Path, terminal: bool) -> None:
    """``flashrun … 2>&1``, and a terminal, which the worker sees as one."""
    body = """
        for i in range(100):
            os.write(1 + i % 2, b"line %d\\n" % i)
        print("the reason", file=sys.stderr)
        tell("wrote", terminal=os.isatty(2))
        os._exit(3)
    """
    with jobs.job(tmp_path, body, forked=True, terminal=terminal,
                  preexec=lambda: os.dup2(1, 2) and None) as job:  # fmt: skip
        assert job.ended() == 1, job.describe()
    lines = [line.rstrip("\r") for line in job.out.split("\n")]
    assert [line for line in lines if line.startswith("line")] == [f"line {i}" for i in range(100)]
    assert [e["terminal"] for e in job.told("wrote")] == [terminal]
    assert "the reason" in job.out[job.out.index("Last lines of standard error") :]


def test_run_path_that_exits_with_zero_is_a_success(tmp_path: Path) -> None:
    body = """
        sys.stdout.write(f"ran {RANK}\\n")  # one write: the other rank's would come between
        sys.exit(0 if RANK else None)  # torchrun takes only the first for a success, and hangs
    """
    with jobs.job(tmp_path, body, "--run-path", "--nproc-per-node=2", forked=True) as job:
        assert job.ended() == 0, job.describe()
        assert sorted(job.out.split("\n")) == ["", "ran 0", "ran 1"]
