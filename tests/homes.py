"""Nodes that serve the scripts' default store, for tests without a job."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch._C import _distributed_c10d as c10d

from flashrun.rendezvous.server import look_up_no_names
from flashrun.rendezvous.table import RankTable, Seat, assign_ranks

look_up_no_names()


def server() -> Any:
    within = timedelta(seconds=30)
    return c10d.TCPStore("127.0.0.1", 0, None, True, within, wait_for_workers=False)


def seat(name: str, port: int, slots: int = 1) -> Seat:
    return Seat(name, slots, "r", "127.0.0.1", shard=1, store=port)


def table_of(ports: Sequence[int], slots: int = 1) -> RankTable:
    """Nodes n0, n1, … with their stores at these ports."""
    nodes = assign_ranks([seat(f"n{i}", port, slots) for i, port in enumerate(ports)])
    return RankTable(
        1, 0, 0, "j", slots * len(ports), "127.0.0.1", ports[0], True, nodes, token="secret"
    )
