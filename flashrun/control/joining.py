"""How a node gets to the job's store: hosts it, or connects to the node that does."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from torch.distributed import FileStore  # type: ignore[attr-defined]  # public, not in __all__
from torch.distributed.elastic.rendezvous import RendezvousError

from flashrun.control.events import Connected, HostStore, Membership, Node
from flashrun.control.records import Member, job_from_json
from flashrun.rendezvous.endpoint import (
    Endpoint,
    is_local,
    is_loopback,
    join_host_port,
    listen_address,
    reached_at,
)
from flashrun.rendezvous.kv import KeyValue, StoreLost
from flashrun.rendezvous.server import StoreInUse
from flashrun.rendezvous.tcp_kv import (
    ConnectTimeout,
    NotAStore,
    TorchKeyValue,
    connect,
)


class RefusedError(RuntimeError):
    """This node can't take part in the job; the message says why and what to do."""


@dataclass(frozen=True)
class Opened:
    """A client of the job's store, where it is, and this node's address for the others."""

    kv: KeyValue
    host: str
    port: int
    hosting: bool
    node_addr: str
    membership: Membership  # with the terms of this round, where a handler decides on them
    node_rank: int | None
    folder: str = ""  # of the job, in a store that outlives it


class Opener(Protocol):
    """How a node comes to the store; one call of ``open`` per rendezvous."""

    def open(self) -> Opened: ...

    def workers_port(self) -> int:
        """Where this node's workers would keep the store of a round of theirs; 0: nowhere."""

    def listen(self, key: str, wake: Callable[[], None]) -> bool:
        """Have ``wake`` called when ``key`` changes; False: it has to be looked at."""

    def show(self, me: Member) -> None:
        """This node's record has changed; where the store has leases, one of them has its gist."""

    def look_after(self) -> None:
        """Now and then; raises RefusedError where this node is no part of the job any more."""

    def knocking(self) -> int:
        """How many nodes wait outside for the next rendezvous."""

    def leave(self) -> None:
        """This node needs the job no more; the store may be wanted for the end of the others."""

    def close(self) -> None: ...


class _Passing:
    """A store that lives with the job."""

    _membership: Membership

    def workers_port(self) -> int:
        return 0 if self._membership.job.use_agent_store else free_port()

    def listen(self, key: str, wake: Callable[[], None]) -> bool:
        return False

    def show(self, me: Member) -> None:
        return

    def look_after(self) -> None:
        return

    def leave(self) -> None:
        return


class StoreOpener(_Passing):
    """static and c10d: a TCPStore that one of the nodes hosts (c10d: or a file).

    ``open`` raises:
        StoreInUse, StoreNotBound, RefusedError, NotAStore: what is wrong and what to do.
        ConnectTimeout: nobody hosts it within the join timeout.
        Cancelled: ``cancel`` was set.
    """

    def __init__(
        self,
        membership: Membership,
        node: Node,
        *,
        host_store: HostStore,
        resume: Connected | None,
        cancel: threading.Event,
        waiting: Callable[[str], None],
    ) -> None:
        self._membership = membership
        self._node = node
        self._host_store = host_store
        self._resume = resume
        self._cancel = cancel
        self._waiting = waiting

    def open(self) -> Opened:
        membership, node, endpoint = self._membership, self._node, self._membership.endpoint
        if membership.store == "file":
            path = endpoint.text
            kv = TorchKeyValue(FileStore(path), path)
            addr = _addr(membership, node)
            return Opened(kv, "", 0, False, addr, membership, node.node_rank)
        host, port, hosting = self._where()
        where = join_host_port(host, port)
        who, flags = "the node", "--rdzv-endpoint"
        remedy = f"Start flashrun on the machine that {flags} names, which hosts it"
        if membership.job.policy == "static":
            who, flags = "node rank 0", "--master-addr and --master-port"
            remedy = f"It is node rank 0's: start that node (--node-rank=0) where {flags} lead"
        kv = connect(
            host,
            port,
            membership.timing.join_timeout,
            membership.timing.read_timeout,
            self._cancel,
            lambda s, problem: self._waiting(
                f"waiting for {who} that hosts the rendezvous store at {where} ({flags}),"
                f" {s:.0f} s so far{problem and f': {problem}'}"
            ),
            remedy,
        )
        addr = _addr(membership, node, hosting)
        return Opened(kv, host, port, hosting, addr, membership, node.node_rank)

    def _where(self) -> tuple[str, int, bool]:
        """Host, port, and whether this node hosts it (from now on)."""
        endpoint = self._membership.endpoint
        if self._resume is not None:
            return self._resume.host, self._resume.port, self._resume.hosting
        if _should_host(self._membership, self._node):
            hosted = _host(self._membership, self._host_store)
            if hosted is not None:
                return *hosted, True
        elif endpoint.port == 0:
            raise RefusedError(
                f"The endpoint '{endpoint.text}' has port 0, which only the hosting node can "
                "resolve. Give a fixed port for a job on several nodes."
            )
        return endpoint.host, endpoint.port, False

    def knocking(self) -> int:
        return 0

    def close(self) -> None:
        """The store ends with the process that serves it."""


class HandlerOpener(_Passing):
    """Another backend of torch's registry: its ``next_rendezvous()`` finds the nodes of a round,
    and the store it returns carries our protocol for that round. As torch's agent does, it relies
    on the handler to return a store without the keys of the round before."""

    def __init__(self, membership: Membership, node: Node) -> None:
        from torch.distributed.elastic.rendezvous import registry  # discovers entry points

        assert membership.handler is not None
        self._membership = membership
        self._node = node
        try:
            registry._register_default_handlers()
            registry._register_out_of_tree_handlers()
            self._handler = registry.get_rendezvous_handler(membership.handler)
        except (ValueError, ImportError, RuntimeError) as error:
            raise RefusedError(
                f"The rendezvous backend '{membership.handler.backend}' can't be used: {error}"
            ) from error

    def open(self) -> Opened:
        try:
            info = self._handler.next_rendezvous()
        except RendezvousError as error:
            raise ConnectTimeout(
                f"The rendezvous backend '{self._handler.get_backend()}' brought no nodes "
                f"together: {error}"
            ) from error
        meeting = info.bootstrap_store_info
        if meeting is None:
            raise RefusedError(
                f"The rendezvous backend '{self._handler.get_backend()}' names no MASTER_ADDR"
            )
        job = replace(
            self._membership.job,
            policy="static",
            min_nodes=info.world_size,
            max_nodes=info.world_size,
            use_agent_store=self._handler.use_agent_store,
        )
        self._membership = replace(self._membership, job=job)
        where = join_host_port(meeting.master_addr, meeting.master_port)
        endpoint = Endpoint(meeting.master_addr, meeting.master_port, where)
        return Opened(
            kv=TorchKeyValue(info.store, f"the store of backend '{self._handler.get_backend()}'"),
            host=meeting.master_addr,
            port=meeting.master_port,
            hosting=info.rank == 0,
            node_addr=self._node.local_addr or socket.gethostname(),
            membership=replace(self._membership, endpoint=endpoint),
            node_rank=info.rank,
        )

    def knocking(self) -> int:
        return int(self._handler.num_nodes_waiting())

    def close(self) -> None:
        self._handler.shutdown()


def _should_host(membership: Membership, node: Node) -> bool:
    """static: node rank 0; elastic: as told by ``is_host``, otherwise by the endpoint's address."""
    if membership.job.policy == "static":
        return node.node_rank == 0 or membership.job.max_nodes == 1
    if membership.is_host is not None:
        return membership.is_host
    return membership.job.max_nodes == 1 or is_local(membership.endpoint.host, node.local_addr)


def _host(membership: Membership, host_store: HostStore) -> tuple[str, int] | None:
    """Have the store served here; its address, or None when another agent of this host does."""
    job, endpoint = membership.job, membership.endpoint
    several = job.max_nodes > 1
    if several and endpoint.port == 0:
        raise RefusedError(
            f"The endpoint '{endpoint.text}' has port 0, and the other nodes can't know which port "
            "would be taken. Give a fixed port for a job on several nodes."
        )
    listen = listen_address(endpoint.host, several)
    try:
        port = host_store(listen, endpoint.port)
    except StoreInUse as error:
        # Only elastic agents that guessed by address may find a sibling that was first.
        if several and job.policy == "elastic" and membership.is_host is None:
            return None
        other = serving_job(listen, endpoint.port)
        if other is None:
            raise
        raise StoreInUse(
            f"The endpoint {endpoint} already serves job '{other}'. {error}"
        ) from error
    return reached_at(listen), port


def serving_job(host: str, port: int) -> str | None:
    """The id of the flashrun job whose store is at ``host:port``, None if there is no such."""
    try:
        kv = connect(reached_at(host), port, timeout_s=1.0, read_timeout_s=2.0)
        data = kv.get("flashrun/job")
    except (ConnectTimeout, NotAStore, StoreLost):
        return None
    return None if data is None else job_from_json(data).run_id


def _addr(membership: Membership, node: Node, hosting: bool = False) -> str:
    """How other nodes reach this one, without a name look-up.

    torchrun takes ``--local-addr`` or ``socket.getfqdn()``; the latter asks DNS. Here: the given
    address, the endpoint's host (hosting node: the others reach it by that already), otherwise the
    address of the interface that leads to the endpoint.
    """
    if node.local_addr:
        return node.local_addr
    host = membership.endpoint.host if membership.store == "tcp" else "localhost"
    if hosting or membership.job.max_nodes == 1 or is_loopback(host):
        return host
    return route_address(host) or socket.gethostname()


def route_address(host: str) -> str | None:
    """The own numeric address that packets to ``host`` leave from; None when there is no route."""
    try:
        family, kind, proto, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(target)  # datagram: nothing is sent
            return str(probe.getsockname()[0])
    except OSError:
        return None


def free_port() -> int:
    """A port that was free a moment ago, on every interface (as torch's ``get_free_port``)."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
