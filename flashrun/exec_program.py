"""``flashrun exec -- PROGRAM …``: a program that calls torch.distributed.run itself gets flashrun.

The program (``accelerate launch``, ``tune run``, ``fabric run`` …) runs in this process, unchanged;
the entry points of torch's launcher are replaced meanwhile by ones that start flashrun as a child
and wait for it. The arguments travel as JSON through a file in memory. flashrun's own settings come
from the environment (FLASHRUN_RECOVERY=… flashrun exec -- PROGRAM …).

Relies on torch 2.13: ``torch.distributed.run.run(args)`` and ``main(args)`` take a Namespace of
``get_args_parser`` and a list (torch/distributed/run.py);
``torch.distributed.launcher.api.launch_agent`` is what ``elastic_launch`` calls.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import uuid
from argparse import Action, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from typing import TYPE_CHECKING, Any

from flashrun.errors import UsageError
from flashrun.observe.console import say

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

    from flashrun.job import Job

_FD_VARIABLE = "FLASHRUN_ARGS_FD"

_DOOR = os.path.join(os.path.dirname(os.path.abspath(__file__)), "__main__.py")

# The job is in a session of its own, so each of these comes once: from here.
_PASSED_ON = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
)  # fmt: skip


def received_job(environ: Mapping[str, str]) -> Job:
    """The job that another process of ours has handed over, checked like a command line.

    Raises:
        UsageError: as for a command line.
    """
    from flashrun import checks
    from flashrun.command_line import Origins, make_parser
    from flashrun.node.linux import die_with_parent
    from flashrun.run import job_from_namespace

    fd = int(os.environ.pop(_FD_VARIABLE))
    with open(fd, encoding="utf-8") as pipe:
        handed_over = json.load(pipe)
    # To the user that process is the launcher: nothing of the job outlives it either. A milder
    # signal can come several times (once per dying thread of it), and the second means "kill".
    die_with_parent(handed_over["from"])
    parser = make_parser(environ)
    args = Namespace(**handed_over["args"])
    for action in parser._actions:
        if action.dest in ("help", "training_script", "training_script_args"):
            continue
        # What the program's parser does not have keeps its default.
        value = args.__dict__.setdefault(action.dest, action.default)
        args.__dict__[action.dest] = _as_parsed(value, action)
    origin = Origins(parser, [], environ)
    checks.check_all(args, origin)
    return job_from_namespace(args, environ, origin)


def _as_parsed(value: Any, action: Action) -> Any:
    """``value`` as the option's type; programs put ``"29500"`` where the parser puts 29500.

    Raises:
        UsageError: it cannot be read as that type.
    """
    if action.type in (int, float) and isinstance(value, str):
        try:
            return action.type(value)
        except ValueError:
            flag = action.option_strings[0]
            raise UsageError(f"flashrun exec: the program gives {flag} {value!r}") from None
    if action.type is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    return value


def run_namespace(args: Namespace) -> None:
    """What stands in for ``torch.distributed.run.run``: the same job under flashrun.

    What is not an argument of torch's launcher is left out, as torch ignores it: programs hand over
    the namespace of their own parser, with functions in it.

    Raises:
        SystemExit: the job failed; the code is flashrun's.
        UsageError: the arguments hold something that cannot be handed to another process.
    """
    from torch.distributed.run import get_args_parser

    known = {action.dest for action in get_args_parser()._actions} | {"use_env"}
    _hand_over({name: value for name, value in vars(args).items() if name in known})


def _hand_over(arguments: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> None:
    message = {"from": os.getpid(), "args": arguments}
    try:
        data = json.dumps(message, default=os.fspath).encode()
    except TypeError as error:
        text = f"flashrun exec: the program's launch arguments are not plain: {error}"
        raise UsageError(text) from None
    fd = os.memfd_create("flashrun-args", 0)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(data)
        os.lseek(fd, 0, os.SEEK_SET)
        status = _run_child(fd, environ or {})
    finally:
        os.close(fd)
    if status != 0:
        raise SystemExit(status)


def _run_child(fd: int, environ: Mapping[str, str]) -> int:
    """Run flashrun in a session of its own and pass signals on to it.

    In the terminal's group the child would get a Ctrl-C both from the terminal and from here, and
    the second one means "kill".
    """
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def pass_on(number: int, frame: Any) -> None:
        if child is None:
            early.append(number)
        else:
            child.send_signal(number)

    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():  # python sets handlers only there
        for sig in _PASSED_ON:
            handler = signal.getsignal(sig)
            if handler is not None and handler != signal.SIG_IGN:
                before[sig] = signal.signal(sig, pass_on)
    try:
        child = subprocess.Popen(
            [sys.executable, _DOOR],
            pass_fds=[fd],
            env={**os.environ, **environ, _FD_VARIABLE: str(fd)},
            start_new_session=True,
        )
        while early:
            child.send_signal(early.pop(0))
        status = child.wait()
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)
    return status if status >= 0 else 128 - status


def _run_arguments(arguments: Sequence[str] | None = None) -> None:
    """Stands in for ``torch.distributed.run.main``."""
    from flashrun.command_line import make_parser, parse_head, split_at_script

    argv = list(sys.argv[1:] if arguments is None else arguments)
    parser = make_parser(os.environ)
    head, rest = split_at_script(parser, argv)
    _hand_over(vars(parse_head(parser, head, rest, os.environ)))


def why_not_ours(config: LaunchConfig, entrypoint: Any) -> str | None:
    """Why a call of ``launch_agent`` cannot be handed over; None if it can."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.run import run_script_path

    if not isinstance(entrypoint, str) and entrypoint is not run_script_path:
        return f"{getattr(entrypoint, '__qualname__', entrypoint)} is a function, not a script"
    if type(config.logs_specs) is not DefaultLogsSpecs:
        return f"{type(config.logs_specs).__name__} cannot be handed to another process"
    if config.metrics_cfg:
        return "its metrics_cfg has no flag"
    if config.numa_options is not None and config.numa_options.should_fall_back_if_binding_fails:
        return "numa_options that may fail have no flag"
    for key, value in config.rdzv_configs.items():
        if "," in str(value) or not str(value).strip():
            return f"its rendezvous configuration {key}={value!r} cannot be given as a flag"
    return None


def namespace_of(config: LaunchConfig, entrypoint: Any, arguments: Sequence[Any]) -> Namespace:
    """A LaunchConfig and a command as the flags that would have made them (``config_from_args``).

    Args:
        config: one that :func:`why_not_ours` has nothing against.
        entrypoint: a program, the interpreter included, or ``torch.distributed.run``'s own
            ``run_script_path``.
        arguments: the program's.
    """
    from flashrun.node.log_folder import is_temporary

    words = [str(argument) for argument in arguments]
    kind = "program" if isinstance(entrypoint, str) else "run-path"
    if entrypoint == os.environ.get("PYTHON_EXEC", sys.executable):
        plain = words[1:] if words[:1] == ["-u"] else words
        module = plain[:1] == ["-m"]
        plain = plain[1:] if module else plain
        if plain and not plain[0].startswith("-"):  # other options of python's have no flag
            kind, words = ("module" if module else "script"), plain
    if kind == "program":
        words = [str(entrypoint), *words]
    conf = {key: value for key, value in config.rdzv_configs.items() if key != "rank"}
    specs: Any = config.logs_specs
    ranks = specs._local_ranks_filter or ()
    numa: Any = config.numa_options
    return Namespace(
        nnodes=f"{config.min_nodes}:{config.max_nodes}",
        nproc_per_node=str(config.nproc_per_node),
        rdzv_backend=config.rdzv_backend,
        rdzv_endpoint=config.rdzv_endpoint,
        rdzv_id=config.run_id or str(uuid.uuid4()),
        rdzv_conf=",".join(f"{key}={value}" for key, value in conf.items()),
        node_rank=int(config.rdzv_configs.get("rank", 0)),
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        role=config.role,
        local_addr=config.local_addr,
        event_log_handler=config.event_log_handler,
        log_dir=None if is_temporary(specs.root_log_dir) else specs.root_log_dir,
        redirects=_streams(specs._redirects),
        tee=_streams(specs._tee),
        local_ranks_filter=",".join(map(str, sorted(ranks))),
        duplicate_stdout_filters=config.duplicate_stdout_filters or [],
        duplicate_stderr_filters=config.duplicate_stderr_filters or [],
        numa_binding=None if numa is None else numa.affinity_mode.value,
        virtual_local_rank=config.virtual_local_rank,
        signals_to_handle=config.signals_to_handle,
        shutdown_timeout=config.shutdown_timeout,
        no_python=kind == "program",
        module=kind == "module",
        run_path=kind == "run-path",
        standalone=False,
        training_script=words[0],
        training_script_args=words[1:],
    )


def _streams(value: Any) -> str:
    """``Std`` or a dict of them by local rank, as -r and -t take them."""
    if not isinstance(value, dict):
        return str(int(value))
    return ",".join(f"{rank}:{int(std)}" for rank, std in value.items()) or "0"


@contextmanager
def flashrun_in_place_of_torchrun() -> Iterator[None]:
    """Within this, torch's launcher starts flashrun; everything is put back afterwards."""
    import torch.distributed.launcher as launcher
    import torch.distributed.launcher.api as api
    import torch.distributed.run as torchrun

    from flashrun.node.log_folder import clean_up_logs

    original_agent = api.launch_agent

    def launch(config: Any, entrypoint: Any, arguments: list[Any], **others: Any) -> Any:
        why = why_not_ours(config, entrypoint)
        if why is not None:
            text = f"exec: {why}; torch's own launcher runs it"
            say(text, "warning", event="exec-torch")
            return original_agent(config, entrypoint, arguments, **others)
        flags = vars(namespace_of(config, entrypoint, arguments))
        clean_up_logs(config, succeeded=True)  # LaunchConfig has made a folder; ours is another
        prefix = config.log_line_prefix_template
        name = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"  # has no flag
        _hand_over(flags, {} if prefix is None else {name: prefix})
        return {}

    replacements: list[tuple[Any, str, Callable[..., Any]]] = [
        (torchrun, "run", run_namespace),
        (torchrun, "main", _run_arguments),
        (api, "launch_agent", launch),
        (launcher, "launch_agent", launch),
    ]
    # A program may have bound the functions to names of its own before this; it is run afterwards,
    # so only modules that are in memory already (a site customisation) could have.
    before = [(place, name, getattr(place, name, None)) for place, name, _ in replacements]
    for place, name, replacement in replacements:
        setattr(place, name, replacement)
    try:
        yield
    finally:
        for place, name, original in before:
            if original is None:
                delattr(place, name)
            else:
                setattr(place, name, original)


def _is_this_python(program: str) -> bool:
    """Whether ``program`` names the interpreter that runs this, in the same environment."""
    path = shutil.which(program)
    return (
        path is not None
        and re.fullmatch(r"python[\d.]*", os.path.basename(path)) is not None
        and os.path.dirname(os.path.abspath(path)) == os.path.dirname(sys.executable)
    )


def _run_program(program: str, arguments: Sequence[str]) -> None:
    """Run a console program of Python's in this process, as its own script would."""
    if _is_this_python(program):
        arguments = arguments[1:] if arguments[:1] == ["-u"] else arguments
        if arguments[:1] == ["-m"] and len(arguments) > 1:
            sys.argv = list(arguments[1:])
            sys.path.insert(0, os.getcwd())
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
            return
        if not arguments or arguments[0].startswith("-"):
            raise UsageError(
                f"flashrun exec: {program} {' '.join(arguments)}: only SCRIPT or -m MODULE can"
                " follow the interpreter"
            )
        program, arguments = arguments[0], arguments[1:]
        if not os.path.isfile(program):
            raise UsageError(f"flashrun exec: there is no script {program!r}")
        sys.argv = [program, *arguments]
        sys.path.insert(0, os.path.dirname(os.path.realpath(program)))
        runpy.run_path(program, run_name="__main__")
        return
    sys.argv = [program, *arguments]
    if os.sep not in program:
        scripts = [e for e in metadata.entry_points(group="console_scripts") if e.name == program]
        if scripts:
            sys.exit(scripts[0].load()())
    path = shutil.which(program) if not os.path.isfile(program) else program
    if path is None:
        raise UsageError(f"flashrun exec: there is no program {program!r} in PATH")
    with open(path, "rb") as file:
        first = file.read(300).splitlines()[:2]
    # pip writes "#!/bin/sh" and then exec of python where the interpreter's path is long.
    python = bool(first) and first[0].startswith(b"#!") and any(b"python" in x for x in first)
    if not path.endswith(".py") and not python:
        raise UsageError(
            f"flashrun exec: {path} is not a Python program, so nothing can be put into it; start"
            " it as it is and name flashrun in it where it names torchrun"
        )
    sys.argv[0] = path
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    runpy.run_path(path, run_name="__main__")


def main(argv: Sequence[str]) -> int:
    """``argv`` is what follows ``exec``; returns the program's exit status.

    Raises:
        UsageError: no program, or one that cannot be run this way.
        SystemExit: as the program ends.
    """
    arguments = list(argv[1:] if argv and argv[0] == "--" else argv)
    if not arguments:
        raise UsageError("flashrun exec: no program given; usage: flashrun exec -- PROGRAM [args]")
    if arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    with flashrun_in_place_of_torchrun():
        _run_program(arguments[0], arguments[1:])
    return 0
