"""The default store's keys, spread over the nodes of a job: a client of all their TCPStores as one.

Each key has a *home*, a place in the rank table by the hash of the key (`RankTable.home`), and is
there alone. Ranks do not move, so neither does a home; when its node is lost, the spare that takes
the place serves it, and what the lost one had is written there anew. A connection to a home is
opened when a key of it is first needed, so what it costs a worker to begin does not grow with the
cluster, and no server hears of all workers because they are there.

What is asked of several keys goes to all homes concerned, one after the other: a write to several
is not one write. Nothing is kept of what was read, on no node: a key may be written again.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from flashrun.rendezvous.connections import Connections
from flashrun.rendezvous.endpoint import join_host_port
from flashrun.rendezvous.links import client
from flashrun.rendezvous.table import RankTable

INIT = "init/"
"""What a TCPStore adds to when it connects, for a server that waits for its clients; nobody waits
here. Each worker has it on its own node."""

_ANSWER_S = 30.0  # of a home, to a request that waits for nothing
_CONNECT = timedelta(seconds=20)
_KNOCK_S = 1.0  # between two looks whether it is still worth to wait for a connection
_RING_S = 0.2  # for the door of another node to be opened

Open = Callable[[str, int], Any]


class Unreached(dist.DistNetworkError):
    """A home has no connection, so it has not been asked for anything."""


def _never() -> bool:
    """The default of `given_up`."""
    return False


def connect(host: str, port: int, given_up: Callable[[], bool] = _never) -> Any:
    """A client; the first answer that does not come in time ends it.

    Raises:
        Unreached: see there. At once, where nobody listens: a home does from before anybody is
            told of it, until its node is lost. (torch's client would knock on until the timeout.)
    """
    end = time.monotonic() + _CONNECT.total_seconds()
    while True:
        try:
            socket.create_connection((host, port), timeout=_KNOCK_S).close()
            return client(host, port, _CONNECT, _ANSWER_S)
        except TimeoutError as error:
            if time.monotonic() < end and not given_up():
                continue
            raise _unreached(host, port, "no answer") from error
        except (OSError, RuntimeError) as error:
            raise _unreached(host, port, str(error).splitlines()[0]) from error


def _unreached(host: str, port: int, why: str) -> Unreached:
    where = join_host_port(host, port)
    return Unreached(f"the default store's server at {where} can't be reached ({why})")


class Spread:
    """See the module. As far as it goes, its methods are a TCPStore's.

    Args:
        table: says where the homes are.
        own: number of the place that this worker is at.
        open_: connects to one.

    Attributes:
        table: the one that is used.
    """

    def __init__(self, table: RankTable, own: int, open_: Open = connect) -> None:
        self.table = table
        self._own = own
        self._open = open_
        # Apart from what a TCPStore of the script's own has at MASTER_ADDR, and another round.
        self._prefix = f"flashrun/default-store/{table.round}/"
        self._clients = Connections(len(table.nodes), self._connect)

    def _connect(self, place: int) -> Any:
        node = self.table.nodes[place]
        return self._open(node.addr, node.store)

    def use(self, table: RankTable) -> None:
        """Other nodes may have taken places meanwhile."""
        taken = table.taken_since(self.table.joins)
        self.table = table
        for place in taken:
            self._clients.drop(place)

    def home(self, key: str) -> int:
        """Number of the place that has a key."""
        return self._own if key == INIT else self.table.home(key)

    def homes(self, keys: Iterable[str]) -> dict[int, list[str]]:
        """The places that have keys, and which."""
        found: dict[int, list[str]] = {}
        for key in keys:
            found.setdefault(self.home(key), []).append(key)
        return found

    @property
    def opened(self) -> int:
        """How many connections there are."""
        return len(self._clients.opened())

    def _ask(self, place: int, what: str, *args: Any) -> Any:
        client = self._clients[place]
        try:
            return getattr(client, what)(*args)
        except dist.DistStoreError:
            raise
        except RuntimeError:  # it is of no use any more
            self._clients.drop(place)
            raise

    def _of(self, key: str, what: str, *args: Any) -> Any:
        return self._ask(self.home(key), what, self._prefix + key, *args)

    def _each(self, keys: Iterable[str]) -> dict[int, list[str]]:
        """`homes`, with a connection to each."""
        found = self.homes(keys)
        self._clients.open(found)
        return found

    def _at(self, keys: Sequence[str]) -> list[str]:
        return [self._prefix + key for key in keys]

    def knock(self) -> None:
        """While this worker waits for a key, nothing that it does would tell it that the one who is
        to write that is lost. So each looks after the next place in the ring.

        Raises:
            Unreached: nobody listens there any more.
        """
        place = self.table.nodes[(self._own + 1) % len(self.table.nodes)]
        if place.group_rank == self._own:
            return
        try:
            socket.create_connection((place.addr, place.store), timeout=_RING_S).close()
        except ConnectionRefusedError as error:
            raise _unreached(place.addr, place.store, str(error)) from error
        except OSError:
            pass  # silent: its heartbeat decides

    # --- of one key

    def set(self, key: str, value: bytes) -> None:
        self._of(key, "set", value)

    def add(self, key: str, amount: int) -> int:
        return int(self._of(key, "add", amount))

    def append(self, key: str, value: bytes) -> None:
        self._of(key, "append", value)

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        return bytes(self._of(key, "compare_set", expected, desired))

    def delete_key(self, key: str) -> bool:
        return bool(self._of(key, "delete_key"))

    def queue_push(self, key: str, value: bytes) -> None:
        self._of(key, "queue_push", value)

    def queue_pop(self, key: str, block: bool) -> bytes:
        return bytes(self._of(key, "queue_pop", block))

    def queue_len(self, key: str) -> int:
        return int(self._of(key, "queue_len"))

    # --- of several

    def missing(self, keys: Sequence[str]) -> list[str]:
        """Those at homes where not all of them are."""
        return [
            key
            for place, names in self._each(keys).items()
            if not self._ask(place, "check", self._at(names))
            for key in names
        ]

    def check(self, keys: Sequence[str]) -> bool:
        return not self.missing(keys)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        found: dict[str, bytes] = {}
        for place, names in self._each(keys).items():
            values = self._ask(place, "multi_get", self._at(names))
            found.update(zip(names, map(bytes, values), strict=True))
        return [found[key] for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        if len(keys) != len(values):
            raise dist.DistStoreError("multiSet keys and values vectors must be of same size")
        new = dict(zip(keys, values, strict=True))
        for place, names in self._each(new).items():
            self._ask(place, "multi_set", self._at(names), [new[key] for key in names])

    def list_keys(self) -> list[str]:
        places = range(len(self.table.nodes))
        self._clients.open(places)
        return sorted({key for place in places for key in self._keys_at(place)})

    def num_keys(self) -> int:
        return len(self.list_keys())

    def _keys_at(self, place: int) -> list[str]:
        keys = self._ask(place, "list_keys")
        return [key.removeprefix(self._prefix) for key in keys if key.startswith(self._prefix)]

    def put_again(self, place: int, keys: dict[str, bytes]) -> None:
        """All that a home has, where another node serves it now."""
        for key in self._keys_at(place):  # of an attempt before this one
            if key not in keys:
                self._ask(place, "delete_key", self._prefix + key)
        for key, value in keys.items():
            self._ask(place, "set", self._prefix + key, value)
        self._ask(place, "num_keys")  # answered after all of them
