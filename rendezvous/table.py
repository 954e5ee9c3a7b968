"""The rank table: who has which ranks in one round.

It is static: the controller writes it once, each agent reads it once and lays it into the shared
memory of its node, and there every worker finds who is where. No rank asks another one.
"""

from __future__ import annotations

import json
import os
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Seat:
    """What a node brings to a round: its id, number of workers, role, address and the ports of its
    doorbell, its bootstrap shard and its TCPStore for the workers (0: none)."""

    node: str
    slots: int
    role: str
    addr: str
    alive: int = 0
    shard: int = 0
    store: int = 0


def ranks_text(ranks: range) -> str:
    """A node's ranks, for people."""
    if len(ranks) == 1:
        return f"rank {ranks.start}"
    return f"ranks {ranks.start} to {ranks.stop - 1}"


@dataclass(frozen=True)
class NodeRanks:
    """The ranks of one node's workers in a round.

    Worker ``local_rank`` has global rank ``base_rank + local_rank`` and role rank
    ``base_role_rank + local_rank``. ``joined``: which of the joins of the round was this node's.
    """

    node: str
    group_rank: int
    slots: int
    role: str
    addr: str
    base_rank: int
    base_role_rank: int
    role_world_size: int
    alive: int = 0
    shard: int = 0
    store: int = 0
    instead: tuple[str, ...] = ()  # nodes that had this place and were lost; the last one first
    joined: int = 0

    @property
    def ranks(self) -> range:
        """In the job."""
        return range(self.base_rank, self.base_rank + self.slots)


@dataclass(frozen=True)
class RankTable:
    """One round of a job: every node's ranks and where the workers meet.

    ``nodes`` is in group-rank order. ``master_port`` 0 means that the first node picks a free port
    before it starts its workers (only when the agents' store is not shared with the workers).
    ``token`` is the round's secret, by which workers know each other. ``joins`` counts the places
    that other nodes have taken since the round began.

    Where every node has a TCPStore for the workers, the scripts' default store is `spread` over
    these: a key has a *home*, which is a place in this table, whoever has that.
    """

    round: int
    restart_count: int
    max_restarts: int
    run_id: str
    world_size: int
    master_addr: str
    master_port: int
    use_agent_store: bool
    nodes: tuple[NodeRanks, ...]
    token: str = field(default="", repr=False)
    joins: int = 0

    @property
    def group_world_size(self) -> int:
        return len(self.nodes)

    def of(self, node: str) -> NodeRanks | None:
        """The ranks of ``node``, None when it is not part of this round."""
        return next((n for n in self.nodes if n.node == node), None)

    @property
    def spread(self) -> bool:
        """Whether the default store is; if not, it is at ``master_addr`` alone, and the job does
        not outlive that node."""
        return all(node.store for node in self.nodes)

    def home(self, key: str) -> int:
        """Number of the place that has a key of the default store."""
        return zlib.crc32(key.encode()) % len(self.nodes)

    def taken_since(self, joins: int) -> list[int]:
        """Numbers of the places that other nodes have taken since there were so many joins."""
        return [place.group_rank for place in self.nodes if place.joined > joins]

    def places(self, ranks: Sequence[int]) -> dict[int, list[int]]:
        """Which nodes (by number, in order) have some of ``ranks``, and which: their indices."""
        bases = [node.base_rank for node in self.nodes]
        found: dict[int, list[int]] = {}
        for index, rank in enumerate(ranks):
            found.setdefault(bisect_right(bases, rank) - 1, []).append(index)
        return dict(sorted(found.items()))

    def lay(self, path: str, node: str, address: str) -> None:
        """Write it for the workers of ``node``, without the secret.

        Args:
            path: in shared memory; a reader finds it whole or not at all.
            address: by which they reach what ``node`` itself serves.
        """
        nodes = tuple(replace(n, addr=address) if n.node == node else n for n in self.nodes)
        Path(f"{path}.new").write_text(replace(self, nodes=nodes, token="").to_json())
        os.replace(f"{path}.new", path)

    def with_instead(self, lost: str, seat: Seat) -> RankTable:
        """The same round, with another node in the place of a lost one."""
        nodes = tuple(
            replace(
                n,
                node=seat.node,
                addr=seat.addr,
                alive=seat.alive,
                shard=seat.shard,
                store=seat.store if n.store else 0,
                instead=(lost, *n.instead),
                joined=self.joins + 1,
            )
            if n.node == lost
            else n
            for n in self.nodes
        )
        return replace(self, nodes=nodes, joins=self.joins + 1)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @staticmethod
    def from_json(text: str | bytes) -> RankTable:
        return RankTable.from_dict(json.loads(text))

    @staticmethod
    def from_dict(data: dict[str, Any]) -> RankTable:
        found = known_fields(RankTable, data)
        found["nodes"] = tuple(
            NodeRanks(**{**known_fields(NodeRanks, n), "instead": tuple(n.get("instead", ()))})
            for n in found["nodes"]
        )
        return RankTable(**found)


def known_fields(record: type[Any], found: dict[str, Any]) -> dict[str, Any]:
    """What this version knows of a record that another one may have written."""
    names = {known.name for known in fields(record)}
    return {name: value for name, value in found.items() if name in names}


def assign_ranks(seats: Sequence[Seat]) -> tuple[NodeRanks, ...]:
    """Give ranks to ``seats``, which are in group-rank order.

    The rule of ``SimpleElasticAgent._assign_worker_ranks`` (torch 2.13,
    elastic/agent/server/api.py): global ranks count through the nodes in order; role ranks count
    through the nodes of the same role; a role's world size is the sum of its slots.
    """
    role_sizes: dict[str, int] = {}
    for seat in seats:
        role_sizes[seat.role] = role_sizes.get(seat.role, 0) + seat.slots
    ranks: list[NodeRanks] = []
    base = 0
    role_base = dict.fromkeys(role_sizes, 0)
    for group_rank, seat in enumerate(seats):
        ranks.append(
            NodeRanks(
                node=seat.node,
                group_rank=group_rank,
                slots=seat.slots,
                role=seat.role,
                addr=seat.addr,
                base_rank=base,
                base_role_rank=role_base[seat.role],
                role_world_size=role_sizes[seat.role],
                alive=seat.alive,
                shard=seat.shard,
                store=seat.store,
            )
        )
        base += seat.slots
        role_base[seat.role] += seat.slots
    return tuple(ranks)
