"""The command line: from arguments and environment to a checked job, and on to the supervisor."""

from __future__ import annotations

import os
import sys
import uuid
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from flashrun.collector import off_while_loading
from flashrun.errors import UsageError
from flashrun.interrupts import end_at_once, wait_until_after
from flashrun.torch_here import check_torch

if TYPE_CHECKING:
    from flashrun.job import Job

Outcome = int | Callable[[], None]

_USAGE_STATUS = 2  # as argparse's
_DEFAULT_PORT = 29500  # as torchrun's (torch.distributed.run.run)


def job_from_namespace(
    args: Namespace, environ: Mapping[str, str], origin: Callable[[str], str]
) -> Job:
    """A job from parsed arguments; also for a namespace that another program has parsed.

    Follows ``torch.distributed.run.run`` and ``config_from_args`` (torch 2.13).

    Args:
        args: checked already (``flashrun.checks``).
        environ: for the settings.
        origin: where the value of an option was given, for errors.

    Raises:
        UsageError: torch refuses a value that no check of ours knows.
    """
    from torch.distributed.launcher.api import _get_entrypoint_name
    from torch.distributed.run import config_from_args
    from torch.numa.binding import AffinityMode

    from flashrun.checks import check_events
    from flashrun.command_line import settings_of
    from flashrun.config import OPTIONS, load_settings
    from flashrun.control.terms import SPARES, membership_of
    from flashrun.devices import local_world_size, processors_by_numa
    from flashrun.job import Job
    from flashrun.node.log_folder import clean_up_logs
    from flashrun.rendezvous.endpoint import EndpointError

    for name in ("config", *(option.name for option in OPTIONS)):
        if not hasattr(args, name):  # parsed by torch's own parser
            setattr(args, name, None)
    settings = load_settings(settings_of(args), environ)
    check_events(settings.events)
    by_master = args.rdzv_backend == "static" and not args.rdzv_endpoint
    endpoint_from = origin("master_addr" if by_master else "rdzv_endpoint")
    _choose_rendezvous(args)
    mode, node_rank = args.numa_binding, args.node_rank
    try:
        args.nproc_per_node = str(local_world_size(args.nproc_per_node))
        # LaunchConfig asks CUDA where it is given none, for a default that torch does not have.
        args.numa_binding = mode or AffinityMode.NODE.value
        if args.rdzv_backend != "static":
            args.node_rank = 0  # torch says that it ignores another one, and we do not
        launch, entrypoint, entrypoint_args = config_from_args(args)
        if mode is None:
            launch.numa_options = None
    except OSError as error:
        if error.filename is None:  # tempfile's, which has tried several
            text = f"{error.strerror}; set TMPDIR to a folder that can be written"
        else:
            what = f"cannot make {error.filename!r}: {error.strerror}"
            text = f"{origin('log_dir')}: {what}; give another folder"
        raise UsageError(text) from None
    except (ValueError, AssertionError, RuntimeError) as error:
        raise UsageError(" ".join(str(error).split())) from None
    finally:
        args.numa_binding, args.node_rank = mode, node_rank
    if args.rdzv_backend in SPARES:
        launch.rdzv_configs["rank"] = args.node_rank
    try:
        membership_of(launch, settings)
    except ValueError as error:
        clean_up_logs(launch, succeeded=True)  # config_from_args has made the folder
        where = endpoint_from if isinstance(error, EndpointError) else origin("rdzv_conf")
        text = " ".join(str(error).split())
        if where == origin("rdzv_conf"):
            text += " Give KEY=VALUE,KEY=VALUE."
        raise UsageError(f"{where}: {text}") from None
    processors: tuple[tuple[int, ...], ...] = ()
    if mode is not None:
        try:
            processors = processors_by_numa(launch.numa_options, launch.nproc_per_node)
        except RuntimeError as error:
            clean_up_logs(launch, succeeded=True)
            text = f"{origin('numa_binding')}: cannot find the processors next to each GPU: {error}"
            raise UsageError(f"{text}; leave it out") from None
    if args.run_path:
        kind = "run-path"
    elif args.no_python:
        kind = "program"
    else:
        kind = "module" if args.module else "script"
    extra = [] if getattr(args, "use_env", True) else ["--local-rank=${local_rank}"]
    return Job(
        settings=settings,
        launch=launch,
        kind=kind,  # type: ignore[arg-type]
        target=args.training_script,
        args=(*extra, *args.training_script_args),
        entrypoint_name=_get_entrypoint_name(entrypoint, entrypoint_args),
        python=environ.get("PYTHON_EXEC", sys.executable),
        processors=processors,
    )


def _choose_rendezvous(args: Namespace) -> None:
    """One node meets nobody: a store on a free port, as torchrun does."""
    from flashrun.checks import meets_nobody

    if meets_nobody(args):
        args.rdzv_backend = "c10d"
        args.rdzv_endpoint = "localhost:0"
        args.rdzv_id = str(uuid.uuid4())
    if args.standalone:
        args.nnodes = "1:1"
    if args.master_port is None:
        args.master_port = _DEFAULT_PORT


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Job | None:
    """Read and check a command line.

    Returns:
        The job; None if there was nothing to run (--version).

    Raises:
        UsageError: what is wrong, where it was given, what would be right.
        SystemExit: --help.
    """
    from flashrun import checks
    from flashrun.command_line import Origins, make_parser, parse_head, split_at_script

    parser = make_parser(environ)
    head, rest = split_at_script(parser, argv)
    args = parse_head(parser, head, rest, environ)
    if args.version:
        return None
    origin = Origins(parser, head, environ)
    checks.check_all(args, origin)
    return job_from_namespace(args, environ, origin)


def version_text() -> str:
    """flashrun's and torch's version."""
    import torch

    import flashrun

    return f"flashrun {flashrun.__version__} (torch {torch.__version__})"


def main(argv: Sequence[str]) -> Outcome:
    """Run a command line.

    Returns:
        The exit status; in a forked worker: what runs the script (see ``flashrun.node.start.run``).
    """
    try:
        from flashrun.config import COMMANDS
        from flashrun.early import refuse as refuse_early

        if argv and argv[0] in COMMANDS and argv[0] != "exec":
            from flashrun.overview_command import main as show

            return show(argv[0], argv[1:])
        if "FLASHRUN_ARGS_FD" not in os.environ and argv[:1] != ["exec"]:
            refuse_early(argv, os.environ)
        with off_while_loading(), end_at_once():
            check_torch()
        if argv and argv[0] == "exec":
            from flashrun.exec_program import main as execute

            return execute(argv[1:])
        job: Job | None = None
        try:
            with off_while_loading(), wait_until_after():
                if "FLASHRUN_ARGS_FD" in os.environ:
                    from flashrun.exec_program import received_job

                    job = received_job(os.environ)
                else:
                    job = parse(argv, os.environ)
                if job is None:
                    print(version_text())
                    return 0
                from flashrun.node.start import run
        except KeyboardInterrupt:
            if job is not None:
                from flashrun.node.log_folder import clean_up_logs

                clean_up_logs(job.launch, succeeded=True)  # parsing has made the folder
            raise
        return run(job)
    except UsageError as error:
        print(f"flashrun: error: {error}", file=sys.stderr)
        return _USAGE_STATUS
