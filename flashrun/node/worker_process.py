"""From the fork to the script's first line: makes a child of the zygote into a worker.

The order matters and is told by the steps of :func:`become_worker`. A worker's parent is the
supervisor (the zygote forks twice), so nothing that the zygote or the agent does can end it, and
the kernel ends it with the supervisor.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flashrun import messages
from flashrun.job import Job
from flashrun.node import gloo_teardown, linux, main_module, plain, stderr_tail
from flashrun.node.failure_note import note_failure
from flashrun.node.torch_gate import TorchGate
from flashrun.node.worker_env import worker_arguments
from flashrun.worker import own_code

# How long a forked worker waits to become the supervisor's child. The process in between has
# nothing left to do but exit.
_REPARENT_DEADLINE = 30.0
_LONGEST_FOLDER = 80  # characters; a socket's path has at most 107, and a name of its own


@dataclass(frozen=True)
class Origin:
    """What the launcher was given by its parent, taken before it changed anything.

    Attributes:
        signals: handlers as the interpreter set them at its start (an ignored SIGHUP stays so).
        filters: ``warnings.filters`` before torch was imported.
        torch_filters: those that torch added; what the zygote imports beyond it adds more, which a
            script that only imports torch does not have.
        set_by_load: environment variables that torch set as it was loaded.
        default_threads: torch's thread count with that environment.
        blocked: the signal mask.
    """

    signals: Mapping[int, Any]
    filters: tuple[Any, ...]
    default_threads: int
    blocked: frozenset[int]
    set_by_load: Mapping[str, str] = field(default_factory=dict)
    torch_filters: tuple[Any, ...] = ()


@dataclass(frozen=True)
class WorkerSpec:
    """One worker to start.

    Attributes:
        id: unique in the job on this node, e.g. ``r0.3.0`` (round, local rank, incarnation).
        environ: what is set on top of the job's environment.
        stdout, stderr: files for the streams, "" for the launcher's own.
        append: the files may hold the output of an earlier incarnation of this rank.
        record: private file for the facts of a failure; "" when there is none.
        tail: private file for the last bytes of stderr; "" when there is none.
        tag: what /proc/PID/environ is to show in place of the launcher's tag.
        plain: a fresh process instead of a fork.
    """

    id: str
    environ: dict[str, str]
    stdout: str
    stderr: str
    append: bool
    record: str
    tail: str
    tag: str
    plain: bool
    local_rank: int
    command: list[str] = field(default_factory=list)


def open_log(path: str, append: bool) -> int:
    """Open a worker's log file for its standard stream; truncates it like torchrun unless told."""
    how = os.O_APPEND if append else os.O_TRUNC
    return os.open(path, os.O_WRONLY | os.O_CREAT | how, 0o666)


def _redirect(spec: WorkerSpec) -> None:
    for path, target in ((spec.stdout, 1), (spec.stderr, 2)):
        if path:
            fd = open_log(path, spec.append)
            os.dup2(fd, target, inheritable=True)
            if fd != target:
                os.close(fd)


def _await_parent(supervisor: int) -> None:
    deadline = time.monotonic() + _REPARENT_DEADLINE
    while os.getppid() != supervisor:
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"worker {os.getpid()} waited {_REPARENT_DEADLINE:.0f} s to become a child of the"
                f" supervisor {supervisor}, which seems to have died; nothing is left to do here"
            )
        os.sched_yield()


def _restore_signals(origin: Origin) -> None:
    signal.set_wakeup_fd(-1)
    for number, handler in origin.signals.items():
        if signal.getsignal(number) != handler:
            signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, origin.blocked)


def _tell_runtime(error: BaseException | None) -> None:
    """The script has ended: a worker that takes part in recoveries stays until all have ended."""
    runtime: Any = sys.modules.get("flashrun.worker.runtime")
    if runtime is not None and runtime._installed is not None:
        runtime._installed.finish(error)


def _independent_randomness() -> None:
    """Draw anew what a fresh interpreter draws from the system while it loads.

    ``random`` does so itself after a fork; torch's generator does when the gate opens.
    """
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    process: Any = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.current_process()._config["authkey"] = process.AuthenticationString(os.urandom(32))


def execute_plain(spec: WorkerSpec) -> None:
    """Replace this process by the worker's command; never returns.

    An error is shown as a shell would and ends the process with 127 or 126.
    """
    try:
        os.execvpe(spec.command[0], spec.command, dict(os.environ))
    except OSError as error:
        os.write(2, f"flashrun: cannot start {spec.command[0]}: {error.strerror}\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _helpers_folder(run_dir: str | None) -> None:
    """Where ``multiprocessing`` puts the sockets of its helpers: a worker that is killed can't
    remove the folder, so it lies in one that goes with the job (multiprocessing/util.py,
    ``get_temp_dir``)."""
    from multiprocessing import process

    if run_dir is None:
        return
    folder = os.path.join(run_dir, "mp")
    if len(folder) > _LONGEST_FOLDER:
        return
    os.makedirs(folder, mode=0o700, exist_ok=True)
    config: dict[str, Any] = process.current_process()._config  # type: ignore[attr-defined]
    config["tempdir"] = folder


def become_worker(
    spec: WorkerSpec,
    job: Job,
    origin: Origin,
    supervisor: int,
    own_tag: str,
    install_runtime: Callable[[], None] | None,
) -> Callable[[], None]:
    """Turn this process, just forked, into the worker ``spec``.

    Returns:
        What runs the script. The caller returns it to the top of the process first, so that no
        frame or object of the launcher is below the script.
    """
    os.setsid()
    linux.overwrite_in_environ(own_tag.encode(), spec.tag.encode())
    _await_parent(supervisor)
    linux.die_with_parent(supervisor)
    _restore_signals(origin)
    _redirect(spec)
    os.environ.update(spec.environ)
    threads = origin.default_threads
    if job.processors:
        os.sched_setaffinity(0, job.processors[spec.local_rank])
        if "OMP_NUM_THREADS" not in os.environ:  # as OpenMP counts when it loads
            threads = min(threads, len(job.processors[spec.local_rank]))
    if spec.plain:
        # Of a program we know only that it can be Python; that is asked for a recovery in place.
        if messages.CHANNEL in spec.environ or job.kind != "program":
            plain.prepare(os.environ, spec.record)
        execute_plain(spec)
    linux.set_command_line(spec.command)
    linux.set_thread_name(os.path.basename(sys.executable))  # as after exec
    if spec.tail:
        stderr_tail.install(spec.tail)
    _independent_randomness()
    _helpers_folder(spec.environ.get(messages.RUN_DIR))
    filters: Any = warnings.filters
    filters[:] = list(origin.filters)

    def torch_is_there() -> None:
        gloo_teardown.install()
        if install_runtime is not None:
            install_runtime()

    gate = TorchGate(
        default_threads=threads,
        set_by_load=origin.set_by_load,
        filters=origin.torch_filters,
        on_open=torch_is_there,
        warn=lambda line: print(f"flashrun: warning: {line}", file=sys.stderr),
    )
    if install_runtime is not None:
        own_code.begin(spec.environ)
    note = note_failure(spec.record)
    target = job.target
    arguments = tuple(worker_arguments(job, spec.local_rank))

    def run() -> None:
        gate.close()
        if job.kind == "run-path":  # torch's own run_script_path runs there: torch is imported
            import torch  # noqa: F401
        body = {
            "script": main_module.run_script,
            "module": main_module.run_module,
            "run-path": main_module.run_path,
        }[job.kind]
        main_module.run_to_the_end(lambda: body(target, arguments), note, _tell_runtime)

    return run
