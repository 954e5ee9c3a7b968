"""What a restart is, when there is one, and that it starts from a clean slate."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests import jobs


def test_ten_restarts_in_a_row_form_a_group_each_time(tmp_path: Path) -> None:
    """No attempt reads bootstrap keys of an earlier one."""
    body = """
        import torch, torch.distributed as dist

        dist.init_process_group("gloo")
        value = torch.ones(1)
        dist.all_reduce(value)
        tell("formed", value=value.item())
        if ATTEMPT < 10:
            dist.barrier()  # who is first through the all-reduce must not break it for the other
            if RANK == ATTEMPT % 2:
                os._exit(1)
            dist.barrier()
        dist.destroy_process_group()
    """
    flags = ("--nproc-per-node=2", "--max-restarts=10")
    with jobs.job(tmp_path, body, *flags, forked=True) as job:
        job.await_told("formed", 22, timeout=240)
        assert job.ended() == 0, job.describe()
        formed = sorted((e["attempt"], e["rank"], e["value"]) for e in job.told("formed"))
        assert formed == [(attempt, rank, 2) for attempt in range(11) for rank in (0, 1)]


def test_nothing_of_a_rank_is_left_when_its_successor_starts(tmp_path: Path) -> None:
    body = """
        def alive(pid):
            try:
                with open(f"/proc/{pid}/stat") as file:
                    return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
            except FileNotFoundError:
                return False

        notes = os.path.join(os.environ["FRTEST_FOLDER"], f"pids{RANK}")
        if ATTEMPT == 0:
            from multiprocessing import Process
            child = Process(target=forever)
            child.start()
            bare = {"LC_ALL": "C"}
            pids = [os.getpid(), child.pid, sleeper().pid, sleeper(env=bare).pid]
            pids += daemon() + daemon(env=bare)
            with open(notes, "w") as file:
                file.write(" ".join(map(str, pids)))
            tell("ready")
            if RANK == 0:
                await_release("go")
                os._exit(1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            forever()
        with open(notes) as file:
            pids = [int(pid) for pid in file.read().split()]
        tell("looked", found=len(pids), alive=[pid for pid in pids if alive(pid)])
    """
    flags = ("--nproc-per-node=2", "--max-restarts=1")
    with jobs.job(tmp_path, body, *flags, fifos=["go"]) as job:
        job.await_told("ready", 2)
        job.release("go")
        assert job.ended() == 0, job.describe()
        looked = job.told("looked", attempt=1)
        assert [e["found"] for e in looked] == [8, 8]
        assert [e["alive"] for e in looked] == [[], []]


@pytest.mark.parametrize(
    ("kind", "failing", "shown"),
    [
        ("forked", "import not_there", "No module named 'not_there'"),
        ("shadowed", "import json; json.absent", "has no attribute 'absent'"),
        ("plain", "import argparse; argparse.ArgumentParser().parse_args()", "unrecognized"),
        pytest.param("in-place", "import torch; import not_there", "No module named 'not_there'",
                     marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_same_error_everywhere_before_any_group_is_not_tried_again(
    tmp_path: Path, kind: str, failing: str, shown: str
) -> None:
    """However its process came to be; ``json`` beside the script is the script's."""
    folder = tmp_path / "s"
    folder.mkdir()
    script = folder / "work.py"
    script.write_text(
        "import os\nranks = os.environ['RANK'], os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        f"os.write(1, ('ran %s %s\\n' % ranks).encode())\n{failing}\n"
    )
    if kind == "shadowed":
        (folder / "json.py").write_text("import os\nos.write(1, b'mine\\n')\n")
    recovery = "in-place" if kind == "in-place" else "restart"
    flags = ("--nproc-per-node=2", "--max-restarts=3")
    with jobs.job(tmp_path, "", *flags, args=["surplus"], forked=kind == "forked",
                  recovery=recovery, script=script) as job:  # fmt: skip
        assert job.ended() == 1, job.describe()
    ran = ["mine"] * 2 * (kind == "shadowed") + ["ran 0 0", "ran 1 0"]
    assert sorted(job.out.split("\n"))[1:] == ran, job.describe()
    assert "another attempt would fail the same way" in job.err
    assert shown in job.err[job.err.index("FAILED") :]


def test_different_ends_of_the_ranks_are_tried_again(tmp_path: Path) -> None:
    """The same status, but from another line."""
    body = """
        if ATTEMPT == 0 and RANK == 0:
            sys.exit(3)
        if ATTEMPT == 0:
            sys.exit(3)
    """
    with jobs.job(tmp_path, body, "--nproc-per-node=2", "--max-restarts=1") as job:
        assert job.ended() == 0, job.describe()
        assert "restart 1 of at most 1" in job.err


def test_error_of_one_rank_is_tried_again(tmp_path: Path) -> None:
    body = """
        tell("ran")
        if ATTEMPT == 0:
            if RANK == 1:
                raise RuntimeError("only here")
            forever()
    """
    flags = ("--nproc-per-node=2", "--max-restarts=1")
    with jobs.job(tmp_path, body, *flags, forked=True) as job:
        assert job.ended() == 0, job.describe()
        assert len(job.told("ran", attempt=1)) == 2
        assert "restart 1 of at most 1" in job.err


def test_error_after_a_group_was_formed_is_tried_again(tmp_path: Path) -> None:
    """The same error everywhere, but the surroundings may be to blame."""
    body = """
        import torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        tell("ran")
        if ATTEMPT == 0:
            raise RuntimeError("lost")
        dist.destroy_process_group()
    """
    flags = ("--nproc-per-node=2", "--max-restarts=1")
    with jobs.job(tmp_path, body, *flags, forked=True) as job:
        assert job.ended() == 0, job.describe()
        assert len(job.told("ran", attempt=1)) == 2


def test_restarts_are_used_up(tmp_path: Path) -> None:
    body = """
        tell("ran")
        os._exit(3)
    """
    with jobs.job(tmp_path, body, "--max-restarts=2") as job:
        assert job.ended() == 1, job.describe()
        assert [e["attempt"] for e in job.told("ran")] == [0, 1, 2]
        assert "exitcode  : 3" in job.err


def test_a_file_that_is_appended_to_for_the_first_time_has_each_line_once(tmp_path: Path) -> None:
    """The worker dies after it has written, and the same part of its script runs again."""
    body = """
        import torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        dist.init_process_group("gloo")
        model = DistributedDataParallel(torch.nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        os.chdir("FOLDER")
        for step in range(8):
            model(torch.ones(2)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if RANK == 0 and step in (4, 6):
                with open("new.csv", "a") as new, open("old.csv", "a") as old:
                    for file in (new, old):
                        file.write(f"{step}\\n")
                if step == 4:
                    tell("wrote", pid=os.getpid())
                    await_release("go")
            dist.barrier()
    """
    (tmp_path / "old.csv").write_text("before\n")
    flags = ("--nproc-per-node=2", "--recovery=in-place")
    body = body.replace("FOLDER", str(tmp_path))
    with jobs.job(tmp_path, body, *flags, forked=True, fifos=["go"]) as job:
        (wrote,) = job.await_told("wrote")
        os.kill(wrote["pid"], signal.SIGKILL)
        job.await_told("wrote", 2)
        job.release("go")
        assert job.ended() == 0, job.describe()
    assert (tmp_path / "new.csv").read_text() == "4\n6\n", job.describe()
    assert (tmp_path / "old.csv").read_text() == "before\n4\n6\n"


def test_a_replacement_sees_the_files_as_its_restart_found_them(tmp_path: Path) -> None:
    """The attempt before has written the checkpoint from which this one goes on: a replay of it
    must find that file, though the job has made it."""
    body = """
        import torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        dist.init_process_group("gloo")
        torch.manual_seed(1)
        model = DistributedDataParallel(torch.nn.Linear(4, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        path = os.path.join(os.environ["FRTEST_FOLDER"], "checkpoint.pt")
        step = 0
        if os.path.exists(path):
            found = torch.load(path)
            step = found["step"]
            model.module.load_state_dict(found["model"])
        while step < 30:
            loss = model(torch.full((2, 4), float(step + RANK))).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            loss.item()
            tell("step", step=step)
            if step == 8 and ATTEMPT == 0:
                if RANK == 0:
                    torch.save({"step": step, "model": model.module.state_dict()}, path)
                dist.barrier()
                os.kill(os.getpid(), signal.SIGKILL)
        tell("done", step=step, weights=model.module.weight.tolist())
        dist.destroy_process_group()
    """
    flags = ("--nproc-per-node=2", "--max-restarts=1")
    with jobs.job(tmp_path, body, *flags, forked=True, recovery="in-place") as job:
        (first,) = job.await_told("step", rank=1, attempt=1, step=15)
        os.kill(first["pid"], signal.SIGKILL)
        job.await_told("done", 2)
        assert job.ended() == 0, job.describe()
    ends = job.told("done")
    assert [e["step"] for e in ends] == [30, 30]
    assert ends[0]["weights"] == ends[1]["weights"]


def test_nothing_of_a_rank_is_left_when_it_is_replaced_in_place(tmp_path: Path) -> None:
    """Of the other rank everything stays. A daemon that has kept nothing of its rank is named."""
    body = """
        def bare_daemon(**options):
            r, w = os.pipe()
            pid = os.fork()
            if pid == 0:
                found = sleeper(env={"LC_ALL": "C"}, start_new_session=True, **options).pid
                os.write(w, b"%d" % found)
                os._exit(0)
            os.waitpid(pid, 0)
            return int(os.read(r, 20))

        first = os.environ["FLASHRUN_INCARNATION"] == "0"
        if not first:
            tell("begun")
            await_release("looked")
        import torch, torch.distributed as dist

        dist.init_process_group("gloo")
        for step in range(8):
            dist.all_reduce(torch.ones(1))
            if step == 4 and first:
                null = subprocess.DEVNULL
                hidden = bare_daemon(stdin=null, stdout=null, stderr=null) if RANK else 0
                tell("family", pids=[sleeper().pid, *daemon(), bare_daemon()], hidden=hidden)
                if RANK:
                    forever()
        dist.barrier()
    """
    flags = ("--nproc-per-node=2",)
    with jobs.job(tmp_path, body, *flags, fifos=["looked"], recovery="in-place") as job:
        family = {e["rank"]: e for e in job.await_told("family", 2)}
        os.kill(family[1]["pid"], signal.SIGKILL)
        job.await_told("begun")
        assert [pid for pid in family[1]["pids"] if jobs.seen(pid)] == [], job.describe()
        assert all(jobs.seen(pid) for pid in family[0]["pids"]), job.describe()
        hidden = family[1]["hidden"]
        assert jobs.seen(hidden)
        job.await_output(f"process {hidden} has left its rank", "err")
        job.release("looked")
        assert job.ended() == 0, job.describe()
        assert job.err.count("has left its rank") == 1
        assert not [e for e in [*family[0]["pids"], hidden] if jobs.seen(e)]
