"""What the coordinator tells the agent, and what the agent gives it to start with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousParameters

from flashrun.control.records import Failure, Job
from flashrun.rendezvous.endpoint import Endpoint
from flashrun.rendezvous.etcd_config import EtcdConfig
from flashrun.rendezvous.table import RankTable


@dataclass(frozen=True)
class Connected:
    """The store is reached and this node has a record in it. Always the first event.

    The supervisor keeps it: a re-forked agent hands it back as ``resume``.
    ``host``/``port`` are where this node's store client connects (numeric address); ``folder`` is
    the job's in a store that outlives it.
    """

    host: str
    port: int
    hosting: bool
    order: int
    folder: str = ""


@dataclass(frozen=True)
class Start:
    """Start this node's workers as ``table.of(node)`` says; those of a lost node, whose place this
    one takes in the middle of a round (``instead``), are started as its recovery says.

    ``resumed``: after a re-fork of the agent; the workers of this round were started already (or
    the agent died before it did so): adopt what the supervisor knows of, start what is missing.
    """

    table: RankTable
    resumed: bool = False


@dataclass(frozen=True)
class Reseat:
    """In this round other nodes have taken the places of lost ones."""

    table: RankTable


@dataclass(frozen=True)
class Stop:
    """Stop all workers of ``round``, then call ``report_stopped(round, …)``."""

    round: int
    reason: str
    restart: bool  # another round follows (else the verdict)
    growth: dict[str, Any] = field(default_factory=dict)  # with more nodes: fields of its event
    at_once: bool = False  # others act as these ranks already: there is no time for a farewell


@dataclass(frozen=True)
class Pause:
    """This node is cut off: its workers have to stand still (not end) at once, until `GoOn`, or are
    killed. After a re-fork it may come again."""

    why: str
    since: float  # monotonic


@dataclass(frozen=True)
class GoOn:
    """The workers may go on: the ranks are still this node's."""

    why: str
    paused_s: float


@dataclass(frozen=True)
class Finish:
    """The job is over: stop what may still run, and end. The last event.

    ``failures``: of all nodes, the first in time first.
    """

    success: bool
    failures: tuple[Failure, ...]
    reason: str


@dataclass(frozen=True)
class Waiting:
    """One line for the user on what is missing."""

    text: str


@dataclass(frozen=True)
class Refused:
    """This node can't take part; ``reason`` says why and what to do. The last event."""

    reason: str


@dataclass(frozen=True)
class Lost:
    """The control plane is gone; stop the workers and end with ``reason``. The last event, but for
    another one that is ``at_once``.

    ``at_once``: others will act as these ranks in a moment, so there is no time for a farewell.
    """

    reason: str
    at_once: bool = False


Event = Connected | Start | Reseat | Stop | Pause | GoOn | Finish | Waiting | Refused | Lost

HostStore = Callable[[str, int], int]
"""``host_store(listen_host, port) -> bound port``: have this node's store process serve a TCPStore.
Blocking. Raises ``rendezvous.server.StoreInUse`` or ``StoreNotBound`` with a message."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds."""

    heartbeat_interval: float = 5.0
    detection_timeout: float = 15.0
    join_timeout: float = 600.0
    last_call: float = 30.0
    spare_timeout: float = 30.0
    read_timeout: float = 60.0
    poll: float = 0.08  # how often a node of several looks for news
    waiting_line: float = 30.0
    verdict_grace: float = 5.0  # the hosting node lets the others read the verdict
    cordon_after: int = 0
    cordon_window: float = 3600.0
    outage: float = 1800.0  # a store that outlives jobs may be away for, while one waits for it


@dataclass(frozen=True)
class Membership:
    """How this job meets: what the coordinator is given besides the node."""

    job: Job
    endpoint: Endpoint
    store: str = "tcp"  # tcp | file (endpoint.text is the path then) | etcd
    is_host: bool | None = None  # None: by the endpoint's address
    timing: Timing = field(default_factory=Timing)
    handler: RendezvousParameters | None = None  # another backend of torch's registry
    spares: int = 0  # nodes beyond the most that wait to replace a lost one
    etcd: EtcdConfig | None = None  # how to get at the store; its prefix is the run id's

    @property
    def alone(self) -> bool:
        """Whether nobody else can come: nothing has to be polled then."""
        return self.job.max_nodes == 1 and self.handler is None and self.etcd is None


@dataclass(frozen=True)
class Node:
    """This node. ``node_id`` stays the same over re-forks of the agent."""

    node_id: str
    slots: int
    role: str
    node_rank: int | None = None
    local_addr: str | None = None
