"""Which control store carries the recovery of a job on several nodes, and how to get at it."""

from __future__ import annotations

from collections.abc import Callable

from flashrun.control.events import Connected, Membership
from flashrun.control.terms import ETCD
from flashrun.rendezvous.kv import ControlStore


def no_control_store(membership: Membership) -> str | None:
    """Why the nodes of this job have no control store; None if they have one."""
    if membership.handler is not None:
        return (
            f"several nodes that meet through --rdzv-backend={membership.handler.backend}; use"
            f" flash or {ETCD}"
        )
    if membership.store == "file":
        return f"several nodes that meet through a file (store_type={membership.store})"
    return None


def control_store(
    membership: Membership, connected: Connected, report: Callable[[str], None]
) -> Callable[[], ControlStore]:
    """What connects to the job's control store; for a thread, since it may wait.

    Args:
        connected: where the coordinator found the store.
        report: told of leases that run out and of servers that come and go.
    """
    etcd = membership.etcd
    if etcd is not None:

        def outliving() -> ControlStore:
            from flashrun.rendezvous.etcd_job import open_folder

            return open_folder(etcd.quick(), connected.folder, report)

        return outliving

    timing = membership.timing

    def embedded() -> ControlStore:
        from flashrun.rendezvous.embedded import connect_embedded

        return connect_embedded(
            connected.host,
            connected.port,
            timing.join_timeout,
            timing.read_timeout,
            report=report,
        )

    return embedded
