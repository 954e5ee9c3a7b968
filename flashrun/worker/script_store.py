"""The default store (:mod:`flashrun.worker.default_store`) as a script has it: as torch's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from flashrun.rendezvous.peeking import peek

if TYPE_CHECKING:
    from flashrun.worker.default_store import Shared

_MISSED = ("list_keys", "queue_push", "queue_pop", "queue_len")


def look(client: Any, key: str) -> bytes | None:
    """The value of a key, None when it is absent; waits for nothing."""
    return peek(partial(client.compare_set, key))


def _popped(client: Any, key: str) -> bytes | None:
    """From a queue, None when there is nothing in it."""
    try:
        return bytes(client.queue_pop(key, False))
    except dist.QueueEmptyError:
        return None


def _raw(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


_Store: Any = c10d.Store  # torch's stubs do not know its timeout


class DefaultStore(_Store):  # type: ignore[misc]  # of type Any
    """The default store. C++ (a ``PrefixStore``) finds the methods by these names,
    ``deleteKey`` and ``getNumKeys`` among them (2.13)."""

    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self._shared = shared
        self._asked = threading.local()

    def set(self, key: str, value: Any) -> None:
        raw = _raw(value)
        self._shared.do("set", (key, raw), lambda client: client.set(key, raw))

    def get(self, key: str) -> bytes:
        def run(client: Any) -> bytes:
            return self._shared.awaited(lambda: look(client, key), [key], self.timeout)

        return bytes(self._shared.do("get", (key,), run))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        names = list(keys)

        def run(client: Any) -> list[bytes]:
            self._shared.await_keys(names, self.timeout)
            return list(client.multi_get(names))

        return list(self._shared.do("multi_get", (names,), run))

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        raw = [_raw(value) for value in values]
        names = list(keys)
        self._shared.do("multi_set", (names, raw), lambda client: client.multi_set(names, raw))

    def add(self, key: str, amount: int) -> int:
        return int(self._shared.do("add", (key, amount), lambda client: client.add(key, amount)))

    def append(self, key: str, value: Any) -> None:
        raw = _raw(value)
        self._shared.do("append", (key, raw), lambda client: client.append(key, raw))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        old, new = _raw(expected), _raw(desired)

        def run(client: Any) -> bytes:
            return bytes(client.compare_set(key, old, new))

        return bytes(self._shared.do("compare_set", (key, old, new), run))

    def check(self, keys: Sequence[str]) -> bool:
        names = list(keys)
        if hasattr(self._asked, "prefix"):
            self._asked.prefix = names[0]
            return True
        return bool(self._shared.do("check", (names,), lambda client: client.check(names)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        within = self.timeout if timeout is None else timeout
        names = list(keys)
        self._shared.do("wait", (names,), lambda client: self._shared.await_keys(names, within))

    def delete_key(self, key: str) -> bool:
        return bool(self._shared.do("delete_key", (key,), lambda client: client.delete_key(key)))

    deleteKey = delete_key

    def num_keys(self) -> int:
        return int(self._shared.do("num_keys", (), lambda client: client.num_keys()))

    getNumKeys = num_keys

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> DefaultStore:
        return self._shared.store(self.timeout)

    def list_keys(self) -> list[str]:
        return list(self._shared.do("list_keys", (), lambda client: client.list_keys()))

    def queue_push(self, key: str, value: Any) -> None:
        raw = _raw(value)
        self._shared.do("queue_push", (key, raw), lambda client: client.queue_push(key, raw))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        def run(client: Any) -> bytes:
            if not block:
                return bytes(client.queue_pop(key, False))
            return self._shared.awaited(lambda: _popped(client, key), [key], self.timeout)

        return bytes(self._shared.do("queue_pop", (key, block), run))

    def queue_len(self, key: str) -> int:
        return int(self._shared.do("queue_len", (key,), lambda client: client.queue_len(key)))

    def whole(self, prefixed: Any) -> str:
        """What a ``PrefixStore`` over this one puts before a key."""
        self._asked.prefix = ""
        try:
            prefixed.check([""])
            return str(self._asked.prefix)
        finally:
            del self._asked.prefix


def install_prefixed() -> Callable[[], None]:
    """A ``PrefixStore`` finds these methods in C++ alone (2.13); returns the undo."""
    kind: Any = c10d.PrefixStore
    before = {name: getattr(kind, name) for name in _MISSED}

    def found(name: str) -> Callable[..., Any]:
        original = before[name]

        @wraps(original)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            below = self._underlying_non_prefix_store
            if not isinstance(below, DefaultStore):
                return original(self, *args, **kwargs)
            prefix = below.whole(self)
            if name == "list_keys":
                keys = below.list_keys()
                return [key.removeprefix(prefix) for key in keys if key.startswith(prefix)]
            key = kwargs.pop("key") if "key" in kwargs else args[0]
            return getattr(below, name)(prefix + key, *args[1:], **kwargs)

        return method

    for name in _MISSED:
        setattr(kind, name, found(name))

    def undo() -> None:
        for name, original in before.items():
            setattr(kind, name, original)

    return undo
