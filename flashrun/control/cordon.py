"""Nodes that get no ranks any more: by hand (``flashrun cordon``), or after failing repeatedly.

A cordon goes by a node's address, so that it outlives the node's agent. What runs is left alone: a
cordoned node keeps its ranks until the next round, and then waits, as a spare that nobody takes.
One that was cordoned by itself is taken all the same where there are too few others.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from flashrun.control.records import Job, Member
from flashrun.rendezvous.kv import KeyValue


@dataclass(frozen=True)
class Cordon:
    """Why a node gets no ranks."""

    reason: str
    by_hand: bool


Cordons = Mapping[str, Cordon]
"""By address."""


def kept_out(job: Job, live: Sequence[Member], cordons: Cordons) -> frozenset[str]:
    """Which of the living nodes get no place in the next round, by id. Pure.

    With static node ranks nobody else can take a place, so all are taken.
    """
    if job.policy == "static":
        return frozenset()
    strict = {m.node for m in live if m.addr in cordons and cordons[m.addr].by_hand}
    out = {m.node for m in live if m.addr in cordons}
    return frozenset(out if len(live) - len(out) >= job.min_nodes else strict)


def too_many(times: Sequence[float], now: float, limit: int, window_s: float) -> bool:
    """Whether ``limit`` faults lie in the last ``window_s`` seconds. Pure."""
    return limit > 0 and len([t for t in times if now - t <= window_s]) >= limit


class CordonBook:
    """The cordons in a job's store, and what has led to them.

    Args:
        prefix: of the job's keys.
    """

    def __init__(self, kv: KeyValue, prefix: str) -> None:
        self._kv = kv
        self._prefix = prefix
        self._key = f"{prefix}cordoned"

    def read(self) -> dict[str, Cordon]:
        raw = self._kv.get(self._key)
        return {} if raw is None else _from_json(raw)

    def set(self, addr: str, cordon: Cordon | None) -> None:
        """Write or (None) lift a cordon; with it, what the node has done before is forgotten."""
        self._change(
            lambda found: {k: v for k, v in found.items() if k != addr}
            if cordon is None
            else {**found, addr: cordon}
        )
        if cordon is None:
            self._kv.put(self._faults(addr), b"[]")
        self._kv.increment(f"{self._prefix}revision")

    def note_fault(self, addr: str, what: str, limit: int, window_s: float) -> str | None:
        """A fault on a node; the reason, if it is cordoned for it now."""
        if limit <= 0:
            return None
        # The clock of whoever writes: a window of minutes bears that clocks differ.
        now = time.time()
        times = [t for t in json.loads(self._kv.get(self._faults(addr)) or b"[]")
                 if now - t <= window_s]  # fmt: skip
        times.append(now)
        self._kv.put(self._faults(addr), json.dumps(times[-limit:]).encode())
        if not too_many(times, now, limit, window_s) or addr in self.read():
            return None
        reason = f"{len(times)} faults within {window_s:g} s, the last: {what}"
        self.set(addr, Cordon(reason, by_hand=False))
        return reason

    def _faults(self, addr: str) -> str:
        return f"{self._prefix}faults/{addr}"

    def _change(self, change: Callable[[dict[str, Cordon]], dict[str, Cordon]]) -> None:
        while True:
            raw = self._kv.get(self._key)
            new = change({} if raw is None else _from_json(raw))
            fields = {addr: asdict(cordon) for addr, cordon in new.items()}
            text = json.dumps({"cordons": fields, "serial": uuid.uuid4().hex}).encode()
            if self._kv.compare_and_swap(self._key, raw, text) or self._kv.get(self._key) == text:
                return


def _from_json(raw: bytes) -> dict[str, Cordon]:
    return {addr: Cordon(**fields) for addr, fields in json.loads(raw)["cordons"].items()}
