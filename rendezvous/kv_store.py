"""A torch Store on a ControlStore, so that torch's own parts can use etcd."""

from __future__ import annotations

import os.path
import time
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]  # public

from flashrun.rendezvous.kv import ControlStore, Put
from flashrun.rendezvous.lease import Lease


class KeyValueStore(Store):
    """The keys under ``prefix`` of ``kv``; they go with ``lease``.

    The names of the methods are those that torch's C++ looks for in a Python class (torch 2.13:
    ``deleteKey`` and ``getNumKeys``, but ``compare_set``). A PrefixStore around it keeps no
    reference to the Python half: hold one as long as that is used.
    """

    def __init__(self, kv: ControlStore, prefix: str, lease: Lease | None = None) -> None:
        super().__init__()
        self._kv = kv
        self._prefix = prefix
        self._lease = lease

    def set(self, key: str, value: str | bytes) -> None:
        self._kv.put(self._prefix + key, _stored(value), self._lease)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values; waits for keys that are not there yet."""
        while True:
            found = self._kv.get_many([self._prefix + key for key in keys])
            values = [value[1:] for value in found if value is not None]
            if len(values) == len(keys):
                return values
            self.wait(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Until all ``keys`` are there.

        Raises:
            DistStoreError: they are not after ``timeout``, as TCPStore's.
        """
        limit: timedelta = self.timeout if timeout is None else timeout  # type: ignore[attr-defined]
        deadline = time.monotonic() + limit.total_seconds()
        if self.check(keys):
            return
        names = [self._prefix + key for key in keys]
        common = os.path.commonprefix(names)  # noqa: RUF071  # characters are what is meant
        start = self._kv.snapshot(common)
        missing = set(names) - set(start.entries)
        with self._kv.watch(common, start) as watch:
            while missing:
                events = watch.get(max(0.0, deadline - time.monotonic()))
                missing -= {event.key for event in events if event.kind == "put"}
                if missing and time.monotonic() >= deadline:
                    shown = ", ".join(sorted(name[len(self._prefix) :] for name in missing)[:3])
                    raise DistStoreError(
                        f"wait timeout after {limit.total_seconds() * 1000:.0f}ms at "
                        f"{self._kv.where}, keys: {shown}"
                    )

    def check(self, keys: Sequence[str]) -> bool:
        return None not in self._kv.get_many([self._prefix + key for key in keys])

    def add(self, key: str, amount: int) -> int:
        name = self._prefix + key
        while True:
            old = self._kv.get(name)
            new = int(old[1:] if old is not None else b"0") + amount
            if self._kv.transaction({name: old}, [Put(name, _stored(str(new)), self._lease)]):
                return new

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        """As TCPStore's: what is there afterwards; an absent key counts as an empty ``expected``,
        and gives ``expected`` back where that is not empty."""
        name, wanted = self._prefix + key, _stored(expected)
        while True:
            old = self._kv.get(name)
            if old is None and len(wanted) > 1:
                return wanted[1:]
            if old is not None and old != wanted:
                return old[1:]
            if self._kv.transaction({name: old}, [Put(name, _stored(value), self._lease)]):
                return _stored(value)[1:]

    def deleteKey(self, key: str) -> bool:
        name = self._prefix + key
        there = self._kv.get(name) is not None
        self._kv.delete(name)
        return there

    def getNumKeys(self) -> int:
        return len(self._kv.list_keys(self._prefix))

    delete_key = deleteKey  # for Python
    num_keys = getNumKeys


def _stored(value: str | bytes) -> bytes:
    """A byte before every value: torch's may be empty, ours never."""
    return b"=" + (value.encode() if isinstance(value, str) else bytes(value))
