"""From a job to its supervisor: what ``flashrun.run`` calls when everything has been checked."""

from __future__ import annotations

import os
import signal
import warnings
from typing import Any

import torch

import flashrun
from flashrun.collector import leave_to_the_kernel
from flashrun.control.terms import ELASTIC, SPARES, membership_of
from flashrun.devices import lost_to_forks
from flashrun.job import Job
from flashrun.node.agent import run_agent
from flashrun.node.eligibility import reason_for_plain, worth_preloading
from flashrun.node.log_folder import clean_up_logs
from flashrun.node.supervisor import Outcome, Supervisor
from flashrun.node.worker_process import Origin
from flashrun.node.zygote import PRELOADED_TOO, loaded_names
from flashrun.observe.console import configure, say
from flashrun.rendezvous.endpoint import C10D_PORT


def take_origin() -> Origin:
    """What the launcher was given; must run before any handler is set or thread started."""
    handlers: dict[int, Any] = {}
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        if handler is not None and number not in (signal.SIGKILL, signal.SIGSTOP):
            handlers[int(number)] = handler
    # The first call makes torch look at the processors; it starts no thread.
    default_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    return Origin(
        signals=handlers,
        filters=flashrun.STARTED_WITH_FILTERS,
        torch_filters=tuple(f for f in warnings.filters if f not in flashrun.STARTED_WITH_FILTERS),
        default_threads=default_threads,
        set_by_load=_take_variables_set_by_torch(),
        blocked=frozenset(int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    )


def _take_variables_set_by_torch() -> dict[str, str]:
    """Variables that loading torch has added to the environment; a worker gets them later."""
    added = set(os.environ) - set(flashrun.STARTED_WITH_ENVIRON) - {"OMP_NUM_THREADS"}
    return {name: os.environ.pop(name) for name in added if not name.startswith("FLASHRUN_")}


def _install_runtime() -> None:
    """In a worker, as its script imports torch; does nothing without a channel to the agent."""
    from flashrun.worker.runtime import install

    install()


def _warn(job: Job) -> None:
    """Of what is not wrong, and yet cannot be what was meant."""
    if job.settings.spares:
        _warn_of_no_spares(job)
    if job.settings.grow == "restart":
        _warn_of_no_growth(job)
    _warn_of_one_machine(job)


def _warn_of_no_spares(job: Job) -> None:
    launch = job.launch
    if launch.rdzv_backend not in SPARES:
        where = "there, nodes do not wait as spares; use flash or flash-etcd"
        problem = f"with --rdzv-backend={launch.rdzv_backend}: {where}"
    elif launch.rdzv_endpoint.endswith(":0"):
        where = "this job meets at a free port, which no other node can know"
        problem = f"here: {where}; give --rdzv-backend=flash --rdzv-endpoint=HOST:PORT"
    else:
        return
    say(f"--spares has no effect {problem}", "warning", event="no-spares")


def _warn_of_one_machine(job: Job) -> None:
    """Without an endpoint there is torch's, at which only agents of one machine meet."""
    launch = job.launch
    if launch.rdzv_backend in ELASTIC and launch.max_nodes > 1 and not launch.rdzv_endpoint:
        say(
            f"no --rdzv-endpoint: only nodes on this machine meet, at localhost:{C10D_PORT};"
            " nodes on several machines need --rdzv-endpoint=HOST:PORT of one, the same on all",
            "warning",
            event="no-endpoint",
        )


def _warn_of_no_growth(job: Job) -> None:
    launch = job.launch
    if launch.rdzv_backend not in SPARES:
        where = "no nodes wait beside a job; use flash or flash-etcd"
        problem = f"with --rdzv-backend={launch.rdzv_backend} {where}"
    elif launch.min_nodes == launch.max_nodes:
        problem = "the number of nodes is fixed; --nnodes=MIN:MAX gives a range"
    else:
        return
    say(f"--grow=restart has no effect: {problem}", "warning", event="no-growth")


def run(job: Job) -> Outcome:
    """Run ``job`` on this node.

    Returns:
        The exit code. In a forked worker: a callable that runs the script, to be called at the top
        of the process, with nothing of the launcher left on the stack.

    Raises:
        ValueError: the endpoint or --rdzv-conf cannot be used; the message says what would be.
    """
    origin = take_origin()
    configure(job.settings.log_level, job.settings.events or None)
    _warn(job)
    preload = worth_preloading(job)
    loaded = loaded_names() | (PRELOADED_TOO if preload else frozenset())
    why = reason_for_plain(job, loaded, flashrun.STARTED_WITH_MODULES, os.environ)
    if why is None and lost_to_forks():
        why = "something that Python loads here has used a GPU, which no fork can after that"
    if why is not None:
        level = "debug" if job.kind == "program" else "info"
        say(f"workers start as fresh processes, not from the zygote: {why}", level, event="plain")
    warm = why is None and preload
    agent = run_agent(why is not None, membership_of(job.launch, job.settings))
    supervisor = Supervisor(job, origin, agent, install_runtime=_install_runtime, warm=warm)
    outcome = supervisor.run()
    if isinstance(outcome, int):
        clean_up_logs(job.launch, succeeded=outcome == 0)
        leave_to_the_kernel()
    return outcome
