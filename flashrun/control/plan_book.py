"""The plan in the store, and the rank tables apart from it.

A plan is read by every node whenever anything has changed. A table is large (each node is in it)
and never changes, so it has a key of its own, and each node reads it once.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

from flashrun.control.records import Plan, plan_from_json, plan_to_json
from flashrun.rendezvous.kv import KeyValue, StoreLost
from flashrun.rendezvous.table import RankTable

PREFIX = "flashrun/"
"""Of the control plane's keys."""

_TRIES = 20  # of reading a plan whose table has been removed meanwhile; one is usual


class PlanBook:
    """See the module.

    Args:
        prefix: of the control plane's keys.

    Attributes:
        raw: the plan that was read last, as it is in the store.
    """

    def __init__(self, kv: KeyValue, prefix: str) -> None:
        self._kv = kv
        self._plan = f"{prefix}plan"
        self._tables = f"{prefix}table/"
        self._known: tuple[str, RankTable] | None = None
        self.raw: bytes | None = None

    def read(self) -> Plan:
        """The newest plan."""
        for _ in range(_TRIES):
            self.raw = self._kv.get(self._plan)
            if self.raw is None:
                return Plan()
            plan, name = plan_from_json(self.raw)
            if not name:
                return plan
            if self._known is None or self._known[0] != name:
                text = self._kv.get(self._tables + name)
                if text is None:
                    continue  # of a round that is over by now
                self._known = name, RankTable.from_json(text)
            return replace(plan, table=self._known[1])
        raise StoreLost("the store has lost the rank table; start the job again")

    def write(self, plan: Plan, writer: str) -> bool:
        """Write what follows on the plan that was read last; whether nobody else was first.

        Args:
            writer: unique, so that a compare-and-swap can tell whose plan won.
        """
        before = self._known[0] if self._known is not None else ""
        name = ""
        if plan.table is not None:
            text = plan.table.to_json().encode()
            name = f"{plan.round}.{hashlib.sha256(text).hexdigest()[:16]}"
            if name != before:
                self._kv.put(self._tables + name, text)
        if not self._kv.compare_and_swap(self._plan, self.raw, plan_to_json(plan, name, writer)):
            return False
        if plan.table is not None:
            self._known = name, plan.table
            if before not in ("", name):
                self._kv.delete(self._tables + before)
        return True

    def confirm(self, writer: str) -> bool:
        """Write the plan that was read last once more; whether it still was the newest. Whoever
        was about to write what follows on it has to read again.

        Args:
            writer: as of `write`.
        """
        assert self.raw is not None  # whoever confirms a plan has read one
        raw = json.dumps({**json.loads(self.raw), "writer": writer}).encode()
        return self._kv.compare_and_swap(self._plan, self.raw, raw)
