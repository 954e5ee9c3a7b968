"""Where the members of a group find each other when its communicator is built.

On one node that is a prefix of the job's store. On several it is a scope of the sharded store
(:mod:`flashrun.rendezvous.sharded`), by the rank table that the agent has laid into shared memory:
no server is asked by more than its own workers and a few other nodes, however many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C import _distributed_c10d as c10d

from flashrun import messages
from flashrun.rendezvous.sharded import Scope, ScopeStore, Shards
from flashrun.rendezvous.table import RankTable

_TIMEOUT = timedelta(seconds=60)


class Bootstrap:
    """See the module.

    Attributes:
        here: number of the place of this worker's node.
        spread: the newest table, where the scripts' default store is spread by that.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._address = (environ.get("MASTER_ADDR", ""), int(environ.get("MASTER_PORT", "0")))
        # Stores outlive a restart of all workers: a round must not find another's addresses. (Each
        # round has a channel of its own.)
        self._round = Path(environ[messages.CHANNEL]).name
        self._store: Any = None
        self._generation = -1
        self._table: RankTable | None = None  # where all nodes have a shard
        self.here = 0
        self.spread: RankTable | None = None
        self._joins = -1
        self._path = environ.get(messages.TABLE, "")
        if self._path:
            self.here = int(environ["GROUP_RANK"])
            self._read_table()

    def _read_table(self) -> None:
        """A recovery may have given a lost node's place to another one."""
        table = RankTable.from_json(Path(self._path).read_text())
        if table.joins == self._joins:
            return
        self._joins = table.joins
        self._table = None
        first = table.nodes[0]
        if table.spread and first.joined:  # what was at MASTER_ADDR is lost
            self._address, self._store = (first.addr, first.store), None
        self.spread = table if table.spread else None
        if all(node.shard for node in table.nodes):  # otherwise the agents have said why
            self._table = table
            addresses = [(node.addr, node.shard) for node in table.nodes]
            self._shards = Shards(addresses, self.here)

    def store(
        self,
        generation: int,
        ident: str,
        ranks: Sequence[int],
        timeout: timedelta,
        wanted: Callable[[], None],
    ) -> Any:
        """For one group in one generation; what others write is not in it.

        Args:
            ranks: the members, in the order of the group.
            timeout: of waiting for another member.
            wanted: raises when there is no point in going on.
        """
        prefix = f"flashrun/{self._round}/{generation}/{ident}"
        if self._path and generation != self._generation:
            self._generation = generation
            self._read_table()
            if self._table is not None:
                self._shards.refresh()
        if self._table is None:
            return c10d.PrefixStore(prefix, self._one())
        places = self._table.places(ranks)
        return ScopeStore(
            Scope(
                self._shards,
                prefix,
                list(places),
                list(places.values()),
                timeout.total_seconds(),
                wanted,
            )
        )

    def _one(self) -> Any:
        if self._store is None:
            host, port = self._address
            self._store = c10d.TCPStore(host, port, None, False, _TIMEOUT, wait_for_workers=False)
        return self._store
