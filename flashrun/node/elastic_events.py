"""torch's elastic events and metrics, recorded where torchrun's agent records them.

Source: ``SimpleElasticAgent`` (torch 2.13, elastic/agent/server/api.py): ``_construct_event``,
``_record_worker_events``, ``_record_metrics``, ``_invoke_run``, and what ``@prof`` measures there.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed.elastic import events
from torch.distributed.elastic.events.api import Event, EventSource
from torch.distributed.elastic.metrics import initialize_metrics
from torch.distributed.elastic.metrics.api import MetricsConfig, put_metric

from flashrun.job import Job


@dataclass(frozen=True)
class WorkerFacts:
    """What an event tells of a worker."""

    rank: int
    local_rank: int
    role_rank: int
    role_world_size: int
    pid: int | None


def entry_point(job: Job) -> str:
    """What torch calls the entry point in events (``WorkerSpec.get_entrypoint_name``)."""
    if job.kind == "run-path":
        return "run_script_path"
    return os.path.basename(job.target if job.kind == "program" else job.python)


class ElasticEvents:
    """Records events with the job's handler.

    Args:
        job: gives run id, role, handler.
        host: this node's name.
    """

    def __init__(self, job: Job, host: str) -> None:
        self._job = job
        self.host = host
        self.group_rank: int | None = None
        self.group_world_size: int | None = None
        self.run_id = job.launch.run_id
        self.restarts = 0
        self.total_run_time = 0
        initialize_metrics(MetricsConfig(job.launch.metrics_cfg))

    def record(
        self,
        state: str,
        source: EventSource = EventSource.AGENT,
        worker: WorkerFacts | None = None,
        raw_error: str | None = None,
        duration_ms: float | None = None,
        exit_code: int | None = None,
    ) -> None:
        """Record one event, e.g. ``RENDEZVOUS`` with its duration in milliseconds."""
        details: dict[str, Any] = {
            "group_world_size": self.group_world_size,
            "entry_point": entry_point(self._job),
        }
        if worker is not None:
            # One-element lists, as torchrun writes them.
            details["local_rank"] = [worker.local_rank]
            details["role_rank"] = [worker.role_rank]
            details["role_world_size"] = [worker.role_world_size]
            details["exit_code"] = [exit_code]
            details["worker_pid"] = [worker.pid]
        metadata: dict[str, Any] = {
            "run_id": self.run_id,
            "global_rank": worker.rank if worker else None,
            "group_rank": self.group_rank,
            "worker_id": str(worker.pid) if worker else None,
            "role": self._job.launch.role,
            "hostname": self.host,
            "state": state,
            "total_run_time": self.total_run_time,
            "rdzv_backend": self._job.launch.rdzv_backend,
            "raw_error": raw_error,
            "metadata": json.dumps(details),
            "agent_restarts": self.restarts,
            "duration_ms": duration_ms,
        }
        event = Event(
            name=f"torchelastic.worker.status.{state}", source=source, metadata=metadata
        )
        events.record(event, self._job.launch.event_log_handler)

    def started(self, workers: Iterable[WorkerFacts]) -> None:
        for worker in workers:
            self.record("START", EventSource.WORKER, worker)
        self.state("healthy")

    def state(self, name: str) -> None:
        """The metrics of what the node's workers have come to be: healthy, succeeded, failed.
        (torchrun repeats them at each look; here a state is told once.)"""
        group = f"workers.{self._job.launch.role}"
        put_metric(f"{group}.remaining_restarts", self._job.launch.max_restarts - self.restarts)
        put_metric(f"{group}.{name}", 1)

    def took(self, step: str, since: float, ok: bool = True) -> None:
        """The metrics of a step that is over, under the name of torchrun's function for it.

        Args:
            since: when it began, by ``time.monotonic()``.
        """
        put_metric(f"{step}.{'success' if ok else 'failure'}", 1)
        put_metric(f"{step}.duration.ms", int((time.monotonic() - since) * 1000))

    def ended(
        self, workers: Iterable[WorkerFacts], failures: Mapping[int, Mapping[str, Any]], ok: bool
    ) -> None:
        """Events and metrics of the end of the worker group.

        Args:
            failures: rank -> failure (see failure_report).
            ok: whether the group succeeded.
        """
        for worker in workers:
            failure = failures.get(worker.rank)
            if failure is None:
                state = "SUCCEEDED" if ok else "TERMINATED"
                self.record(state, EventSource.WORKER, worker)
            else:
                self.record(
                    "FAILED",
                    EventSource.WORKER,
                    worker,
                    raw_error=json.dumps(failure["error_file_data"]),
                    exit_code=failure["exitcode"],
                )
        self._metrics(ok)

    def _metrics(self, ok: bool) -> None:
        group = f"workers.{self._job.launch.role}"
        allowed = self._job.launch.max_restarts
        left = allowed - self.restarts
        flakiness = 100.0 if not ok else 100.0 - 100.0 * (left + 1) / (allowed + 1)
        restarted = self.restarts > 0
        values = {
            "flakiness": int(flakiness),
            "run_total": 1,
            "run_success_with_retries": int(ok and restarted),
            "run_success_no_retries": int(ok and not restarted),
            "run_failed_with_retries": int(not ok and restarted),
            "run_failed_no_retries": int(not ok and not restarted),
        }
        for name, value in values.items():
            put_metric(f"{group}.{name}", value)
