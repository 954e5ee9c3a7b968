"""Asks a job's store who leads: a process of its own, since it may have to be within a network.

    python -m tests.nodes_soak.peek flash HOST:PORT RUN_ID

For each line on stdin one line on stdout: the addresses of the nodes that lead the membership and
the recovery, as JSON ("": nobody).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from flashrun.control.plan_book import PREFIX
from flashrun.overview_command import _in_etcd
from flashrun.rendezvous.endpoint import parse_endpoint
from flashrun.rendezvous.kv import ControlStore, KeyValue

_PATIENCE_S = 10.0


@contextmanager
def stores(backend: str, where: str, run_id: str) -> Iterator[tuple[KeyValue, ControlStore]]:
    if backend == "flash-etcd":
        with _in_etcd(where, run_id, "") as (kv, again):
            if kv is None:
                raise LookupError("no job")
            with again() as store:
                yield kv, store
        return
    from flashrun.rendezvous.embedded import connect_embedded
    from flashrun.rendezvous.tcp_kv import connect

    endpoint = parse_endpoint(where, 1)
    at = (endpoint.host, endpoint.port, _PATIENCE_S, _PATIENCE_S)
    with connect_embedded(*at) as store:
        yield connect(*at), store


def leaders(kv: KeyValue, store: ControlStore) -> dict[str, str]:
    """Addresses, by what is led."""
    count = int(kv.get(f"{PREFIX}count") or b"0")
    records = kv.get_many([f"{PREFIX}node/{i}" for i in range(1, count + 1)])
    nodes = [json.loads(record) for record in records if record is not None]
    leader = kv.get(f"{PREFIX}leader")
    order = json.loads(leader)["order"] if leader else -1
    keys = [key for key in store.list_keys("recovery/") if key.endswith("/leader")]
    newest = max(keys, key=lambda key: int(key.split("/")[1].partition(".")[0]), default="")
    value = store.get(newest) if newest else None
    node = json.loads(value)["node"] if value else ""
    return {
        "membership": next((n["addr"] for n in nodes if n["order"] == order), ""),
        "recovery": next((n["addr"] for n in nodes if n["node"] == node), ""),
    }


def main() -> None:
    backend, where, run_id = sys.argv[1:]
    with stores(backend, where, run_id) as (kv, store):
        for _ in sys.stdin:
            print(json.dumps(leaders(kv, store)), flush=True)


if __name__ == "__main__":
    main()
