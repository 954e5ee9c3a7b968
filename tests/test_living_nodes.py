"""What is known of the nodes that live: slots, addresses, health and role, until they die. With
etcd that is a leased key of each; the embedded store has no leases of its own, so there it is a
record and a counter that is renewed, judged by the clock of whoever looks."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

from flashrun.control.liveness import Heartbeats
from flashrun.control.plan_book import PREFIX
from flashrun.control.records import Member, member_from_json, member_to_json, shown
from flashrun.rendezvous.kv import ControlStore
from tests import helpers
from tests.stores import Backend
from tests.test_control_store import backend, server  # noqa: F401  # fixtures

LEASE_S = 2.0
ME = Member("n7", 3, 8, "default", "10.0.0.7", state="running", round=2)

ETCD = f"""
from flashrun.rendezvous import etcd_job
from flashrun.control.records import member_from_json, shown
etcd_job.ALIVE_S = {LEASE_S}
folder = etcd_job.JobFolder.find(store, "n7", lambda kv: "lives", say)
def show(record): folder.show(shown(member_from_json(record)))
"""
EMBEDDED = f"""
import threading
def beat():
    while True:
        store.increment("{PREFIX}beat/3")
        threading.Event().wait({LEASE_S / 8})
def show(record): store.put("{PREFIX}node/3", record)
threading.Thread(target=beat, daemon=True).start()
"""
# It becomes what the test asks for, until it is killed.
NODE = """
import time
record = b""
while True:
    asked = store.get("asked")
    if asked not in (None, record):
        show(asked)
        record = asked
        store.put("shown", asked)
    time.sleep(0.02)
"""


class Living:
    """Reads what lives, as its backend tells it."""

    def __init__(self, kind: str, store: ControlStore) -> None:
        self._kind, self._store = kind, store
        self._beats = Heartbeats(LEASE_S)

    def __call__(self) -> list[dict[str, Any]]:
        store = self._store
        if self._kind == "etcd":
            values = store.get_many(store.list_keys("agents/"))
            return [json.loads(v) for v in values if v is not None and v != b"{}"]
        record, beat = store.get_many([f"{PREFIX}node/3", f"{PREFIX}beat/3"])
        if record is None or self._beats.observe({"n7": beat}, time.monotonic()):
            return []
        return [json.loads(shown(member_from_json(record)))]


def test_a_node_that_dies_is_gone_by_its_lease_alone(backend: Backend) -> None:  # noqa: F811
    store = backend.open()
    living = Living(backend.kind, store)
    node = backend.process((ETCD if backend.kind == "etcd" else EMBEDDED) + NODE)
    for state, role, health in (("waiting", "spare", "ok"), ("running", "active", "ok"),
                                ("failed", "active", "failed")):  # fmt: skip
        record = member_to_json(replace(ME, state=state))  # type: ignore[arg-type]
        store.put("asked", record)
        helpers.wait_until(lambda wanted=record: store.get("shown") == wanted, "what it shows", 60)
        (found,) = living()
        assert found == {
            "addresses": ["10.0.0.7"], "slots": 8, "role": role, "health": health,
            "state": state, "order": 3,
        }  # fmt: skip
    node.process.kill()
    helpers.wait_until(lambda: not living(), "the end of its lease", 60)


def test_what_is_said_of_a_failed_node() -> None:
    failed = replace(ME, state="failed", reason="workers failed twice")
    assert json.loads(shown(failed))["health"] == "workers failed twice"
