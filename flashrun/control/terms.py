"""From torch's LaunchConfig and flashrun's settings to the terms of a job."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.launcher.api import LaunchConfig

import flashrun
from flashrun.control.events import Membership, Node, Timing
from flashrun.control.records import Job
from flashrun.rendezvous.endpoint import C10D_PORT, Endpoint, EndpointError, parse_endpoint
from flashrun.rendezvous.etcd_config import etcd_config, prefix_of

if TYPE_CHECKING:
    from flashrun.config import Settings

ELASTIC = ("c10d", "flash")  # two names of one thing under flashrun; torchrun knows the first
ETCD = "flash-etcd"
SPARES = (*ELASTIC, ETCD)  # where nodes wait as spares
_NATIVE = ("static", *SPARES)


def membership_of(launch: LaunchConfig, settings: Settings) -> Membership:
    """The terms by which the nodes of this launch meet.

    The ``--rdzv-conf`` keys are torch's (``dynamic_rendezvous.create_handler``,
    ``c10d_rendezvous_backend.create_backend``, ``static_tcp_rendezvous``) with torch's defaults;
    a static rendezvous has ``timeout`` (900 s, LaunchConfig) to come together.

    Raises:
        EndpointError, ValueError: what is wrong with the endpoint or the configuration.
    """
    params = RendezvousParameters(
        backend=launch.rdzv_backend,
        endpoint=launch.rdzv_endpoint,
        run_id=launch.run_id,
        min_nodes=launch.min_nodes,
        max_nodes=launch.max_nodes,
        local_addr=launch.local_addr,
        **launch.rdzv_configs,
    )
    static = launch.rdzv_backend == "static"
    store = str(params.get("store_type", "tcp")).strip().lower()
    if launch.rdzv_backend in ELASTIC and store not in ("tcp", "file"):
        raise ValueError(
            f"--rdzv-conf store_type={store}: {launch.rdzv_backend} knows only store_type=tcp and "
            "store_type=file"
        )
    etcd = None
    if launch.rdzv_backend == ETCD:
        prefix = prefix_of(launch.run_id)
        etcd = etcd_config(launch.rdzv_endpoint, params.config, os.environ, prefix)
        store = "etcd"
    shared = static or (
        store in ("tcp", "etcd")
        and os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"
    )
    native = launch.rdzv_backend in _NATIVE
    timing = _timing(params, settings, static)
    return Membership(
        job=Job(
            run_id=launch.run_id,
            backend=launch.rdzv_backend,
            policy="elastic" if launch.rdzv_backend in SPARES else "static",
            min_nodes=launch.min_nodes,
            max_nodes=launch.max_nodes,
            max_restarts=launch.max_restarts,
            recovery=settings.recovery,
            flashrun_version=flashrun.__version__,
            # Builds for several CUDA versions (2.13.0+cu128) may work together.
            torch_version=torch.__version__.split("+", 1)[0],
            use_agent_store=shared,
            heartbeat_interval=timing.heartbeat_interval,
            detection_timeout=timing.detection_timeout,
            max_retries=settings.max_retries,
            recovery_timeout=settings.recovery_timeout,
            grow=settings.grow,
        ),
        endpoint=_endpoint(launch, store)
        if native and etcd is None
        else Endpoint("", 0, launch.rdzv_endpoint),
        store=store if launch.rdzv_backend in SPARES else "tcp",
        is_host=params.get_as_bool("is_host"),
        timing=timing,
        handler=None if native else params,
        spares=settings.spares,
        etcd=etcd,
    )


def node_of(launch: LaunchConfig, node_id: str) -> Node:
    """This node as the others see it; ``node_id`` must outlive the agent."""
    rank: Any = launch.rdzv_configs.get("rank") if launch.rdzv_backend in _NATIVE else None
    return Node(
        node_id=node_id,
        slots=launch.nproc_per_node,
        role=launch.role,
        node_rank=None if rank is None else int(rank),
        local_addr=launch.local_addr,
    )


def _endpoint(launch: LaunchConfig, store: str) -> Endpoint:
    if store == "file":
        if not launch.rdzv_endpoint:
            raise EndpointError("store_type=file needs a path: --rdzv-endpoint=PATH")
        return Endpoint("localhost", 0, launch.rdzv_endpoint)
    static = launch.rdzv_backend == "static"
    endpoint = parse_endpoint(launch.rdzv_endpoint, -1 if static else C10D_PORT)
    if endpoint.port == -1:
        raise EndpointError(
            f"The endpoint '{endpoint.text}' has no port. "
            "Give it as HOST:PORT (--rdzv-endpoint) or with --master-port."
        )
    return endpoint


def _timing(params: RendezvousParameters, settings: Settings, static: bool) -> Timing:
    def seconds(key: str, default: float) -> float:
        value = params.get_as_int(key)
        if value is None:
            return default
        if value <= 0:
            raise ValueError(f"--rdzv-conf {key}={value}: must be a positive number of seconds")
        return float(value)

    interval = seconds("keep_alive_interval", settings.heartbeat_interval)
    attempts = params.get_as_int("keep_alive_max_attempt")
    return Timing(
        heartbeat_interval=interval,
        detection_timeout=settings.detection_timeout if attempts is None else interval * attempts,
        join_timeout=seconds("timeout", 900.0) if static else seconds("join_timeout", 600.0),
        last_call=seconds("last_call_timeout", 30.0),
        spare_timeout=settings.spare_timeout,
        read_timeout=seconds("read_timeout", 60.0),
        cordon_after=settings.cordon_after,
        cordon_window=settings.cordon_window,
        outage=settings.recovery_timeout,
    )
