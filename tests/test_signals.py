"""What signals do to a job: who gets them, in which order, and that they work at every moment."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests import helpers, jobs


def test_a_stop_goes_first_to_the_ranks_own_process(tmp_path: Path) -> None:
    """A handler saves a checkpoint while its DataLoader workers and helpers still serve it."""
    body = """
        import torch
        from torch.utils.data import DataLoader

        loader = DataLoader(list(range(64)), num_workers=2, prefetch_factor=1)
        batches = iter(loader)
        helper = sleeper()

        def save(*_):
            batch = next(batches).tolist()  # needs a living loader
            alive = helper.poll() is None
            tell("saved", batch=batch, helper=alive)
            sys.exit(0)

        signal.signal(signal.SIGTERM, save)
        tell("ready", pids=[helper.pid, *(w.pid for w in batches._workers)])
        forever()
    """
    with jobs.job(
        tmp_path, body, "--nproc-per-node=2", "--shutdown-timeout=300", forked=True
    ) as job:
        ready = job.await_told("ready", 2)
        job.signal(signal.SIGTERM)
        assert job.ended() == 1, job.describe()
        saved = job.told("saved")
        assert [e["helper"] for e in saved] == [True, True]
        assert [e["batch"] for e in saved] == [[0], [0]]
        assert not [pid for e in ready for pid in e["pids"] if jobs.seen(pid)]
        assert "exitcode" not in job.err  # stopped by flashrun: no failure of theirs


def test_a_stopped_worker_does_not_delay_the_end(tmp_path: Path) -> None:
    """SIGSTOP keeps it from obeying; after the timeout its whole tree is killed."""
    body = """
        tell("ready", helper=sleeper().pid)
        forever()
    """
    with jobs.job(tmp_path, body, "--shutdown-timeout=1") as job:
        (ready,) = job.await_told("ready")
        helpers.freeze(ready["pid"], ready["helper"])
        job.signal(signal.SIGTERM)
        assert job.ended() == 1, job.describe()
        assert "did not stop in time" in job.err
        assert "did not end in time" not in job.err  # nor did anybody wait for the agent
        assert jobs.seen(ready["pid"]) is None
        assert jobs.seen(ready["helper"]) is None


def test_a_worker_that_cannot_be_killed_is_named_and_left_behind(tmp_path: Path) -> None:
    """Simulated: SIGKILL to it is dropped in flashrun's own processes."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import os, signal\n"
        "real = os.kill\n"
        "def kill(pid, number):\n"
        "    path = os.environ['STUCK']\n"
        "    stuck = open(path).read().split() if os.path.exists(path) else ()\n"
        "    if number == signal.SIGKILL and str(pid) in stuck:\n"
        "        return\n"
        "    real(pid, number)\n"
        "os.kill = kill\n"
    )
    body = """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        import ctypes
        ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)  # not with its parent either
        with open(os.environ["STUCK"], "w") as file:
            file.write(str(os.getpid()))
        tell("ready")
        forever()
    """
    stuck = tmp_path / "stuck"
    env = {"PYTHONPATH": str(tmp_path / "site"), "STUCK": str(stuck)}
    with jobs.job(tmp_path, body, "--shutdown-timeout=1", env=env) as job:
        (ready,) = job.await_told("ready")
        job.signal(signal.SIGTERM)
        assert job.wait() == 1, job.describe()
        process = jobs.seen(ready["pid"])
        assert process is not None
        helpers.kill_all([process])
        job.close()
        assert f"pid {ready['pid']}) cannot be killed" in job.err


@pytest.mark.parametrize("flag", ["--zygote", "--no-zygote"])
def test_hangup_that_was_ignored_at_the_start_stays_ignored(tmp_path: Path, flag: str) -> None:
    """nohup flashrun …"""
    body = """
        tell("ready", ignored=signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)
        await_release("go")
    """
    with jobs.job(
        tmp_path,
        body,
        fifos=["go"],
        forked=flag == "--zygote",
        preexec=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN) and None,
    ) as job:
        (ready,) = job.await_told("ready")
        assert ready["ignored"]
        agent = job.helper("agent")
        for pid in (job.pid, agent, job.helper("zygote"), ready["pid"]):
            os.kill(pid, signal.SIGHUP)
        job.release("go")
        assert job.ended() == 0, job.describe()
        assert "died" not in job.err


def test_hangup_otherwise_stops_the_job(tmp_path: Path) -> None:
    body = """
        signal.signal(signal.SIGHUP, lambda *_: (tell("hup"), sys.exit(0)))
        tell("ready")
        forever()
    """
    with jobs.job(tmp_path, body, "--nproc-per-node=2") as job:
        job.await_told("ready", 2)
        job.signal(signal.SIGHUP)
        assert job.ended() == 1, job.describe()
        assert len(job.told("hup")) == 2


def test_user_signals_are_passed_on_and_the_job_runs_on(tmp_path: Path) -> None:
    body = """
        for name in ("SIGUSR1", "SIGUSR2"):
            number = getattr(signal, name)
            signal.signal(number, lambda n, frame: tell("got", number=int(n)))
        tell("ready")
        await_release(f"go{RANK}")
    """
    with jobs.job(tmp_path, body, "--nproc-per-node=2", fifos=["go0", "go1"]) as job:
        job.await_told("ready", 2)
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            job.signal(number)
            job.await_told("got", 2, number=int(number))
        job.release("go0")
        job.release("go1")
        assert job.ended() == 0, job.describe()
        assert len(job.told("got")) == 4


def test_user_signal_in_signals_to_handle_stops_the_job(tmp_path: Path) -> None:
    body = """
        signal.signal(signal.SIGUSR1, lambda *_: (tell("got"), sys.exit(0)))
        signal.signal(signal.SIGUSR2, lambda *_: tell("usr2"))
        tell("ready")
        forever()
    """
    flags = ("--nproc-per-node=2", "--signals-to-handle=SIGTERM,SIGUSR1")
    with jobs.job(tmp_path, body, *flags) as job:
        job.await_told("ready", 2)
        job.signal(signal.SIGUSR2)
        job.await_told("usr2", 2)
        job.signal(signal.SIGUSR1)
        assert job.ended() == 1, job.describe()
        assert len(job.told("got")) == 2


def test_first_interrupt_asks_and_the_second_kills(tmp_path: Path) -> None:
    body = """
        signal.signal(signal.SIGINT, lambda *_: tell("asked"))
        tell("ready", helper=sleeper().pid)
        forever()
    """
    with jobs.job(tmp_path, body, "--nproc-per-node=2", "--shutdown-timeout=300") as job:
        ready = job.await_told("ready", 2)
        job.signal(signal.SIGINT)
        job.await_told("asked", 2)
        job.signal(signal.SIGINT)
        assert job.ended() == 1, job.describe()
        assert len(job.told("asked")) == 2
        assert job.err.splitlines()[-1] == "flashrun: SIGINT: all workers have ended"
        assert not [e for e in ready if jobs.seen(e["pid"]) or jobs.seen(e["helper"])]


def test_interrupts_on_and_on_change_nothing(tmp_path: Path) -> None:
    """Also those that come while the interpreter of the launcher ends."""
    with jobs.job(tmp_path, 'tell("ready"); forever()') as job:
        job.await_told("ready")
        while job.process.poll() is None:
            job.signal(signal.SIGINT)
            os.sched_yield()
        assert job.ended() == 1, job.describe()
        assert job.err.splitlines()[-1] == "flashrun: SIGINT: all workers have ended"


@pytest.mark.parametrize("moment", ["in a collective", "at its end"])
def test_who_swallows_an_interrupt_does_not_wait_for_who_did_not(
    moment: str, tmp_path: Path
) -> None:
    """Its peers end and are not replaced, so its collective fails as under torchrun, and a script
    that is done does not wait for theirs."""
    body = f"""
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        rank = dist.get_rank()
        if rank == 2 and {moment == "at its end"}:
            signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGINT}})
        elif rank:
            signal.signal(signal.SIGINT, lambda *_: tell("swallowed"))
        tell("ready")
        if rank == 2 and {moment == "at its end"}:
            signal.sigwait({{signal.SIGINT}})
            tell("swallowed")
            sys.exit(0)
        try:
            while True:
                dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            tell("failed", error=str(error))
            raise
    """
    flags = ("--nproc-per-node=3", "--recovery=in-place", "--shutdown-timeout=600")
    with jobs.job(tmp_path, body, *flags) as job:
        job.await_told("ready", 3)
        job.signal(signal.SIGINT)
        assert job.ended() == 1, job.describe()
        assert len(job.told("swallowed")) == 2
        assert job.told("failed")


def test_interrupt_in_a_terminal_comes_once_and_from_flashrun(tmp_path: Path) -> None:
    """The terminal sends SIGINT to its foreground group; workers are not in it."""
    body = """
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        helper = sleeper()
        tell("ready", helper=helper.pid)
        info = signal.sigwaitinfo({signal.SIGINT})
        tell("interrupted", sender=info.si_pid, helper=helper.poll() is None)
        again = signal.sigtimedwait({signal.SIGINT}, 0)
        tell("again", again=again is not None)
    """
    with jobs.job(tmp_path, body, "--nproc-per-node=2", terminal=True, forked=True) as job:
        job.await_told("ready", 2)
        os.write(job.terminal, b"\x03")
        assert job.ended() == 1, job.describe()
        interrupted = job.told("interrupted")
        assert [e["sender"] for e in interrupted] == [job.pid, job.pid]
        assert [e["helper"] for e in interrupted] == [True, True]
        assert [e["again"] for e in job.told("again")] == [False, False]


def test_interrupt_does_not_wait_for_a_zygote_that_still_loads(tmp_path: Path) -> None:
    with jobs.job(
        tmp_path, 'tell("ran")\n', "--nproc-per-node=2", "--log-level=debug", forked=True
    ) as job:
        zygote = job.helper("zygote")
        helpers.freeze(zygote)
        job.await_output("starting 2 workers", "err")
        job.signal(signal.SIGINT)
        assert job.ended() == 1, job.describe()
        assert not job.told("ran")
        assert jobs.seen(zygote) is None


# -- while the nodes come together ---------------------------------------------------------------


_WAITS = {
    "static, host": ("--node-rank=0", "--master-addr=127.0.0.1", "--master-port={free}"),
    "static, host is not there": (
        "--node-rank=1", "--master-addr=127.0.0.1", "--master-port={free}"),
    "static, host is silent": (
        "--node-rank=1", "--master-addr=127.0.0.1", "--master-port={silent}"),
    "static, no route": ("--node-rank=1", "--master-addr=192.0.2.1", "--master-port=29500"),
    "c10d, host": ("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:{free}"),
    "c10d, host is not there": (
        "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:{free}", "--rdzv-conf=is_host=0"),
    "c10d, a file": (
        "--rdzv-backend=c10d", "--rdzv-endpoint={file}", "--rdzv-conf=store_type=file"),
    "flash, host is not there": (
        "--rdzv-backend=flash", "--rdzv-endpoint=127.0.0.1:{free}", "--rdzv-conf=is_host=0"),
    "etcd is not there": ("--rdzv-backend=flash-etcd", "--rdzv-endpoint=127.0.0.1:{free}"),
    "c10d, no route": ("--rdzv-backend=c10d", "--rdzv-endpoint=192.0.2.1:29400"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("place", "number"),
    [*((place, signal.SIGINT) for place in _WAITS), ("c10d, host", signal.SIGTERM)],
)
def test_interrupt_while_waiting_for_other_nodes(
    tmp_path: Path, place: str, number: signal.Signals
) -> None:
    with helpers.silent_port() as silent:
        values = {"free": helpers.free_port(), "silent": silent, "file": tmp_path / "store"}
        flags = [flag.format(**values) for flag in _WAITS[place]]
        with jobs.job(tmp_path, 'tell("ran")\n', "--nnodes=2", *flags) as job:
            job.helper("agent")
            job.signal(number)
            assert job.ended() == 1, job.describe()
            assert not job.told("ran")
            assert "Traceback" not in job.err
            assert "did not end in time" not in job.err


_PLUGIN = """
import datetime, os, threading
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler

def create(params):
    return Handler(params)

def registered():
    return create

class Handler(RendezvousHandler):
    use_agent_store = True

    def __init__(self, params):
        self.params = params

    def get_backend(self):
        return "patient"

    def get_run_id(self):
        return self.params.run_id

    def next_rendezvous(self):
        if self.params.get("how") == "store":  # in C++
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            os.write(2, b"waits for others\\n")
            store.wait(["others"], datetime.timedelta(hours=1))
        os.write(2, b"waits for others\\n")
        threading.Event().wait()

    def is_closed(self):
        return False

    def set_closed(self):
        pass

    def num_nodes_waiting(self):
        return 0

    def shutdown(self):
        threading.Event().wait()
"""


@pytest.mark.parametrize("how", ["python", "store"])
def test_interrupt_in_a_rendezvous_of_another_package(tmp_path: Path, how: str) -> None:
    info = tmp_path / "site" / "patient-1.0.dist-info"
    info.mkdir(parents=True)
    (tmp_path / "site" / "patient_rdzv.py").write_text(_PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: patient\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[torchrun.handlers]\npatient = patient_rdzv:registered\n"
    )
    flags = ["--nnodes=2", "--rdzv-backend=patient", "--rdzv-endpoint=127.0.0.1:1"]
    flags += [f"--rdzv-conf=how={how}", "--shutdown-timeout=300"]
    env = {"PYTHONPATH": str(tmp_path / "site")}
    with jobs.job(tmp_path, 'tell("ran")\n', *flags, env=env) as job:
        job.await_output("waits for others", "err")
        job.signal(signal.SIGINT)
        assert job.ended() == 1, job.describe()
        assert not job.told("ran")
        assert "Traceback" not in job.err
        assert "did not end in time" not in job.err
