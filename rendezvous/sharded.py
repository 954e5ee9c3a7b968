"""The sharded bootstrap store: what it costs a node to bring a communicator up does not grow with
the cluster.

Every node hosts one shard, a torch ``TCPStore``; a worker is connected to its own node's. One
communicator of one generation is a `Scope`: a prefix and the nodes that take part. In a scope

- a key has a *home*, one of the nodes, chosen by its hash, and is written once;
- a reader asks its own node's shard. The first of a node fetches the key, and lays it there for the
  others, from the *parent* of this node in a tree of `FAN_OUT` over the nodes, rooted at the key's
  home. So a shard answers its own workers and at most `FAN_OUT` other nodes, whatever their number,
  and a key is everywhere after log(nodes) hops;
- a barrier climbs the same tree: each shard counts its own workers and its children. It may gather
  a word from each member on its way.

Every node of a scope has to ask for a key that one of them asks for; that is how communicators are
built. Whoever fetches for its node may die: those who wait for it meet their deadline, or the next
generation, whose scope has another prefix.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

from torch._C import _distributed_c10d as c10d

from flashrun.rendezvous.connections import Connections
from flashrun.rendezvous.links import client
from flashrun.rendezvous.peeking import peek

FAN_OUT = 4
"""Children of a node: a shard's work for one key is its workers and these; 1,280 nodes are six hops
deep."""

_NOBODYS_KEY = "alive?"
_BETWEEN = "\n"  # words of members
_FIRST_PAUSE, _LAST_PAUSE = 0.0002, 0.02  # s between two looks for a key
_CONNECT_TIMEOUT = timedelta(seconds=10)  # of a shard that listens before anybody is told of it

_ANSWER_S = 5.0  # of a shard, to a request that waits for nothing

Address = tuple[str, int]
Connect = Callable[[str, int], Any]


def _go_on() -> None:
    """The default of `wanted`."""


def connect(host: str, port: int) -> Any:
    """A client of the shard there."""
    return client(host, port, _CONNECT_TIMEOUT, _ANSWER_S)


def parent_of(position: int) -> int | None:
    """The parent's position in the tree; None for the root."""
    return (position - 1) // FAN_OUT if position else None


def children_of(position: int, size: int) -> range:
    """The children's positions."""
    first = position * FAN_OUT + 1
    return range(first, max(first, min(first + FAN_OUT, size)))


class Shard:
    """A connection to a shard. No request waits for anything but the answer; after the first that
    was not answered the connection is of no use any more.

    Attributes:
        store: the client.
    """

    def __init__(self, store: Any, where: str) -> None:
        self.store = store
        self.broken = False
        self._where = where

    def _ask(self, what: str, *arguments: Any) -> Any:
        try:
            if not self.broken:
                return getattr(self.store, what)(*arguments)
            problem = "it was gone before"
        except RuntimeError as error:  # all of torch's are
            self.broken = True
            problem = str(error).splitlines()[0]
        raise ConnectionError(
            f"the bootstrap shard of {self._where} does not answer ({problem}); is that node lost?"
        )

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key, value)

    def get(self, key: str) -> bytes | None:
        """The value of a key, None when it is absent."""
        return peek(partial(self._ask, "compare_set", key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of keys that are there."""
        return list(self._ask("multi_get", keys))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask("check", keys))

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key, amount))


class Shards(Connections[Shard]):
    """This process's connections to the shards.

    Args:
        addresses: (host, port) of each node's shard, by node number.
        own: number of the node that this process is on.
        connect: opens one.
    """

    def __init__(self, addresses: Sequence[Address], own: int, connect: Connect = connect) -> None:
        super().__init__(len(addresses), self._of)
        self.addresses = list(addresses)
        self.own = own
        self._connect = connect

    def _of(self, node: int) -> Shard:
        """The shard of a node.

        Raises:
            ConnectionError: it cannot be reached; names the node and the address.
        """
        host, port = self.addresses[node]
        where = f"node {node} ({host}, port {port})"
        try:
            return Shard(self._connect(host, port), where)
        except RuntimeError as error:
            raise ConnectionError(
                f"the bootstrap shard of {where} cannot be reached:"
                f" {str(error).splitlines()[0]}; is that node lost?"
            ) from error

    def refresh(self) -> None:
        """Let go of connections whose server has gone (it may be back, or be needed no more)."""
        for node, shard in self.opened().items():
            with suppress(ConnectionError):
                shard.check([_NOBODYS_KEY])
            if shard.broken:
                self.drop(node)


@dataclass
class Scope:
    """The keys of one communicator in one generation.

    Args:
        shards: this process's connections.
        prefix: of generation and group; no other scope has it.
        nodes: numbers of the nodes that take part, in the same order everywhere.
        members: which members of the communicator are on each of them.
        deadline: seconds that a wait may take.
        wanted: called while waiting; raises when there is no point in going on.
    """

    shards: Shards
    prefix: str
    nodes: Sequence[int]
    members: Sequence[Sequence[int]]
    deadline: float
    wanted: Callable[[], None] = _go_on
    _place: int = field(init=False)

    def __post_init__(self) -> None:
        self._place = list(self.nodes).index(self.shards.own)

    def _key(self, key: str) -> str:
        return f"{self.prefix}/{key}"

    def _position(self, home: int) -> int:
        return (self._place - home) % len(self.nodes)

    def _place_at(self, position: int, home: int) -> int:
        return (position + home) % len(self.nodes)

    def home(self, key: str) -> int:
        """Which of `nodes` (by index) has the key."""
        return zlib.crc32(self._key(key).encode()) % len(self.nodes)

    def set(self, key: str, value: bytes) -> None:
        """Write a key, once. It goes to its home and to the own node, whose children may wait."""
        full, home = self._key(key), self.home(key)
        self.shards[self.nodes[home]].set(full, value)
        if home != self._place:
            self.shards[self.shards.own].set(full, value)

    def get(self, key: str, within: float | None = None) -> bytes:
        """Read a key, when somebody has written it.

        Args:
            within: seconds, if not `deadline`.

        Raises:
            TimeoutError: it did not come in time; names the key and who was asked.
        """
        full = self._key(key)
        own = self.shards[self.shards.own]
        found = own.get(full)
        if found is not None:
            return found
        above = self._above(key)
        if above is None or own.add(f"{full}/asked", 1) > 1:
            return self._await(own, self.shards.own, full, within)
        value = self._await(self.shards[above], above, full, within)
        own.set(full, value)
        return value

    def get_many(self, keys: Sequence[str], within: float | None = None) -> list[bytes]:
        """Read several keys; two requests where all are on this node by now."""
        own, full = self.shards[self.shards.own], [self._key(key) for key in keys]
        if own.check(full):
            return own.multi_get(full)
        above = {self._above(key) for key in keys}
        self.shards.open(node for node in above if node is not None)
        return [self.get(key, within) for key in keys]

    def _above(self, key: str) -> int | None:
        """The node from which this one gets a key; None: it is its home."""
        home = self.home(key)
        parent = parent_of(self._position(home))
        return None if parent is None else self.nodes[self._place_at(parent, home)]

    def has(self, key: str) -> bool:
        """Whether the key has been written; asks its home."""
        return self.shards[self.nodes[self.home(key)]].check([self._key(key)])

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which is at its home alone, and return its new value."""
        return self.shards[self.nodes[self.home(key)]].add(self._key(key), amount)

    def _await(self, shard: Shard, node: int, full: str, within: float | None) -> bytes:
        seconds = self.deadline if within is None else within
        end = time.monotonic() + seconds
        pause = _FIRST_PAUSE
        # Looking, not waiting: a blocked wait could not be given up.
        while (found := shard.get(full)) is None:
            self.wanted()
            if time.monotonic() > end:
                host, port = self.shards.addresses[node]
                raise TimeoutError(
                    f"waited {seconds:.0f} s for the bootstrap key {full} at the shard of"
                    f" node {node} ({host}, port {port}); a worker that should have written or"
                    " passed it on is lost or late"
                )
            time.sleep(pause)
            pause = min(pause * 1.5, _LAST_PAUSE)
        return found

    def arrive(self, name: str, member: int, word: str | None = None) -> None:
        """Come to a barrier; does not wait.

        Args:
            word: that all are to get; None: nobody brings any.
        """
        root = self.home(f"{name}/all")
        self.shards[self.shards.own].set(self._key(f"{name}/{member}"), "=" + (word or ""))
        position: int | None = self._position(root)
        while position is not None:
            place = self._place_at(position, root)
            shard = self.shards[self.nodes[place]]
            below = [self._place_at(p, root) for p in children_of(position, len(self.nodes))]
            needed = len(self.members[place]) + len(below)
            if shard.add(self._key(f"{name}/count"), 1) < needed:
                return
            # The last one to come to a shard goes on to the parent's, for all of them.
            words = {} if word is None else self._words(shard, name, self.members[place], below)
            position = parent_of(position)
            if word is not None and position is not None:
                above = self.shards[self.nodes[self._place_at(position, root)]]
                above.set(self._key(f"{name}/below/{place}"), json.dumps(words))
        # In the order of the members, which saves everybody to look.
        self.set(f"{name}/all", _BETWEEN.join(["", *(words[m] for m in sorted(words))]).encode())

    def _words(
        self, shard: Shard, name: str, members: Sequence[int], below: Sequence[int]
    ) -> dict[int, str]:
        """What the members of a node, and of those below it, have brought."""
        words = shard.multi_get([self._key(f"{name}/{member}") for member in members])
        found = {m: word.decode()[1:] for m, word in zip(members, words, strict=True)}
        if below:
            for part in shard.multi_get([self._key(f"{name}/below/{place}") for place in below]):
                found.update({int(m): word for m, word in json.loads(part).items()})
        return found

    def meet(self, name: str, member: int, word: str | None = None) -> list[str]:
        """A barrier; where each member brings a word (one line), everybody gets them, by number.

        Args:
            word: None: nobody brings any, which costs the least.

        Raises:
            TimeoutError: not all came within `deadline`; says which did not.
        """
        self.arrive(name, member, word)
        return self._await_all(name).decode().split(_BETWEEN)[1:]

    def _await_all(self, name: str) -> bytes:
        try:
            return self.get(f"{name}/all")
        except TimeoutError as error:
            missing = self._missing(name)
            raise TimeoutError(
                f"waited {self.deadline:.0f} s for members {missing} of"
                f" {sum(map(len, self.members))} to come to '{name}' of {self.prefix}"
            ) from error

    def _missing(self, name: str) -> list[int]:
        """The members that have not come to a barrier; a node that can't be asked has none."""
        missing: list[int] = []
        for node, members in zip(self.nodes, self.members, strict=True):
            keys = {member: self._key(f"{name}/{member}") for member in members}
            try:
                shard = self.shards[node]
                if not shard.check(list(keys.values())):
                    missing += [m for m, key in keys.items() if not shard.check([key])]
            except ConnectionError:
                missing += members
        return sorted(missing)


class ScopeStore(c10d.Store):
    """A `Scope` as the store that a communicator is made with; every key is written once.

    Keep a reference while torch may use it: C++ keeps its own half alone alive (2.13).
    """

    def __init__(self, scope: Scope) -> None:
        super().__init__()
        self.scope = scope

    def set(self, key: str, value: Any) -> None:
        self.scope.set(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return self.scope.get(key)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self.scope.get_many(keys)

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self.scope.get_many(keys, None if timeout is None else timeout.total_seconds())

    def check(self, keys: Sequence[str]) -> bool:
        return all(self.scope.has(key) for key in keys)

    def add(self, key: str, amount: int) -> int:
        return self.scope.add(key, amount)

    def clone(self) -> ScopeStore:
        return ScopeStore(self.scope)

    def has_extended_api(self) -> bool:
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        """The scope's deadline stands: it is shorter than a script's timeout, on purpose."""
