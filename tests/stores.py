"""Real stores for the tests of what all backends have in common."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from flashrun.rendezvous.kv import ControlStore
from tests import etcd, helpers

RING = 256
"""Records that an embedded store keeps in the tests, so that it soon forgets."""


def open_store(spec: dict[str, Any]) -> ControlStore:
    """A client of the store that ``spec`` (JSON) names."""
    if spec["kind"] == "embedded":
        from flashrun.rendezvous.embedded import connect_embedded

        return connect_embedded("127.0.0.1", spec["port"], 20.0, ring=RING)
    from flashrun.rendezvous.etcd_config import EtcdConfig
    from flashrun.rendezvous.etcd_store import EtcdStore

    where, prefix = tuple(spec["endpoints"]), spec["prefix"]
    return EtcdStore(EtcdConfig(where, prefix=prefix, timing=etcd.FAST))


class Backend:
    """A running store; ``kind`` is ``embedded`` or ``etcd``."""

    def __init__(self, spec: dict[str, Any], cluster: etcd.Cluster | None = None) -> None:
        self.spec = spec
        self.kind = str(spec["kind"])
        self.cluster = cluster
        self._clients: list[ControlStore] = []

    def open(self) -> ControlStore:
        """A client that is closed with the test."""
        client = open_store(self.spec)
        self._clients.append(client)
        return client

    def process(self, body: str) -> helpers.Running:
        """Start ``body`` in a process of its own, with ``store`` and ``say`` (a line to us)."""
        code = (
            "import json, sys\n"
            "from tests.stores import open_store\n"
            f"store = open_store(json.loads({json.dumps(json.dumps(self.spec))}))\n"
            "def say(text): print(text, flush=True)\n" + body + "\nstore.close()\n"
        )
        root = Path(__file__).resolve().parent.parent
        return helpers.Running([sys.executable, "-c", code], cwd=root)

    def forget(self, client: ControlStore) -> None:
        """Have the store forget what led to its state now."""
        if self.kind == "embedded":
            for number in range(RING + 1):
                client.put("elsewhere", str(number).encode())
            return
        assert self.cluster is not None
        client.put("elsewhere", b"1")
        revision = client.snapshot().revision
        member = self.cluster.members[0]
        self.cluster.ask(member, "KVStub", "Compact", "CompactionRequest", revision=revision)

    def close(self) -> None:
        for client in self._clients:
            client.close()
