"""What a worker finds in its environment: torchrun's variables and where its output goes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from string import Template

from torch.distributed.elastic.utils.api import macros

from flashrun.job import Job
from flashrun.rendezvous.table import NodeRanks, RankTable


def worker_environment(
    job: Job, table: RankTable, node: NodeRanks, local_rank: int, environ: Mapping[str, str]
) -> dict[str, str]:
    """The variables of one worker, by the rule of torch 2.13.

    Source: ``LocalElasticAgent._start_workers`` and ``_set_local_rank_env``
    (torch/distributed/elastic/agent/server/local_elastic_agent.py).

    Args:
        environ: the launcher's environment.

    Raises:
        ValueError: --virtual-local-rank with fewer entries in CUDA_VISIBLE_DEVICES than ranks.
    """
    env = {
        "RANK": str(node.base_rank + local_rank),
        "GROUP_RANK": str(node.group_rank),
        "ROLE_RANK": str(node.base_role_rank + local_rank),
        "ROLE_NAME": node.role,
        "LOCAL_WORLD_SIZE": str(node.slots),
        "WORLD_SIZE": str(table.world_size),
        "GROUP_WORLD_SIZE": str(table.group_world_size),
        "ROLE_WORLD_SIZE": str(node.role_world_size),
        "MASTER_ADDR": table.master_addr,
        "MASTER_PORT": str(table.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(table.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(table.max_restarts),
        "TORCHELASTIC_RUN_ID": table.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": str(table.use_agent_store),
        "TORCHELASTIC_SIGNALS_TO_HANDLE": job.launch.signals_to_handle,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    env.update(_devices(job.launch.virtual_local_rank, local_rank, environ))
    for name in ("OMP_NUM_THREADS", "TORCHELASTIC_TIMER_FILE"):
        if name in environ:
            env[name] = environ[name]
    return env


def _devices(virtual: bool, local_rank: int, environ: Mapping[str, str]) -> dict[str, str]:
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if not virtual:
        env = {"LOCAL_RANK": str(local_rank)}
        if visible is not None:
            env["CUDA_VISIBLE_DEVICES"] = visible
        return env
    if visible is None:
        return {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": str(local_rank)}
    devices = visible.split(",")
    if local_rank >= len(devices):
        raise ValueError(
            f"--virtual-local-rank: local rank {local_rank} has no entry in"
            f" CUDA_VISIBLE_DEVICES={visible}; give as many devices as --nproc-per-node"
        )
    return {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": devices[local_rank].strip()}


def line_prefix(template: str | None, role: str, rank: int, local_rank: int) -> str:
    """The header of each tee'd line (TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE)."""
    if not template:
        return f"[{role}{local_rank}]:"
    return Template(template).safe_substitute(role_name=role, rank=rank, local_rank=local_rank)


def worker_command(job: Job, local_rank: int) -> list[str]:
    """What a plain process executes, and what ``ps`` shows for a forked one.

    ``${local_rank}`` in the script's arguments is replaced, as torch's ``macros.substitute`` does.
    """
    arguments = worker_arguments(job, local_rank)
    if job.kind == "program":
        return [job.target, *arguments]
    flag = ["-m"] if job.kind == "module" else []
    return [job.python, "-u", *flag, job.target, *arguments]


def worker_arguments(job: Job, local_rank: int) -> list[str]:
    """The script's own arguments, macros replaced."""
    substituted: list[str] = macros.substitute(list(job.args), str(local_rank))
    return substituted


def make_parent(path: str) -> None:
    """Create the folder that a log file goes into."""
    folder = os.path.dirname(path)
    if folder:
        os.makedirs(folder, exist_ok=True)
