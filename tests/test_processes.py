"""Nothing outlives the supervisor, and every helper may die: real processes, real signals."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests import helpers, jobs

# Whatever a training script may leave running: DataLoader workers, helpers, daemons with a session
# of their own, programs that were started with an emptied environment.
_FAMILY = """
    import torch
    from torch.utils.data import DataLoader

    def family():
        loader = iter(DataLoader(list(range(8)), num_workers=2, prefetch_factor=1))
        next(loader)
        bare = {"LC_ALL": "C"}
        pids = [w.pid for w in loader._workers]
        pids += [sleeper().pid, sleeper(env=bare).pid]
        pids += daemon() + daemon(env=bare)
        globals()["keep"] = loader
        tell("family", pids=pids, run_dir=os.environ["FLASHRUN_RUN_DIR"])
"""


def test_killed_supervisor_leaves_nothing(tmp_path: Path) -> None:
    body = _FAMILY + "    family(); forever()\n"
    with jobs.job(tmp_path, body, "--nproc-per-node=2", forked=True) as job:
        family = job.await_told("family", 2)
        pids = [pid for event in family for pid in [event["pid"], *event["pids"]]]
        helpers_ = [job.helper(role) for role in ("agent", "zygote", "store")]
        assert all(jobs.seen(pid) for pid in pids)
        os.kill(job.pid, signal.SIGKILL)
        job.await_gone([*pids, *helpers_])
        assert job.wait() == -signal.SIGKILL
        assert not os.path.exists(family[0]["run_dir"])


@pytest.mark.parametrize("dead", ["agent", "zygote"])
def test_killed_supervisor_with_another_helper_dead_leaves_nothing(
    tmp_path: Path, dead: str
) -> None:
    """Any helper sweeps; the one that knows may be gone, or stand still."""
    body = _FAMILY + "    family(); forever()\n"
    with jobs.job(tmp_path, body, "--nproc-per-node=1") as job:
        (family,) = job.await_told("family")
        frozen = job.helper(dead)
        helpers.freeze(frozen)
        os.kill(job.pid, signal.SIGKILL)
        job.await_gone([family["pid"], *family["pids"]])
        os.kill(frozen, signal.SIGCONT)
        job.await_gone([frozen])
        assert not os.path.exists(family["run_dir"])


def test_a_finished_job_leaves_nothing(tmp_path: Path) -> None:
    body = _FAMILY + "    family(); os._exit(0)\n"
    with jobs.job(tmp_path, body, "--nproc-per-node=2", forked=True) as job:
        assert job.wait() == 0, job.describe()
        family = job.await_told("family", 2)
        assert not [pid for event in family for pid in event["pids"] if jobs.seen(pid)]
        assert not os.path.exists(family[0]["run_dir"])


def test_the_next_job_removes_what_one_that_was_killed_whole_has_left(tmp_path: Path) -> None:
    """With nobody left to sweep; the folders of jobs that run are left alone."""
    body = 'tell("ready", run_dir=os.environ["FLASHRUN_RUN_DIR"])\nforever()\n'
    lost, running, third = (tmp_path / name for name in ("lost", "running", "third"))
    for folder in (lost, running, third):
        folder.mkdir()
    with jobs.job(running, body) as other, jobs.job(lost, body) as job:
        (ready,), (alive,) = job.await_told("ready"), other.await_told("ready")
        folder = Path(ready["run_dir"])
        view = os.readlink(folder / "view")
        assert os.path.basename(os.readlink(folder / "logs")).startswith("torchelastic_")
        everybody = [job.pid, *map(job.helper, ("agent", "zygote", "store"))]
        helpers.freeze(*everybody)
        for pid in everybody:
            os.kill(pid, signal.SIGKILL)
        job.await_gone([ready["pid"], *everybody[1:]])
        job.wait()
        with jobs.job(third, "pass\n") as next_one:  # (a job of another test may be quicker)
            assert next_one.ended() == 0, next_one.describe()
        assert not folder.exists() and not os.path.exists(view)
        assert os.path.isdir(alive["run_dir"])


def test_supervisor_spares_children_that_are_older_than_the_job(tmp_path: Path) -> None:
    """A shell that starts a background process and then replaces itself by flashrun."""
    script = jobs.write_script(tmp_path, "pass\n")
    (tmp_path / "pid").touch()
    shell = (
        f"env -i sleep 1000 >/dev/null 2>&1 & echo $! > pid;"
        f" exec {' '.join(helpers.launcher('flashrun'))} {script}"
    )
    with jobs.running(["bash", "-c", shell], tmp_path, {}) as job:
        assert job.wait() == 0, job.describe()
        bystander = jobs.seen(int((tmp_path / "pid").read_text()))
        assert bystander is not None, job.describe()
        helpers.kill_all([bystander])


# -- the agent -------------------------------------------------------------------------------------


def test_killed_agent_is_replaced_and_adopts(tmp_path: Path) -> None:
    """Again and again; then output, signals and exit status are as if nothing had been."""
    body = """
        signal.signal(signal.SIGUSR1, lambda *_: tell("usr1"))
        print("before", RANK)
        tell("ready")
        await_release(f"go{RANK}")
        print("after", RANK)
        sys.exit(3 if RANK == 1 else 0)
    """
    flags = ("--nproc-per-node=2", "--tee=3")
    with jobs.job(tmp_path, body, *flags, fifos=["go0", "go1"], forked=True) as job:
        ready = job.await_told("ready", 2)
        job.await_output(r"^\[default0\]:before 0$")
        job.await_output(r"^\[default1\]:before 1$")
        for _ in range(3):
            job.kill_helper("agent")
        assert all(jobs.seen(event["pid"]) for event in ready)
        job.signal(signal.SIGUSR1)
        job.await_told("usr1", 2)
        job.release("go0")
        job.release("go1")
        assert job.ended() == 1, job.describe()
        assert len(job.told("ready")) == 2  # nobody was started twice
        for line in ("[default0]:before 0", "[default1]:before 1", "[default0]:after 0",
                     "[default1]:after 1"):  # fmt: skip
            # Once more for each agent that died between showing it and noting that.
            assert 1 <= job.out.count(line) <= 4, job.describe()
        assert "exitcode  : 3" in job.err
        assert "rank      : 1" in job.err


def test_agent_killed_after_one_of_its_workers_ended(tmp_path: Path) -> None:
    body = """
        tell("ready")
        if RANK == 1:
            await_release("go")
    """
    with jobs.job(tmp_path, body, "--nproc-per-node=2", fifos=["go"]) as job:
        ready = job.await_told("ready", 2)
        job.await_gone([e["pid"] for e in ready if e["rank"] == 0])
        job.kill_helper("agent")
        job.release("go")
        assert job.ended() == 0, job.describe()
        assert len(job.told("ready")) == 2


def test_agent_killed_while_a_worker_fails(tmp_path: Path) -> None:
    """The failure happens while no agent looks; the next one finds it, and the job restarts."""
    body = """
        tell("ready")
        if ATTEMPT == 0:
            if RANK == 0:
                await_release("go")
                os._exit(5)
            forever()
    """
    with jobs.job(tmp_path, body, "--nproc-per-node=2", "--max-restarts=1", fifos=["go"]) as job:
        ready = job.await_told("ready", 2)
        agent = job.helper("agent")
        helpers.freeze(agent)
        job.release("go")
        job.await_gone([e["pid"] for e in ready if e["rank"] == 0])
        os.kill(agent, signal.SIGKILL)
        job.await_told("ready", 2, attempt=1)
        assert job.ended() == 0, job.describe()
        assert len(job.told("ready")) == 4


def test_agent_killed_during_shutdown(tmp_path: Path) -> None:
    """A handler that saves a checkpoint is neither called twice nor cut short."""
    body = """
        def save(*_):
            tell("asked")
            await_release(f"go{RANK}")
            tell("saved")
            sys.exit(0)

        signal.signal(signal.SIGTERM, save)
        tell("ready")
        forever()
    """
    flags = ("--nproc-per-node=2", "--shutdown-timeout=300")
    with jobs.job(tmp_path, body, *flags, fifos=["go0", "go1"]) as job:
        job.await_told("ready", 2)
        job.signal(signal.SIGTERM)
        job.await_told("asked", 2)
        job.kill_helper("agent")
        job.kill_helper("agent")
        job.release("go0")
        job.release("go1")
        assert job.ended() == 1, job.describe()
        assert len(job.told("asked")) == 2
        assert len(job.told("saved")) == 2


def test_agent_killed_before_any_worker_runs(tmp_path: Path) -> None:
    body = 'tell("ready")\n'
    with jobs.job(tmp_path, body, "--nproc-per-node=2", "--log-level=debug") as job:
        zygote = job.helper("zygote")
        helpers.freeze(zygote)
        job.await_output("starting 2 workers", "err")  # asked for, and nobody answers
        job.kill_helper("agent")
        os.kill(zygote, signal.SIGCONT)
        assert job.ended() == 0, job.describe()
        assert sorted(e["rank"] for e in job.told("ready")) == [0, 1]


def test_agent_killed_at_once(tmp_path: Path) -> None:
    with jobs.job(tmp_path, 'tell("ready")\n', "--nproc-per-node=2") as job:
        job.kill_helper("agent")
        assert job.ended() == 0, job.describe()
        assert sorted(e["rank"] for e in job.told("ready")) == [0, 1]


def test_agent_that_dies_for_ever_ends_the_job(tmp_path: Path) -> None:
    with jobs.job(tmp_path, 'tell("ready"); forever()\n') as job:
        job.await_told("ready")
        agent = job.helper("agent")
        while job.process.poll() is None:
            os.kill(agent, signal.SIGKILL)
            after = job.next_helper("agent", but=agent)
            if after is None:
                break
            agent = after
        assert job.ended() == 1
        assert "the agent died 6 times" in job.err


# -- the zygote ------------------------------------------------------------------------------------


def test_killed_zygote_leaves_workers_alone_and_restarts_still_work(tmp_path: Path) -> None:
    body = """
        tell("ready")
        if ATTEMPT == 0:
            await_release(f"go{RANK}")
            os._exit(RANK)
    """
    flags = ("--nproc-per-node=2", "--max-restarts=1")
    with jobs.job(tmp_path, body, *flags, fifos=["go0", "go1"], forked=True) as job:
        ready = job.await_told("ready", 2)
        job.kill_helper("zygote")
        assert all(jobs.seen(event["pid"]) for event in ready)
        job.release("go0")
        job.release("go1")
        assert job.ended() == 0, job.describe()
        assert sorted(e["rank"] for e in job.told("ready", attempt=1)) == [0, 1]


def test_zygote_killed_with_work_to_do(tmp_path: Path) -> None:
    with jobs.job(
        tmp_path, 'tell("ready")\n', "--nproc-per-node=2", "--log-level=debug", forked=True
    ) as job:
        zygote = job.helper("zygote")
        helpers.freeze(zygote)
        job.await_output("starting 2 workers", "err")
        os.kill(zygote, signal.SIGKILL)
        assert job.ended() == 0, job.describe()
        assert sorted(e["rank"] for e in job.told("ready")) == [0, 1]


def test_zygote_killed_between_fork_and_answer(tmp_path: Path) -> None:
    """The worker that nobody knows of is ended before another one of its rank starts."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import os, signal\n"
        "real = os.waitpid\n"
        "def waitpid(pid, options):\n"
        "    # The zygote collects the process in between: the worker has been forked.\n"
        "    name = open('/proc/self/cmdline').read()\n"
        "    if name.startswith('flashrun: zygote') and not os.path.exists(os.environ['ONCE']):\n"
        "        open(os.environ['ONCE'], 'w').write(str(os.getpid()))\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return real(pid, options)\n"
        "os.waitpid = waitpid\n"
    )
    once = tmp_path / "once"
    env = {"PYTHONPATH": str(tmp_path / "site"), "ONCE": str(once)}
    body = """
        await_release(f"go{RANK}")
        tell("done")
    """
    with jobs.job(
        tmp_path, body, "--nproc-per-node=2", env=env, fifos=["go0", "go1"], forked=True
    ) as job:
        helpers.wait_until(
            lambda: once.exists() and bool(once.read_text()), "the death of the zygote"
        )
        job.helper("zygote", but=int(once.read_text()))
        job.release("go0")
        job.release("go1")
        assert job.ended() == 0, job.describe()
        assert sorted(e["rank"] for e in job.told("done")) == [0, 1]


def test_a_worker_that_has_begun_is_asked_to_stop(tmp_path: Path) -> None:
    """The supervisor knows of it before its script begins, however slow the zygote is to tell."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import os, time\n"
        "real = os.waitpid\n"
        "def waitpid(pid, options):\n"
        "    # The zygote collects the process in between: the worker has been forked.\n"
        "    if open('/proc/self/cmdline').read().startswith('flashrun: zygote'):\n"
        "        end = time.monotonic() + 1\n"
        "        while time.monotonic() < end and not os.path.exists(os.environ['BEGUN']):\n"
        "            time.sleep(0.01)\n"
        "        if os.path.exists(os.environ['BEGUN']):  # now the stop is here first\n"
        "            time.sleep(5)\n"
        "    return real(pid, options)\n"
        "os.waitpid = waitpid\n"
    )
    env = {"PYTHONPATH": str(tmp_path / "site"), "BEGUN": str(tmp_path / "begun")}
    body = """
        signal.signal(signal.SIGTERM, lambda *_: (tell("asked"), sys.exit(0)))
        open(os.environ["BEGUN"], "w").close()
        tell("ready")
        forever()
    """
    with jobs.job(tmp_path, body, env=env, forked=True) as job:
        job.await_told("ready")
        job.signal(signal.SIGTERM)
        assert job.ended() == 1, job.describe()
        assert job.told("asked")


def test_killed_store_ends_the_job_and_says_so(tmp_path: Path) -> None:
    with jobs.job(tmp_path, 'tell("ready"); forever()\n') as job:
        job.await_told("ready")
        os.kill(job.helper("store"), signal.SIGKILL)
        assert job.ended() == 1
        assert "store host" in job.err
        assert "died" in job.err


# -- many, and fast --------------------------------------------------------------------------------


def test_sixteen_workers_that_end_at_once(tmp_path: Path) -> None:
    """Exits overtake the zygote's answers; each is counted once, and no thread count is large."""
    body = """
        # One write: print makes several of a line under -u, and those of sixteen would mix.
        os.write(1, f"line of {RANK} {os.environ['OMP_NUM_THREADS']}\\n".encode())
        os._exit(0)
    """
    with jobs.job(tmp_path, body, "--nproc-per-node=16", forked=True) as job:
        assert job.ended() == 0, job.describe()
        assert sorted(job.out.split("\n")) == sorted(
            ["", *(f"line of {rank} 1" for rank in range(16))]
        )


@pytest.mark.parametrize("flag", ["--zygote", "--no-zygote"])
def test_exits_are_seen_without_polling(tmp_path: Path, flag: str) -> None:
    """Supervisor and agent sleep in the kernel until something happens, whatever happens."""
    body = 'tell("ready"); await_release("go")\n'
    with jobs.job(tmp_path, body, fifos=["go"], forked=flag == "--zygote") as job:
        (ready,) = job.await_told("ready")
        # SIGCHLD alone would do for a moment; the exit is seen for sure by what this names.
        infos = Path(f"/proc/{job.pid}/fdinfo").iterdir()
        assert any(f"\nPid:\t{ready['pid']}\n" in info.read_text() for info in infos)
        for pid in (job.pid, job.helper("agent")):
            helpers.wait_until(
                lambda pid=pid: jobs.waits_without_timeout(pid),  # type: ignore[misc]
                "a wait without a timeout",
            )
        job.release("go")
        assert job.ended() == 0, job.describe()
