"""``flashrun exec``: programs that call torch's launcher themselves get flashrun; torch stays as it
was for everybody else."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, get_args_parser, run_script_path
from torch.numa.binding import AffinityMode, NumaOptions

from flashrun.exec_program import flashrun_in_place_of_torchrun, namespace_of, why_not_ours
from tests.helpers import clean_environment

FLASHRUN = str(Path(sys.executable).parent / "flashrun")

WORKER = """
import os, sys
line = f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} {sys.argv[1:]}"
print(f"{line} {'FLASHRUN_RUN_DIR' in os.environ}\\n", end="")
sys.exit(int(os.environ.get("EXIT_WITH", "0")))
"""

# The ways in which launchers of other packages reach torch's.
PROGRAMS = {
    # accelerate launch
    "run-of-module": """
import sys
import torch.distributed.run as distrib_run
args = distrib_run.get_args_parser().parse_args(["--nproc-per-node=2", *sys.argv[1:]])
args.node_rank, args.master_port = "0", None
distrib_run.run(args)
print("after")
""",
    # tune run
    "run-imported": """
import pathlib, sys
from torch.distributed.run import get_args_parser, run
args = get_args_parser().parse_args(["--nproc-per-node", "2", *sys.argv[1:]])
args.func = lambda: None
args.config = "no-file-of-ours"
args.training_script = pathlib.Path(args.training_script)
run(args)
print("after")
""",
    # fabric run
    "main-with-arguments": """
import sys
import torch.distributed.run as torchrun
torchrun.main(["--nproc_per_node=2", "--nnodes=1", "--node_rank=0", *sys.argv[1:]])
print("after")
""",
    "elastic-launch": """
import sys
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2, run_id="x", max_restarts=0,
                      rdzv_backend="c10d", rdzv_endpoint="localhost:0")
elastic_launch(config, sys.executable)("-u", *sys.argv[1:])
print("after")
""",
}


@pytest.fixture
def worker(tmp_path: Path) -> Path:
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    return path


def execute(
    program: Path, *argv: str, environ: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [FLASHRUN, "exec", "--", str(program), *argv],
        capture_output=True,
        text=True,
        timeout=180,
        env=clean_environment(environ),
    )


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_get_flashrun(name: str, tmp_path: Path, worker: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAMS[name])
    done = execute(program, str(worker), "--lr", "x")
    assert done.returncode == 0, done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line.strip())
    expected = [f"rank {rank} of 2 ['--lr', 'x'] True" for rank in range(2)]
    assert lines == ["after", *expected]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "command"),
    [
        ("accelerate", "accelerate launch --multi_gpu --num_machines=1 --num_processes=2"),
        ("lightning_fabric", "fabric run --accelerator=cpu --devices=2 --strategy=ddp"),
        ("torchtune", "tune run --nproc-per-node=2"),
    ],
)
def test_the_real_programs_get_flashrun(
    package: str, command: str, tmp_path: Path, worker: Path
) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    program, *flags = command.split()
    arguments = [*flags, worker.name, "--config", "x"]  # tune takes no path
    done = subprocess.run(
        [FLASHRUN, "exec", "--", program, *arguments], capture_output=True, text=True,
        timeout=180, cwd=tmp_path, env=clean_environment({"HF_HOME": str(tmp_path)}),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    assert lines == [f"rank {rank} of 2 ['--config', 'x'] True" for rank in range(2)]


def test_the_exit_status_comes_through(tmp_path: Path, worker: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAMS["run-of-module"])
    done = execute(program, str(worker), environ={"EXIT_WITH": "7"})
    assert done.returncode == 1  # torchrun's status for a failed job
    assert "exitcode  : 7" in done.stderr
    assert "after" not in done.stdout


def test_usage_errors_come_through(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAMS["run-of-module"])
    done = execute(program, "no-such-script.py")
    assert done.returncode == 2
    assert "no-such-script.py" in done.stderr


@pytest.mark.parametrize("how", ["python script", "python -u -m module"])
def test_a_program_named_by_its_interpreter(how: str, tmp_path: Path, worker: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAMS["run-of-module"])
    words = [str(tmp_path / "program.py")] if how == "python script" else ["-u", "-m", "program"]
    done = subprocess.run(
        [FLASHRUN, "exec", "--", sys.executable, *words, str(worker)],
        capture_output=True, text=True, timeout=180, cwd=tmp_path, env=clean_environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if line) == [
        "after", "rank 0 of 2 [] True", "rank 1 of 2 [] True",
    ]  # fmt: skip


HOLDING = """
import os, signal, sys, time
def end(number, frame):
    print("asked by", signal.Signals(number).name, flush=True)
    sys.exit(0)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, end)
print("up", os.getpid(), flush=True)
while True:
    signal.pause()
"""


@pytest.mark.parametrize(
    ("sent", "to_group"),
    [(signal.SIGTERM, False), (signal.SIGINT, False), (signal.SIGINT, True)],
)
def test_a_signal_reaches_the_workers_once(
    sent: signal.Signals, to_group: bool, tmp_path: Path
) -> None:
    """To the group is what a terminal does; a second one would kill instead of ask."""
    (tmp_path / "worker.py").write_text(HOLDING)
    with started(tmp_path) as launcher:
        assert launcher.stdout is not None
        line = launcher.stdout.readline()
        assert line.startswith("up "), launcher.communicate(timeout=60)
        if to_group:
            os.killpg(launcher.pid, sent)
        else:
            launcher.send_signal(sent)
        out, err = launcher.communicate(timeout=60)
    assert f"asked by {sent.name}" in out
    assert "killing all" not in err
    assert launcher.returncode not in (0, -int(sent))  # as flashrun ends, the program not killed


def test_nothing_outlives_a_killed_program(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(HOLDING)
    with started(tmp_path) as launcher:
        assert launcher.stdout is not None
        line = launcher.stdout.readline()
        assert line.startswith("up "), launcher.communicate(timeout=60)
        pid = line.split()[1]
        handle = os.pidfd_open(int(pid))
        try:
            launcher.kill()
            launcher.communicate(timeout=60)  # until nobody of the job has the pipes any more
            ended, _, _ = select.select([handle], [], [], 60)
        finally:
            os.close(handle)
    assert ended, "the worker is still there"


@contextmanager
def started(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """``flashrun exec`` of a program like accelerate, in a process group of its own."""
    program = folder / "program.py"
    program.write_text(
        "import sys\nimport torch.distributed.run as r\n"
        "r.run(r.get_args_parser().parse_args(sys.argv[1:]))\n"
    )
    launcher = subprocess.Popen(
        [FLASHRUN, "exec", "--", str(program), str(folder / "worker.py")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=clean_environment(),
    )  # fmt: skip
    with launcher:
        try:
            yield launcher
        finally:
            launcher.kill()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "no program given"),
        (["no-such-program"], "no program 'no-such-program'"),
        (["/bin/sh"], "not a Python program"),
        ([sys.executable, "-c", "print()"], "only SCRIPT or -m MODULE"),
        ([sys.executable, "no-such.py"], "no script 'no-such.py'"),
    ],
)
def test_refusals(argv: list[str], said: str) -> None:
    done = subprocess.run(
        [FLASHRUN, "exec", "--", *argv], capture_output=True, text=True, timeout=120,
        env=clean_environment(),
    )  # fmt: skip
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_function_entry_point_is_torchs_own_business(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs\n"
        "from torch.distributed.launcher.api import LaunchConfig, elastic_launch\n"
        "def work():\n    print('worked')\n"
        "if __name__ == '__main__':\n"
        "    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1, run_id='x',\n"
        "        max_restarts=0, rdzv_backend='c10d', rdzv_endpoint='localhost:0',\n"
        f"        start_method='fork', logs_specs=DefaultLogsSpecs({str(tmp_path)!r}))\n"
        "    elastic_launch(config, work)()\n"
    )
    done = execute(program)
    assert done.returncode == 0, done.stderr
    assert "worked" in done.stdout
    assert "work is a function" in done.stderr


def config(**given: Any) -> LaunchConfig:
    given = {"logs_specs": DefaultLogsSpecs(os.devnull), **given}
    return LaunchConfig(
        min_nodes=1, max_nodes=2, nproc_per_node=3, run_id="x", rdzv_backend="c10d",
        rdzv_endpoint="host:1", **given,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("entrypoint", "arguments", "kind", "target", "rest"),
    [
        (sys.executable, ["-u", "s.py", "-m"], "script", "s.py", ["-m"]),
        (sys.executable, ["-u", "-m", "pkg.mod", "a"], "module", "pkg.mod", ["a"]),
        (sys.executable, ["-O", "s.py"], "program", sys.executable, ["-O", "s.py"]),
        ("prog", ["-u", "x"], "program", "prog", ["-u", "x"]),
        (run_script_path, ["/a/s.py", "1"], "run-path", "/a/s.py", ["1"]),
    ],
)
def test_a_command_is_taken_apart(
    entrypoint: Any, arguments: list[str], kind: str, target: str, rest: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.delenv("PYTHON_EXEC", raising=False)
    args = namespace_of(config(), entrypoint, arguments)
    flags = (args.no_python, args.module, args.run_path)
    wanted = {"script": (False, False, False), "module": (False, True, False),
              "program": (True, False, False), "run-path": (False, False, True)}  # fmt: skip
    assert (flags, args.training_script, args.training_script_args) == (wanted[kind], target, rest)


def test_a_launch_config_survives_as_flags(tmp_path: Path) -> None:
    """torch's own config_from_args makes the same configuration of them again."""
    before = config(
        logs_specs=DefaultLogsSpecs(
            str(tmp_path), redirects=Std.ALL, tee={0: Std.OUT, 1: Std.ERR}, local_ranks_filter={1}
        ),
        rdzv_configs={"timeout": 7, "read_timeout": 8}, role="r", max_restarts=4,
        monitor_interval=0.5, local_addr="127.0.0.1", event_log_handler="console",
        duplicate_stdout_filters=["a,b"], virtual_local_rank=True, shutdown_timeout=9,
        signals_to_handle="SIGTERM",
    )  # fmt: skip
    args = get_args_parser().parse_args(["placeholder"])
    vars(args).update(vars(namespace_of(before, "prog", [])))
    after, _, _ = config_from_args(args)
    skipped = {"logs_specs", "rdzv_configs", "duplicate_stderr_filters"}
    for field in dataclasses.fields(before):
        if field.name not in skipped:
            assert getattr(after, field.name) == getattr(before, field.name), field.name
    assert {k: str(v) for k, v in after.rdzv_configs.items()} == {
        "timeout": "7", "read_timeout": "8",
    }  # fmt: skip
    assert vars(after.logs_specs) == vars(before.logs_specs)


@pytest.mark.parametrize(
    ("given", "entrypoint", "said"),
    [
        ({}, "prog", None),
        ({}, print, "print is a function"),
        ({"logs_specs": type("Own", (DefaultLogsSpecs,), {})(os.devnull)}, "prog", "Own cannot"),
        ({"metrics_cfg": {"x": "y"}}, "prog", "metrics_cfg"),
        ({"numa_options": NumaOptions(AffinityMode.NODE, True)}, "prog", "numa_options"),
        ({"rdzv_configs": {"a": "1,2"}}, "prog", "a='1,2'"),
    ],
)
def test_what_cannot_be_handed_over_stays_torchs(
    given: dict[str, Any], entrypoint: Any, said: str | None
) -> None:
    why = why_not_ours(config(**given), entrypoint)
    assert (why is None) == (said is None)
    assert said is None or (why is not None and said in why)


def test_the_patch_undoes_itself() -> None:
    import torch.distributed.launcher as launcher
    import torch.distributed.launcher.api as api
    import torch.distributed.run as torchrun

    places = [(torchrun, "run"), (torchrun, "main"), (api, "launch_agent"),
              (launcher, "launch_agent")]  # fmt: skip
    before = [getattr(place, name, None) for place, name in places]
    with flashrun_in_place_of_torchrun():
        assert all(
            getattr(place, name) is not old
            for (place, name), old in zip(places, before, strict=True)
        )
    assert [getattr(place, name, None) for place, name in places] == before
