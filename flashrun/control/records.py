"""The records of the control plane: a job's terms, a node, the plan. As JSON in the store.

Who reads them may be of another version (an agent that is then refused, `flashrun nodes`): what it
does not know in them is left out.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from flashrun.rendezvous.table import RankTable, Seat, known_fields

Policy = Literal["static", "elastic"]
Phase = Literal["forming", "running", "stopping", "finished"]
State = Literal["waiting", "running", "failed", "succeeded", "stopped", "left"]

Failure = dict[str, Any]
"""One worker's failure: rank, local_rank, pid, exitcode, error_file (data), timestamp, message,
formed_group (bool), error_digest (str, empty when unknown)."""


@dataclass(frozen=True)
class Job:
    """What all agents of a job agree on; the first one writes it, a differing one is refused."""

    run_id: str
    backend: str
    policy: Policy
    min_nodes: int
    max_nodes: int
    max_restarts: int
    recovery: str
    flashrun_version: str
    torch_version: str
    use_agent_store: bool = True
    heartbeat_interval: float = 5.0  # what one node does, the others judge it by
    detection_timeout: float = 15.0
    max_retries: int = 3
    recovery_timeout: float = 1800.0
    grow: str = "spare"

    def differences(self, other: Job) -> list[str]:
        """What ``other`` (an arriving agent's) has that differs, as readable lines."""
        mine, theirs = asdict(self), asdict(other)
        return [
            f"{name} is {theirs[name]!r} here and {mine[name]!r} in the job"
            for name in mine
            if mine[name] != theirs[name]
        ]


@dataclass(frozen=True)
class Member:
    """A node's record, written by that node only. ``round`` is the one that ``state`` is about.

    ``order`` is the order of arrival; ``host`` marks the node that hosts the store.
    """

    node: str
    order: int
    slots: int
    role: str
    addr: str
    node_rank: int | None = None
    host: bool = False
    state: State = "waiting"
    round: int = -1
    failures: tuple[Failure, ...] = ()
    reason: str = ""
    port: int = 0  # of its store for the workers; a free one where these host that themselves
    base_round: int = 0  # where this node's count of rounds stands (handlers: a store per round)
    base_restarts: int = 0  # likewise for restarts
    done: bool = False  # has read the verdict
    alive: int = 0  # port of its doorbell
    shard: int = 0  # port of its bootstrap shard

    @property
    def seat(self) -> Seat:
        return Seat(
            self.node, self.slots, self.role, self.addr, self.alive, self.shard, self.port
        )


@dataclass(frozen=True)
class Plan:
    """What the controller decided last; ``serial`` grows with each decision."""

    serial: int = 0
    phase: Phase = "forming"
    round: int = 0
    restart_count: int = 0
    table: RankTable | None = None
    restart: bool = False  # stopping: for another round (else for the verdict)
    counts: bool = False  # stopping: the restart counts against max_restarts
    reason: str = ""
    success: bool = False
    failures: tuple[Failure, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)
    growth: dict[str, Any] = field(default_factory=dict)  # stopping for it: the event's fields
    # forming: the nodes of the table before, and those by which the job grows (stopping: these)
    expected: tuple[str, ...] = ()


# --- as text ------------------------------------------------------------------------------------


def job_to_json(job: Job) -> bytes:
    return json.dumps(asdict(job)).encode()


def job_from_json(data: bytes) -> Job:
    return Job(**known_fields(Job, json.loads(data)))


def member_to_json(member: Member) -> bytes:
    return json.dumps(asdict(member)).encode()


def member_from_json(data: bytes) -> Member:
    found = known_fields(Member, json.loads(data))
    found["failures"] = tuple(found["failures"])
    return Member(**found)


def shown(member: Member) -> bytes:
    """What a node shows of itself where that goes with its life; for people."""
    active = member.state in ("running", "failed", "succeeded")
    what = {
        "addresses": [member.addr],
        "slots": member.slots,
        "role": "active" if active else "spare",
        "health": member.reason or member.state if member.state in ("failed", "left") else "ok",
        "state": member.state,
        "order": member.order,
    }
    return json.dumps(what).encode()


def plan_to_json(plan: Plan, table: str, writer: str) -> bytes:
    """
    Args:
        table: the name under which the plan's table is kept; "": it has none.
        writer: makes the bytes unique, so that a compare-and-swap can tell whose plan won.
    """
    return json.dumps({**vars(plan), "table": table, "writer": writer}).encode()


def plan_from_json(data: bytes) -> tuple[Plan, str]:
    """The plan, without its table, and the table's name."""
    found = known_fields(Plan, json.loads(data))
    table = found.pop("table")
    found["failures"] = tuple(found["failures"])
    found["expected"] = tuple(found["expected"])
    return Plan(**found), table
