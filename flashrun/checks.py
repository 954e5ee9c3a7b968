"""What can be wrong with a launch, found before any worker starts.

Each check raises UsageError with one line: what is wrong, where it was given, what would be right.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from argparse import Namespace
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import Std

from flashrun.config import nearest
from flashrun.devices import are_there
from flashrun.early import check_file, check_script
from flashrun.errors import UsageError
from flashrun.modules import find_module

Origin = Callable[[str], str]
"""For an option's name (``nnodes``): where its value was given (``--nnodes``, ``PET_NNODES``)."""


def check_nnodes(value: str, origin: Origin) -> tuple[int, int]:
    """(min, max)."""
    where = origin("nnodes")
    match = re.fullmatch(r"(\d+)(?::(\d+))?", value.strip())
    if match is None:
        raise UsageError(f"{where}: {value!r} is not a number of nodes; give N or MIN:MAX")
    low, high = int(match[1]), int(match[2] or match[1])
    if low < 1:
        raise UsageError(f"{where}: {value!r} asks for no node; give at least 1")
    if low > high:
        raise UsageError(f"{where}: {value!r} has MIN greater than MAX; give {high}:{low}")
    return low, high


def check_nproc(value: str, origin: Origin) -> None:
    where = origin("nproc_per_node")
    privateuse = str(torch._C._get_privateuse1_backend_name())
    words = {"auto", "cpu", "gpu", "xpu", privateuse}
    if value in words:
        if value == "gpu" and not are_there("cuda"):
            raise UsageError(f"{where}: 'gpu' asked for, but torch sees no GPU here; {_no_gpu()}")
        if value == "xpu" and not are_there("xpu"):
            raise UsageError(f"{where}: 'xpu' was asked for, but torch sees none; give a number")
        return
    try:
        number = int(value)
    except ValueError:
        raise UsageError(
            f"{where}: {value!r} is not a number of workers; give a number, auto, cpu, gpu or xpu"
        ) from None
    if number < 1:
        raise UsageError(f"{where}: {number} workers cannot train; give at least 1")


def _no_gpu() -> str:
    built = torch.version.cuda is not None or torch.version.hip is not None
    if not built:
        return "this torch is built without CUDA: install one with it, or give a number"
    return "look at nvidia-smi and CUDA_VISIBLE_DEVICES, or give a number"


def meets_nobody(args: Namespace) -> bool:
    """Whether torch's ``run()`` sets the rendezvous aside, whatever was given for it: this node is
    the only one (torch/distributed/run.py, ``run``)."""
    return bool(args.standalone) or (
        args.rdzv_backend == "static"
        and not args.rdzv_endpoint
        and args.master_port is None
        and int(args.nnodes.split(":")[-1]) == 1
    )


def check_numbers(args: Namespace, origin: Origin, max_nodes: int) -> None:
    """Numbers that argparse takes as they come."""
    if args.max_restarts < 0:
        where = origin("max_restarts")
        raise UsageError(f"{where}: {args.max_restarts} is negative; give 0 or more")
    if not args.monitor_interval > 0:
        raise UsageError(
            f"{origin('monitor_interval')}: {args.monitor_interval} is not a time; give seconds > 0"
        )
    timeout = args.shutdown_timeout
    where = origin("shutdown_timeout")
    if timeout is None:
        text = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")
        where = "environment, TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
        try:
            timeout = int(text)
        except ValueError:
            raise UsageError(
                f"{where}: {text!r} is not a whole number of seconds; give one, 0 or more"
            ) from None
    if timeout < 0:
        raise UsageError(f"{where}: {timeout} is negative; give seconds, 0 or more")
    static = args.rdzv_backend == "static" and not meets_nobody(args)
    if static and not 0 <= args.node_rank < max_nodes:
        raise UsageError(
            f"{origin('node_rank')}: {args.node_rank} is not a rank of {max_nodes} nodes (see"
            f" --nnodes); give 0 to {max_nodes - 1}"
        )
    port = args.master_port
    if port is not None and not 0 <= port <= 65535:
        raise UsageError(f"{origin('master_port')}: {port} is not a port; give 0 to 65535")


def check_streams(args: Namespace, origin: Origin) -> None:
    """-r, -t, --local-ranks-filter."""
    for name in ("redirects", "tee"):
        value = getattr(args, name)
        try:
            Std.from_str(value)
        except ValueError:
            raise UsageError(
                f"{origin(name)}: {value!r} is not understood; give 0 (none), 1 (stdout), 2"
                " (stderr) or 3 (both), for all or per local rank (0:1,1:3)"
            ) from None
    ranks = args.local_ranks_filter
    if ranks and not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", ranks):
        raise UsageError(
            f"{origin('local_ranks_filter')}: {ranks!r} is not a list of local ranks; give 0,1,2"
        )


def check_log_dir(path: str | None, origin: Origin) -> None:
    if path is None or path == os.devnull:
        return
    if os.path.exists(path) and not os.path.isdir(path):
        raise UsageError(f"{origin('log_dir')}: {path} is a file; give a folder")
    place = os.path.abspath(path)
    while not os.path.exists(place):
        place = os.path.dirname(place)
    if not os.path.isdir(place):
        raise UsageError(f"{origin('log_dir')}: {place} is a file; give a folder")
    if not os.access(place, os.W_OK | os.X_OK):
        raise UsageError(f"{origin('log_dir')}: {place} cannot be written to; give another folder")


def check_signals(names: str, origin: Origin) -> None:
    for name in names.split(","):
        known = getattr(signal, name.strip(), None)
        if not isinstance(known, signal.Signals):
            every = [s.name for s in signal.Signals]
            hint = nearest(name.strip().upper(), every) if name.strip() else "give SIGTERM,SIGINT"
            raise UsageError(f"{origin('signals_to_handle')}: unknown signal {name!r}; {hint}")
        if known in (signal.SIGKILL, signal.SIGSTOP):
            raise UsageError(
                f"{origin('signals_to_handle')}: {known.name} cannot be handled; leave it out"
            )


def known_backends() -> list[str]:
    """Rendezvous backends that torch's registry has, those of other packages included."""
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    del get_rendezvous_handler  # importing its module is what registers torch's own
    handlers: dict[str, Any] = rendezvous_handler_registry._registry
    others = metadata.entry_points(group="torchrun.handlers")
    return sorted({*handlers, *(entry.name for entry in others)})


def check_rendezvous(args: Namespace, origin: Origin) -> None:
    """Backend and --rdzv-conf; the endpoint is checked where it is read."""
    if not meets_nobody(args):
        _check_backend(args.rdzv_backend, origin)
    for pair in args.rdzv_conf.split(",") if args.rdzv_conf.strip() else []:
        key, _, value = pair.partition("=")
        if not key.strip() or not value.strip():
            raise UsageError(
                f"{origin('rdzv_conf')}: {pair!r} is not KEY=VALUE; give KEY=VALUE,KEY=VALUE"
            )


def _check_backend(backend: str, origin: Origin) -> None:
    if backend in ("etcd", "etcd-v2"):
        raise UsageError(
            f"{origin('rdzv_backend')}: {backend} speaks etcd's old v2 interface, which servers do"
            " not have any more; give flash-etcd (etcd v3), or c10d"
        )
    known = [name for name in known_backends() if not name.startswith("etcd")]
    if backend not in known:
        raise UsageError(
            f"{origin('rdzv_backend')}: unknown backend {backend!r}; {nearest(backend, known)}"
        )


def check_event_handler(name: str, origin: Origin) -> None:
    from torch.distributed.elastic.events import handlers

    known = sorted(handlers._log_handlers)
    if name not in known:
        raise UsageError(
            f"{origin('event_log_handler')}: unknown handler {name!r}; {nearest(name, known)}"
        )


def check_logs_specs(name: str | None, origin: Origin) -> None:
    if name is None:
        return
    known = [entry.name for entry in metadata.entry_points(group="torchrun.logs_specs")]
    if name not in known:
        hint = nearest(name, known) if known else "no package offers any, so leave it out"
        raise UsageError(f"{origin('logs_specs')}: unknown logs specs {name!r}; {hint}")


def check_numa(mode: str | None, origin: Origin) -> None:
    if mode is not None and not are_there("cuda"):
        raise UsageError(
            f"{origin('numa_binding')}: workers are bound to the processors next to their GPU, and"
            " torch sees no GPU here; leave it out"
        )


def check_target(args: Namespace) -> None:
    """The script, module or program that is to run."""
    target = args.training_script
    if args.module and args.no_python and not args.run_path:
        raise UsageError("--module and --no-python exclude each other; leave one out")
    if args.run_path:
        check_file(target, "--run-path")
    elif args.no_python:
        if shutil.which(target) is None:
            raise UsageError(
                f"--no-python: there is no program {target!r} that can be executed (looked in"
                f" {'PATH' if os.sep not in target else 'the file system'}); give one that can"
            )
    elif args.module and os.environ.get("PYTHON_EXEC", sys.executable) == sys.executable:
        # Another interpreter has modules of its own; it says itself what it lacks.
        try:
            find_module(target)
        except ModuleNotFoundError as error:
            places = f"looked in {os.getcwd()} and sys.path"
            raise UsageError(
                f"-m {target}: {error} ({places}); give a module as python -m takes it"
            ) from None
    elif not args.module:
        check_script(target)
    if (args.module or not args.no_python) and not args.run_path:
        _check_interpreter()


def _check_interpreter() -> None:
    python = os.environ.get("PYTHON_EXEC")
    if python is not None and shutil.which(python) is None:
        raise UsageError(
            f"environment, PYTHON_EXEC: there is no program {python!r}; give an interpreter"
        )


def check_events(path: str) -> None:
    """The file of --events can be appended to."""
    if not path:
        return
    try:
        with open(path, "a", encoding="utf-8"):
            pass
    except OSError as error:
        text = f"events: cannot write {path!r}: {error.strerror}; give another file"
        raise UsageError(text) from None


def check_all(args: Namespace, origin: Origin) -> None:
    """Every check, in the order in which a person would want to hear of them."""
    _, max_nodes = check_nnodes(args.nnodes, origin)
    check_nproc(args.nproc_per_node, origin)
    check_target(args)
    check_numbers(args, origin, max_nodes)
    check_rendezvous(args, origin)
    check_streams(args, origin)
    check_log_dir(args.log_dir, origin)
    check_logs_specs(args.logs_specs, origin)
    check_signals(args.signals_to_handle, origin)
    check_event_handler(args.event_log_handler, origin)
    check_numa(args.numa_binding, origin)
