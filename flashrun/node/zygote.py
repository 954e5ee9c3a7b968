"""The zygote: has imported torch once, stays single-threaded, and forks workers.

It is itself a fork of the supervisor (which has imported torch to parse the command line), adds
what nearly every training script imports, and then waits for orders. It never runs a tensor
operation, never touches CUDA and starts no thread: a child of a process with threads can hang in
whatever lock one of them held.

Protocol (see :mod:`flashrun.node.wire`): ``spawn`` (``workers``: a list of specs) is answered by
one ``spawned`` (``id``, ``pid``) per worker, or ``spawn-failed`` (``id``, ``error``). It may be
killed at any time; the supervisor starts another, and says ``spawn`` again for what was not
answered.
"""

from __future__ import annotations

import gc
import importlib
import os
import pkgutil
import signal
import struct
import sys
import traceback
from collections.abc import Callable

import flashrun.worker
from flashrun.collector import off_while_loading
from flashrun.job import Job
from flashrun.node import linux
from flashrun.node.wire import Message, Wire
from flashrun.node.worker_process import Origin, WorkerSpec, become_worker
from flashrun.observe.console import say
from flashrun.worker.allocator import keep_freed_memory

# What a script imports before its first step without naming it: every optimizer reaches
# torch._dynamo through torch._compile (1.5 s), and that brings FSDP and DTensor along.
# And all of the worker runtime: a module left out is imported anew in each worker.
PRELOADED = (
    "torch._dynamo", "torch.optim", "torch.nn.parallel", "torch.utils.data",
    *(m.name for m in pkgutil.walk_packages(flashrun.worker.__path__, "flashrun.worker.")),
)  # fmt: skip

# Top-level names that those may bring along: known before they are loaded, so that a module of the
# same name beside the script is noticed (see flashrun.node.eligibility.shadowed).
PRELOADED_TOO = sys.stdlib_module_names | {
    "_remote_module_non_scriptable", "mpmath", "networkx", "sympy", "triton",
}  # fmt: skip

_PID = struct.Struct("<i")

Body = Callable[[], None]


def warm_up() -> None:
    """Import what workers need."""
    before = dict(os.environ)
    with off_while_loading():
        for name in PRELOADED:
            try:
                importlib.import_module(name)
            except (ImportError, OSError) as error:
                # A script that needs it gets the error in its own import; one that does not trains.
                say(f"the zygote cannot preload {name}: {error}", "warning", event="not-preloaded")
    # Some of those modules set variables as they load (TORCHINDUCTOR_CACHE_DIR). A script that only
    # imports torch would not see them; torch sets them again where it needs them (2.13:
    # torch/_inductor/runtime/cache_dir_utils.py, cache_dir).
    for name in set(os.environ) - set(before):
        del os.environ[name]
    gc.collect()


def _fork_worker(
    make: Callable[[], Body], announced: int, others: list[int]
) -> tuple[int, Body | None]:
    """Fork twice, so that the worker's parent is the nearest subreaper: the supervisor.

    Args:
        make: runs in the worker; gives what the worker is to do.
        announced: descriptor that ends when the supervisor has been told of the worker. Before that
            a stop would take it for one that has not begun, and kill it where it has to be asked.
        others: descriptors of this process that the worker must not have.

    Returns:
        (pid, None) here; (0, body) in the worker.
    """
    read_end, write_end = os.pipe()
    first = os.fork()
    if first == 0:
        os.close(read_end)
        second = os.fork()
        if second:
            os.write(write_end, _PID.pack(second))
            os._exit(0)
        for fd in (write_end, *others):
            os.close(fd)
        try:
            body = make()
            os.read(announced, 1)
            os.close(announced)
            return 0, body
        except BaseException:  # noqa: BLE001  # the top of a process: said, and it ends
            traceback.print_exc()
            os._exit(1)
    os.close(write_end)
    data = os.read(read_end, _PID.size)
    os.close(read_end)
    os.waitpid(first, 0)
    if len(data) != _PID.size:
        raise OSError("the process between zygote and worker ended before it forked")
    return int(_PID.unpack(data)[0]), None


def serve(
    wire: Wire,
    job: Job,
    origin: Origin,
    supervisor: int,
    own_tag: str,
    install_runtime: Callable[[], None] | None,
    warm: bool,
    mark: int,
) -> Body | None:
    """The zygote's life. Returns None when the supervisor is gone; in a worker, its body.

    Args:
        wire: to the supervisor.
        job: what workers run.
        origin: what the launcher was given.
        supervisor: its pid.
        own_tag: the job's tag as this process shows it.
        install_runtime: called in a worker when its script imports torch.
        warm: import what scripts need; not for workers that are all plain processes or cannot come
            to use torch.
        mark: descriptor that workers must not have (see `run_folder.make`).
    """
    os.setsid()  # Ctrl-C at the terminal is the supervisor's business
    linux.set_command_line(["flashrun: zygote"])
    signal.set_wakeup_fd(-1)
    for number in origin.signals:
        if number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        elif number not in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD):
            signal.signal(number, origin.signals[number])
    if warm:
        warm_up()
    keep_freed_memory(os.environ)  # in the workers, which inherit it
    # A collection in a child would write to every object's header and copy the pages.
    gc.freeze()
    while True:
        message = wire.receive()
        if message is None:
            return None
        if message["op"] != "spawn":
            raise ValueError(f"the zygote was sent {message['op']!r}")
        for raw in message["workers"]:
            spec = WorkerSpec(**raw)
            body = _spawn(spec, wire, mark, job, origin, supervisor, own_tag, install_runtime)
            if body is not None:
                return body


def _spawn(
    spec: WorkerSpec,
    wire: Wire,
    mark: int,
    job: Job,
    origin: Origin,
    supervisor: int,
    own_tag: str,
    install_runtime: Callable[[], None] | None,
) -> Body | None:
    def make() -> Body:
        return become_worker(spec, job, origin, supervisor, own_tag, install_runtime)

    answer: Message
    announced, announce = os.pipe()
    try:
        pid, body = _fork_worker(make, announced, [wire.fileno(), mark, announce])
    except OSError as error:
        answer = {"op": "spawn-failed", "id": spec.id, "error": str(error)}
    else:
        if pid == 0:
            wire.forget()
            return body
        answer = {"op": "spawned", "id": spec.id, "pid": pid}
    wire.send(answer)
    os.close(announced)
    os.close(announce)
    return None


def loaded_names() -> set[str]:
    """Top-level names of the modules that a worker forked now would have in memory."""
    return {name.split(".", 1)[0] for name in sys.modules}
