"""The key-value interfaces that carry the control plane, and the small one in memory for tests.

:class:`KeyValue` is the small one, for any torch Store (:mod:`flashrun.rendezvous.tcp_kv`).
:class:`ControlStore` adds revisions, transactions, leases and watches; its backends are
:mod:`flashrun.rendezvous.etcd_store` (etcd v3) and :mod:`flashrun.rendezvous.embedded` (TCPStore).
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from flashrun.rendezvous.lease import Lease
    from flashrun.rendezvous.watch import Watch

MAX_VALUE = 1 << 20
"""The most bytes of one value, and of one transaction's values together. An etcd server takes
requests of 1.5 MiB unless told otherwise (``--max-request-bytes``)."""

MAX_OPERATIONS = 60
"""The most operations of one transaction (an etcd server takes 128, ours included)."""


HOST_LOST_REMEDY = (
    "start the job again. With etcd (--rdzv-backend=flash-etcd) no single node is needed."
)
"""Where a store has ended with the node that hosts it."""


class StoreLost(RuntimeError):
    """The store does not answer any more; the message says which one and what to do."""


class StoreRefused(RuntimeError):
    """The store answers, but not to us: password, certificate, permission, a bad request. The
    message says what was refused and what to do; trying again would not help."""


class LeaseLost(RuntimeError):
    """A write named a lease that has run out or was given back; nothing was written."""


class Compacted(RuntimeError):
    """What happened since the revision asked for is not kept any more. Take a
    :meth:`ControlStore.snapshot` and watch from that."""


class Forked(RuntimeError):
    """A client was used in a process that did not make it."""


class KeyValue(ABC):
    """A small key-value store. Values are bytes and never empty. Keys are ``/``-separated."""

    @abstractmethod
    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """The values of ``keys``, None where there is none. Raises StoreLost."""

    @abstractmethod
    def put(self, key: str, value: bytes) -> None:
        """Write ``value``; it is seen by others no later than our next answered call."""

    @abstractmethod
    def compare_and_swap(self, key: str, expected: bytes | None, value: bytes) -> bool:
        """Write ``value`` if the key holds ``expected`` (None: if it is absent).

        Every ``value`` must be unique over the life of the key (a serial number, the writer's id):
        a backend may only be able to tell success by comparing what is there with what was written.
        """

    @abstractmethod
    def increment(self, key: str) -> int:
        """Add one to a counter (absent: 0) and return its new value; acknowledged."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove ``key``; nothing happens when it is absent."""

    @abstractmethod
    def list_keys(self, prefix: str = "") -> list[str]:
        """The keys that start with ``prefix``."""

    def get(self, key: str) -> bytes | None:
        """The value of ``key``, None when there is none."""
        return self.get_many([key])[0]

    def counter(self, key: str) -> int:
        """The value of a counter (absent: 0)."""
        return int(self.get(key) or b"0")

    def range(self, prefix: str) -> dict[str, bytes]:
        """All keys under ``prefix`` with their values."""
        names = self.list_keys(prefix)
        values = self.get_many(names)
        return {k: v for k, v in zip(names, values, strict=True) if v is not None}


class MemoryKeyValue(KeyValue):
    """A KeyValue in this process, shared by threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, bytes] = {}

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        with self._lock:
            return [self._values.get(k) for k in keys]

    def put(self, key: str, value: bytes) -> None:
        with self._lock:
            self._values[key] = value

    def compare_and_swap(self, key: str, expected: bytes | None, value: bytes) -> bool:
        with self._lock:
            if self._values.get(key) != expected:
                return False
            self._values[key] = value
            return True

    def increment(self, key: str) -> int:
        with self._lock:
            number = int(self._values.get(key, b"0")) + 1
            self._values[key] = str(number).encode()
            return number

    def delete(self, key: str) -> None:
        with self._lock:
            self._values.pop(key, None)

    def list_keys(self, prefix: str = "") -> list[str]:
        with self._lock:
            return [k for k in self._values if k.startswith(prefix)]


@dataclass(frozen=True)
class Put:
    """Write ``value``; with a lease the key goes when the lease does."""

    key: str
    value: bytes = field(repr=False)
    lease: Lease | None = None


@dataclass(frozen=True)
class Delete:
    """Remove ``key``; nothing when it is absent."""

    key: str


@dataclass(frozen=True)
class Entry:
    """A value and the revision that wrote it."""

    value: bytes = field(repr=False)
    revision: int


@dataclass(frozen=True)
class Snapshot:
    """All keys under ``prefix`` as they were at ``revision``."""

    prefix: str
    revision: int
    entries: Mapping[str, Entry]


@dataclass(frozen=True)
class Event:
    """What happened to a key.

    Attributes:
        value: of a put; empty for a delete.
        revision: of the write; several events of one transaction share it.
        resynced: stands for everything since the last event of this key: the events between are
            not kept any more (compaction), the outcome is right.
    """

    kind: Literal["put", "delete"]
    key: str
    value: bytes = field(repr=False)
    revision: int
    resynced: bool = False


class ControlStore(KeyValue):
    """A KeyValue with revisions: each write that changes something makes the next one.

    All clients see all writes in one order. A write is done once, or StoreLost says that it may or
    may not have been done: what is retried is retried by compare-and-swap. For several threads of
    one process, not for a fork of it. Every call ends within the client's deadline.

    All methods raise StoreLost, StoreRefused or Forked.
    """

    @property
    @abstractmethod
    def where(self) -> str:
        """Names the store in messages; holds no secrets."""

    @abstractmethod
    def transaction(
        self, expected: Mapping[str, bytes | None], operations: Sequence[Put | Delete]
    ) -> bool:
        """Carry out all of ``operations`` if every key holds what is ``expected`` (None: absent).

        Returns:
            Whether it was carried out.

        Raises:
            LeaseLost: a lease of a Put is gone. ValueError: over MAX_VALUE or MAX_OPERATIONS, an
            empty value, or a key twice.
        """

    @abstractmethod
    def snapshot(self, prefix: str = "") -> Snapshot:
        """All keys under ``prefix`` at one moment, to watch from."""

    @abstractmethod
    def lease(self, ttl_s: float) -> Lease:
        """A lease of ``ttl_s`` seconds (rounded up to whole ones, at least 1; the store may give
        more), kept alive in the background until it is revoked or this client is closed."""

    @abstractmethod
    def watch(self, prefix: str = "", start: Snapshot | int | None = None) -> Watch:
        """All events under ``prefix``, each once and in order.

        Args:
            start: from the state of a snapshot of this prefix, after a revision (as
                ``Watch.revision`` gives it), or from now on.
        """

    @abstractmethod
    def close(self) -> None:
        """End the background work. Leases are not revoked: they run out."""

    def put(self, key: str, value: bytes, lease: Lease | None = None) -> None:
        """Write ``value``; acknowledged. With a lease, the key goes when the lease does."""
        self.transaction({}, [Put(key, value, lease)])

    def delete(self, key: str) -> None:
        self.transaction({}, [Delete(key)])

    def compare_and_swap(
        self, key: str, expected: bytes | None, value: bytes, lease: Lease | None = None
    ) -> bool:
        """As KeyValue's, without the need for unique values."""
        return self.transaction({key: expected}, [Put(key, value, lease)])

    def increment(self, key: str) -> int:
        while True:
            old = self.get(key)
            new = int(old or b"0") + 1
            if self.transaction({key: old}, [Put(key, str(new).encode())]):
                return new

    def range(self, prefix: str) -> dict[str, bytes]:
        return {key: entry.value for key, entry in self.snapshot(prefix).entries.items()}

    def __enter__(self) -> ControlStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_transaction(operations: Sequence[Put | Delete]) -> None:
    """Raises ValueError for what a backend might refuse, so that all refuse the same."""
    keys = [operation.key for operation in operations]
    values = [operation.value for operation in operations if isinstance(operation, Put)]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise ValueError(f"a transaction may touch a key once; twice: {', '.join(twice)}")
    if len(operations) > MAX_OPERATIONS:
        raise ValueError(f"{len(operations)} operations in a transaction; {MAX_OPERATIONS} at most")
    if not all(values):
        raise ValueError("values are never empty")
    size = sum(len(value) for value in values)
    if size > MAX_VALUE:
        raise ValueError(
            f"{size} bytes to write to {keys[0]!r} at once; {MAX_VALUE} at most. Split the value."
        )
