"""The command line: what belongs to whom, and what is refused before any worker starts."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import argparse_util
from torch.distributed import run as torchrun

from flashrun import early
from flashrun.command_line import make_parser, split_at_script
from flashrun.errors import UsageError
from flashrun.job import Job
from flashrun.node.start import _warn
from flashrun.run import parse
from flashrun.torch_here import check_version

FLASHRUN = str(Path(sys.executable).parent / "flashrun")


@pytest.fixture(autouse=True)
def _scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a script and modules, as the current one; its own temporary folder."""
    (tmp_path / "train.py").write_text("print('hi')\n")
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("raise SystemExit('must not be imported')\n")
    (tmp_path / "pkg" / "inner.py").write_text("")
    (tmp_path / "runnable").mkdir()
    (tmp_path / "runnable" / "__init__.py").write_text("")
    (tmp_path / "runnable" / "__main__.py").write_text("")
    (tmp_path / "temporary").mkdir()
    (tmp_path / "secret.py").write_text("")
    (tmp_path / "dangling.py").symlink_to(tmp_path / "nowhere")
    (tmp_path / "broken.zip").write_bytes(b"PK\x05\x06" + b"\0" * 18)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    for name in list(os.environ):
        if name.startswith(("PET_", "FLASHRUN_")):
            monkeypatch.delenv(name)
    # config_from_args sets it for the workers; monkeypatch takes it back.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # What is refused for want of a GPU is refused on a machine that has one, too.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)


def job(*argv: str) -> Job:
    early.refuse(argv, os.environ)  # refuses nothing that is right
    made = parse(argv, os.environ)
    assert made is not None
    return made


# -- what is after the script is the script's ------------------------------------------------------

NASTY = ["--", "--logs", "--log", "x", "--r=16", "--n", "3", "--m", "2", "-m", "-r3", "-", "",
         "--nnodes=9", "--config", "-h", "--help", "--version", "a b", "ü", "exec"]  # fmt: skip


@pytest.mark.parametrize(
    "rest",
    [["--logs", "x"], ["--log", "x"], ["--r=16"], ["--n", "3"], ["--m", "2"], ["--", "a"],
     ["--", "--", "-m"], NASTY],
)  # fmt: skip
def test_the_script_keeps_its_arguments(rest: list[str]) -> None:
    assert job("--nproc-per-node", "2", "train.py", *rest).args == tuple(rest)


@settings(max_examples=300, deadline=None)
@given(
    head=st.lists(
        st.sampled_from(
            [
                ["--nnodes=2"],
                ["--nnodes", "2"],
                ["-r", "3"],
                ["-r3"],
                ["-t", "1"],
                ["-m"],
                ["--max-restarts", "1"],
                ["--standalone"],
                ["--spares", "1"],
                ["--no-python"],
                ["--role", "-x"],
                ["--rdzv_id=a=b"],
            ]
        )
    ),
    separator=st.booleans(),
    rest=st.lists(st.one_of(st.sampled_from(NASTY), st.text(max_size=6))),
)
def test_the_split_is_exact(head: list[list[str]], separator: bool, rest: list[str]) -> None:
    parser = make_parser({})
    flat = [token for group in head for token in group]
    argv = [*flat, *(["--"] if separator else []), "train.py", *rest]
    before, after = split_at_script(parser, argv)
    assert after == ["train.py", *rest]
    parser.parse_args([*before, "--", "train.py"])  # what is before is complete


@settings(max_examples=60, deadline=None)
@given(rest=st.lists(st.one_of(st.sampled_from(NASTY), st.text(max_size=6))))
def test_the_job_has_the_very_arguments(rest: list[str]) -> None:
    made = job("-r3", "--log-dir", os.devnull, "train.py", *rest)
    assert (made.target, made.args) == ("train.py", tuple(rest))


def test_options_before_the_script() -> None:
    made = job("--nnodes=1:3", "--rdzv-backend", "c10d", "--rdzv-endpoint=localhost:1",
               "--max-r", "2", "-r3", "-t", "0:1", "--role=-odd", "--monitor_interval=0.5",
               "--spares=2", "train.py")  # fmt: skip
    launch = made.launch
    assert (launch.min_nodes, launch.max_nodes, launch.max_restarts) == (1, 3, 2)
    assert launch.role == "-odd" and launch.monitor_interval == 0.5
    assert made.settings.spares == 2 and made.kind == "script" and made.target == "train.py"


def test_a_script_whose_name_begins_with_a_dash() -> None:
    Path("-odd.py").write_text("")
    made = job("--nnodes=1", "--", "-odd.py", "--", "x")
    assert (made.target, made.args) == ("-odd.py", ("--", "x"))


def test_defaults_from_pet_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NPROC_PER_NODE", "3")
    monkeypatch.setenv("PET_MAX_RESTARTS", "4")
    monkeypatch.setenv("PET_MODULE", "1")
    made = job("pkg.inner", "a")
    assert (made.launch.nproc_per_node, made.launch.max_restarts) == (3, 4)
    assert (made.kind, made.target, made.args) == ("module", "pkg.inner", ("a",))
    monkeypatch.setenv("PET_MODULE", "0")
    assert job("--nproc-per-node=1", "train.py").launch.nproc_per_node == 1


@pytest.mark.parametrize(
    ("argv", "kind"),
    [
        (["train.py"], "script"),
        (["runnable"], "script"),
        (["-m", "runnable"], "module"),
        (["-m", "pkg.inner"], "module"),
        (["--no-python", "sh", "-c", "true"], "program"),
        (["--run-path", "train.py"], "run-path"),
    ],
)
def test_kinds(argv: list[str], kind: str) -> None:
    assert job(*argv).kind == kind


def test_what_a_newer_torch_adds_comes_along(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Flags of its parser, with and without a value, as PET_* too; after the script not."""
    original = torchrun.get_args_parser

    def newer() -> argparse.ArgumentParser:
        parser = original()
        parser.add_argument("--brand-new", type=int, action=argparse_util.env, default=7)
        parser.add_argument("--all-new", action=argparse_util.check_env)
        return parser

    monkeypatch.setattr(torchrun, "get_args_parser", newer)
    seen: list[argparse.Namespace] = []
    config = torchrun.config_from_args
    monkeypatch.setattr(
        torchrun, "config_from_args", lambda args: (seen.append(args), config(args))[1]
    )
    made = job("--brand-new", "3", "--all-new", "-r3", "train.py", "--brand-new", "x", "--all-new")
    assert made.args == ("--brand-new", "x", "--all-new")
    assert (seen[0].brand_new, seen[0].all_new) == (3, True)
    monkeypatch.setenv("PET_BRAND_NEW", "5")
    job("train.py")
    assert (seen[1].brand_new, seen[1].all_new) == (5, False)
    with pytest.raises(UsageError, match="--brand-new: invalid int value"):
        parse(["--brand-new=x", "train.py"], os.environ)
    with pytest.raises(SystemExit):
        parse(["--help"], os.environ)
    assert "--brand-new" in capsys.readouterr().out


def test_one_node_meets_nobody() -> None:
    alone = job("train.py").launch
    assert (alone.rdzv_backend, alone.rdzv_endpoint) == ("c10d", "localhost:0")
    assert alone.run_id not in ("none", job("--standalone", "train.py").launch.run_id)
    # What torchrun sets aside is not refused: clusters set PET_NODE_RANK for one node, too.
    assert job("--node-rank=3", "train.py").launch.rdzv_backend == "c10d"
    aside = job("--standalone", "--rdzv-backend=etcd", "--nnodes=2", "train.py").launch
    assert (aside.rdzv_backend, aside.max_nodes) == ("c10d", 1)
    static = job("--master-port=1234", "train.py").launch
    assert (static.rdzv_backend, static.rdzv_endpoint) == ("static", "127.0.0.1:1234")


def test_what_only_looks_like_a_zip_file_is_a_script() -> None:
    Path("tail.py").write_bytes(b"print(1)\nPK\x05\x06aaaaaaaaaaaaaaaaaa")
    assert job("tail.py").kind == "script"


def test_a_pipe_is_not_read_by_the_checks() -> None:
    os.mkfifo("pipe.py")  # opening it would wait for a writer for ever
    assert job("pipe.py").target == "pipe.py"


def test_a_module_with_the_name_of_one_that_the_launcher_has_loaded() -> None:
    Path("yaml").mkdir()
    Path("yaml/__init__.py").write_text("")
    Path("yaml/train.py").write_text("")
    assert job("-m", "yaml.train").target == "yaml.train"


def test_another_interpreter_looks_for_its_modules_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "python"
    other.symlink_to(sys.executable)
    monkeypatch.setenv("PYTHON_EXEC", str(other))
    made = job("-m", "only_there")
    assert (made.python, made.target) == (str(other), "only_there")


# -- refusals --------------------------------------------------------------------------------------

REFUSED: list[tuple[list[str], list[str]]] = [
    ([], ["no script given"]),
    (["--nnodes=2"], ["no script given"]),
    (["nope.py"], ["nope.py", "does not exist"]),
    (["statsu"], ["statsu", "does not exist", "did you mean 'flashrun status'?"]),
    (["pkg"], ["'pkg'", "without __main__.py"]),
    (["dangling.py"], ["dangling.py", "nowhere"]),
    (["broken.zip"], ["zip file without __main__.py"]),
    (["-m", "pkg"], ["-m pkg", "without __main__"]),
    (["-m", "pkg.nothing"], ["no module 'pkg.nothing'"]),
    (["-m", "train.py"], ["-m train.py", "'train' is not a package"]),
    (["-m", "no_such_module"], ["no module 'no_such_module'"]),
    (["--no-python", "no-such-program"], ["--no-python", "no-such-program", "PATH"]),
    (["--no-python", "./train.py"], ["./train.py", "executed"]),
    (["-m", "--no-python", "runnable"], ["--module", "--no-python"]),
    (["--run-path", "nope.py"], ["nope.py", "does not exist"]),
    (["--nproc-per-node=0", "train.py"], ["--nproc-per-node", "0 workers", "at least 1"]),
    (["--nproc_per_node", "-2", "train.py"], ["--nproc_per_node", "-2"]),
    (["--nproc-per-node=some", "train.py"], ["'some'", "auto, cpu, gpu"]),
    (["--nproc-per-node=gpu", "train.py"], ["no GPU"]),
    (["--nproc-per-node=xpu", "train.py"], ["xpu"]),
    (["--nnodes=two", "train.py"], ["--nnodes", "'two'", "MIN:MAX"]),
    (["--nnodes=0", "train.py"], ["--nnodes", "at least 1"]),
    (["--nnodes=3:2", "train.py"], ["--nnodes", "give 2:3"]),
    (["--nnodes=1:2:3", "train.py"], ["--nnodes", "MIN:MAX"]),
    (["--max-restarts=-1", "train.py"], ["--max-restarts", "-1 is negative"]),
    (["--max-restarts=x", "train.py"], ["--max-restarts", "invalid int value"]),
    (["--monitor-interval=0", "train.py"], ["--monitor-interval", "seconds > 0"]),
    (["--shutdown-timeout=-1", "train.py"], ["--shutdown-timeout", "negative"]),
    (["-r", "7", "train.py"], ["-r", "'7'", "stdout"]),
    (["--tee=0:9", "train.py"], ["--tee", "'0:9'"]),
    (["--local-ranks-filter=0,x", "train.py"], ["--local-ranks-filter", "'0,x'"]),
    (["--log-dir=train.py", "train.py"], ["--log-dir", "is a file"]),
    (["--log-dir=train.py/inside", "train.py"], ["--log-dir", "train.py is a file"]),
    (["-r", "-x", "train.py"], ["-r", "'-x'"]),
    (["--config=", "train.py"], ["--config", "no file"]),
    (["--signals-to-handle=SIGTERN", "train.py"], ["SIGTERN", "did you mean 'SIGTERM'?"]),
    (["--signals-to-handle=SIGKILL", "train.py"], ["SIGKILL cannot be handled"]),
    (["--rdzv-backend=c11d", "train.py"], ["'c11d'", "did you mean 'c10d'?"]),
    (["--rdzv-backend=etcd", "train.py"], ["etcd", "v2", "flash-etcd"]),
    (["--rdzv-backend=etcd-v2", "train.py"], ["etcd-v2", "flash-etcd"]),
    (["--rdzv-conf=abc", "train.py"], ["--rdzv-conf", "'abc'", "KEY=VALUE"]),
    (["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=h:port", "train.py"],
     ["--rdzv-endpoint: ", "'h:port'", "HOST:PORT"]),
    (["--nnodes=2", "--rdzv-backend=flash-etcd", "train.py"], ["--rdzv-endpoint: etcd", "HOST:"]),
    (["--nnodes=2", "--rdzv-endpoint=h", "train.py"], ["--rdzv-endpoint: ", "'h'", "no port"]),
    (["--nnodes=2", "--node-rank=2", "train.py"], ["--node-rank", "2 is not a rank of 2 nodes"]),
    (["--master-port=70000", "train.py"], ["--master-port", "65535"]),
    (["--event-log-handler=nobody", "train.py"], ["--event-log-handler", "'nobody'", "null"]),
    (["--logs-specs=nobody", "train.py"], ["--logs-specs", "'nobody'"]),
    (["--numa-binding=node", "train.py"], ["--numa-binding", "no GPU"]),
    (["--numa-binding=nodes", "train.py"], ["--numa-binding", "invalid choice"]),
    (["--nproc", "train.py"], ["no script given"]),
    (["--nnodes"], ["--nnodes needs a value"]),
    (["--bogus", "train.py"], ["unknown option --bogus", "see flashrun --help"]),
    (["--log-dir=/proc/nope", "train.py"], ["--log-dir", "'/proc/nope'", "another folder"]),
    (["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-conf=join_timeout=xx",
      "train.py"], ["--rdzv-conf", "join_timeout", "integer"]),
    (["--nnods=2", "train.py"], ["unknown option --nnods", "did you mean '--nnodes'?"]),
    (["--nprocs=2", "train.py"], ["unknown option --nprocs", "did you mean '--nproc-per-node'?"]),
    (["--rdzv=x", "train.py"], ["--rdzv could be"]),
    (["-z", "train.py"], ["unknown option -z"]),
    (["--recovery=fast", "train.py"], ["--recovery", "in-place, restart, off"]),
    (["--config=nope.yaml", "train.py"], ["--config", "nope.yaml"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--standalone", "--spares=1"], "--spares has no effect here: this job meets at a free"),
        (["--nnodes=2", "--spares=1"], "--spares has no effect with --rdzv-backend=static"),
        (["--nnodes=2", "--spares=1", "--rdzv-backend=flash", "--rdzv-endpoint=h:1"], ""),
        (["--nnodes=2", "--rdzv-backend=flash"], "no --rdzv-endpoint: only nodes on this machine"
         " meet, at localhost:29400;"),
        (["--rdzv-backend=flash"], ""),
    ],
)  # fmt: skip
def test_what_can_have_no_effect_is_told(
    argv: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    _warn(job(*argv, "train.py"))
    told = capfd.readouterr().err
    assert f"flashrun: warning: {said}" in told if said else not told


def _refused_early(argv: list[str]) -> str:
    try:
        early.refuse(argv, os.environ)
    except UsageError as error:
        return str(error)
    return ""


_RIGHT = (
    r"[;,.:(] ?(or |so )?([Gg]ive|did you mean|see|look|leave|choose from|usage|known:|write it out"
    r"|Right would be|switches)"
)


@pytest.mark.parametrize(("argv", "said"), REFUSED, ids=[" ".join(a) or "-" for a, _ in REFUSED])
def test_refused(argv: list[str], said: list[str], tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        parse(argv, os.environ)
    message = str(caught.value)
    for words in said:
        assert words in message
    assert _refused_early(argv) in ("", message)
    assert "\n" not in message
    assert re.search(_RIGHT, message), "says what would be right"
    assert not list((tmp_path / "temporary").iterdir()), "a refusal leaves nothing behind"


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("PET_NNODES", "two", "environment, PET_NNODES"),
        ("PET_MAX_RESTARTS", "x", "environment, PET_MAX_RESTARTS"),
        ("PET_MODULE", "yes", "PET_MODULE"),
        ("PET_NPROC_PER_NODE", "0", "environment, PET_NPROC_PER_NODE"),
        ("PET_RDZV_ENDPOINT", "h:port", "environment, PET_RDZV_ENDPOINT"),
        ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "soon", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"),
        ("PYTHON_EXEC", "/no/python", "PYTHON_EXEC"),
        ("FLASHRUN_RECOVRY", "off", "did you mean 'FLASHRUN_RECOVERY'?"),
    ],
)
def test_refused_from_the_environment(
    variable: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(UsageError, match=said.replace("?", r"\?")) as caught:
        parse(["train.py"], os.environ)
    assert re.search(_RIGHT, str(caught.value)), "says what would be right"


@pytest.mark.parametrize(
    ("version", "fits"),
    [("2.13.0+cpu", True), ("2.14.1", True), ("3.0", True), ("2.12.9", False), ("1.13", False),
     ("2.2.0a0+git1", False), ("mine", False)],
)  # fmt: skip
def test_torch_versions(version: str, fits: bool) -> None:
    if fits:
        check_version(version)
        return
    with pytest.raises(UsageError, match=r"needs 2\.13 or newer"):
        check_version(version)


@pytest.mark.parametrize(
    ("cuda", "said"), [(None, "built without CUDA"), ("12.8", "look at nvidia-smi")]
)
def test_gpus_that_are_not_there(
    cuda: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(UsageError, match=rf"--nproc-per-node: 'gpu' asked for.*{said}"):
        parse(["--nproc-per-node=gpu", "train.py"], os.environ)


@pytest.mark.parametrize(
    ("stub", "said"),
    [
        ("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')",
         ["cannot import torch (No module named 'torch')", "pip install"]),
        ("import ctypes; ctypes.CDLL('libnone.so.1')", ["cannot import torch", "libnone.so.1"]),
        ("__version__ = '2.4.1'", ["torch 2.4.1 is too old", "2.13"]),
    ],
    ids=["absent", "broken", "old"],
)  # fmt: skip
@pytest.mark.parametrize("command", [["train.py"], ["exec", "--", "tune", "run"]])
def test_a_torch_that_cannot_be_used(
    stub: str, said: list[str], command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("stub").mkdir()
    Path("stub/torch.py").write_text(stub)
    monkeypatch.setenv("PYTHONPATH", "stub")
    done = flashrun(*command)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    for words in said:
        assert words in done.stderr
    assert done.stderr.startswith("flashrun: error: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--nnodes=1", "tain.py"], "the script 'tain.py' does not exist"),
        (["--nnodes=1", "--recovery=fast", "train.py"], "--recovery: 'fast' is not valid"),
        (["--config=file.yaml", "train.py"], "file.yaml: unknown setting 'spars'"),
        (["train.py"], "environment: unknown variable FLASHRUN_SPARS"),
    ],
)
def test_what_needs_no_torch_is_told_before_it_is_loaded(
    argv: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("stub").mkdir()
    Path("stub/torch.py").write_text("raise ImportError('loaded')")
    Path("file.yaml").write_text("spars: 1\n")
    monkeypatch.setenv("PYTHONPATH", "stub")
    if "variable" in said:
        monkeypatch.setenv("FLASHRUN_SPARS", "1")
    done = flashrun(*argv)
    assert done.returncode == 2
    assert done.stderr.startswith(f"flashrun: error: {said}")


def test_early_refusals_are_of_what_needs_no_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    """What may be overruled, or is no script, is left to the parser; so is a pipe."""
    for argv in (["-m", "tain"], ["--no-python", "tain"], ["--nnodes", "1", "tain.py"],
                 ["--detection-timeout=3", "--heartbeat-int=1", "train.py"]):  # fmt: skip
        early.refuse(argv, os.environ)
    os.mkfifo("pipe")
    early.refuse(["--config=pipe", "train.py"], os.environ)
    monkeypatch.setenv("PET_MODULE", "1")
    early.refuse(["tain"], os.environ)


@pytest.mark.parametrize("module", ["torch", "numpy"])
def test_an_interrupt_while_the_launcher_loads_torch(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """numpy is imported by torch's C code, which goes on without it: the job ran, or failed."""
    Path("stub").mkdir()
    Path("train.py").touch()
    Path(f"stub/{module}.py").write_text(
        "import os, signal\nos.write(1, b'loading')\nwhile True: signal.pause()\n"
    )
    monkeypatch.setenv("PYTHONPATH", "stub")
    with subprocess.Popen(
        [FLASHRUN, "train.py"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.read(7) == "loading"
        launcher.send_signal(signal.SIGINT)
        _, said = launcher.communicate(timeout=60)
    assert said == "flashrun: interrupted\n"
    assert launcher.returncode == 1


def test_an_unreadable_script() -> None:
    """Root may read everything, so it is asked for by a child that is not root."""
    Path("secret.py").chmod(0)
    for folder in (Path.cwd(), *Path.cwd().parents[:3]):
        if folder.stat().st_uid == os.getuid() and folder.stat().st_mode & 0o055 != 0o055:
            folder.chmod(folder.stat().st_mode | 0o055)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = "nothing"
        try:
            if os.getuid() == 0:
                os.setuid(65534)
            parse(["secret.py"], os.environ)
        except UsageError as error:
            said = str(error)
        finally:
            os.write(write, said.encode())
            os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    with open(read) as answer:
        assert re.search(r"secret\.py.*cannot be read; look at", answer.read())


# -- the program itself ----------------------------------------------------------------------------


def flashrun(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [FLASHRUN, *argv], capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL
    )


def test_usage_errors_end_with_status_2_and_one_line() -> None:
    done = flashrun("--nnodes=two", "train.py")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("flashrun: error: --nnodes: 'two'")
    assert done.stderr.count("\n") == 1


def test_help_and_version() -> None:
    shown = flashrun("--help")
    assert shown.returncode == 0
    for words in ("--nproc-per-node", "--recovery", "--spares", "--max-retries", "--config",
                  "--heartbeat-interval", "--detection-timeout", "--log-level", "flashrun:",
                  "FLASHRUN_<NAME>"):  # fmt: skip
        assert words in shown.stdout
    shown = flashrun("--version")
    assert shown.returncode == 0 and shown.stdout.startswith("flashrun 0.1")


def test_one_hash_seed_unless_the_user_chose_one(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("seed.py").write_text("import os; print(os.environ['PYTHONHASHSEED'])\n")
    for given_, expected in ((None, "1"), ("", "1"), ("7", "7")):
        if given_ is None:
            monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        else:
            monkeypatch.setenv("PYTHONHASHSEED", given_)
        assert flashrun("seed.py").stdout == f"{expected}\n"


def test_a_launcher_in_a_worker_is_a_job_of_its_own() -> None:
    Path("inner.py").write_text("import os; print('inner', os.environ['FLASHRUN_JOB_TAG'][:16])\n")
    Path("outer.py").write_text(
        "import os, subprocess, sys\n"
        "print('outer', os.environ['FLASHRUN_JOB_TAG'][:16], flush=True)\n"
        "sys.exit(subprocess.call([sys.executable, '-m', 'flashrun', 'inner.py']))\n"
    )
    done = flashrun("outer.py")
    assert done.returncode == 0, done.stderr
    (outer, one), (inner, two) = (line.split() for line in done.stdout.splitlines())
    assert (outer, inner) == ("outer", "inner") and one != two


@pytest.mark.parametrize(
    ("level", "shown"),
    [("info", ["info", "error"]), ("warning", ["error"]),
     pytest.param("error", ["error"], marks=pytest.mark.slow)],
)  # fmt: skip
def test_what_a_log_level_shows(level: str, shown: list[str]) -> None:
    Path("fails.py").write_text("raise SystemExit(3)\n")
    done = flashrun(f"--log-level={level}", "--no-zygote", "fails.py")
    lines = {"info": "workers start as fresh processes", "error": "ended: exit code 3"}
    assert [name for name, line in lines.items() if line in done.stderr] == shown, done.stderr


@pytest.mark.parametrize("forked", [False, True])
def test_the_script_gets_its_arguments(forked: bool) -> None:
    """In the process itself: what torchrun calls ambiguous, or eats."""
    Path("tells.py").write_text("import json, sys; print(json.dumps(sys.argv[1:]))\n")
    rest = ["--", "--logs", "x", "--log", "x", "--r=16", "--n", "3", "--m", "2", "-m", "--", "-"]
    flags = [] if forked else ["--no-zygote"]
    done = flashrun("--nproc-per-node=2", *flags, "tells.py", *rest)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == [rest, rest]


def test_python_dash_m() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flashrun", "train.py"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "hi\n"), done.stderr


def test_events_are_written_one_a_line(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("raise SystemExit(3)\n")
    done = flashrun("--events", "events.jsonl", "fails.py")
    assert done.returncode == 1
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    exits = [event for event in events if event["event"] == "worker-exited"]
    assert [(event["rank"], event["exitcode"]) for event in exits] == [(0, 3)]
    assert all({"time", "level", "line"} <= event.keys() for event in events)


def test_an_events_file_that_cannot_be_written() -> None:
    with pytest.raises(UsageError, match="events: cannot write '/no/such/folder/e'"):
        parse(["--events=/no/such/folder/e", "train.py"], os.environ)


@pytest.mark.parametrize("fd", [1, 2])
def test_started_with_a_closed_stream(fd: int, tmp_path: Path) -> None:
    """``flashrun train.py >&-``: the job runs, and no socket takes the stream's place."""
    (tmp_path / "says.py").write_text(
        "import os, sys\nprint('out')\nprint('err', file=sys.stderr)\n"
        "open('done', 'w').write(' '.join(os.readlink(f'/proc/self/fd/{n}') for n in (1, 2)))\n"
    )
    done = subprocess.run(
        [FLASHRUN, "says.py"], capture_output=True, timeout=120, preexec_fn=lambda: os.close(fd)
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "done").read_text().split()[fd - 1] == os.devnull
