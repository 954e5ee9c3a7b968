"""KeyValue on a torch Store (TCPStore; FileStore and others as far as they can).

What torch's stores do, seen on torch 2.13:

- ``get`` of an absent key blocks: presence is asked first (``check``). Control keys are deleted by
  nobody while others read them, so that the pair is safe.
- ``compare_set(key, expected, desired)`` returns the value that is there afterwards; with an absent
  key and a non-empty ``expected`` it returns ``expected``. With unique values, success is
  ``returned == desired``.
- ``set`` is not acknowledged: the next call on the same connection that is answered orders it.
- only ``get`` and ``wait`` have a timeout; ``compare_set``, ``add``, ``check`` and others wait for
  ever for a server that is frozen or cut off. torch reads with plain ``recv`` and takes EAGAIN for
  a timeout (``c10d/Utils.hpp``), so a receive timeout on its socket gives them one.
- a client never reconnects, and each connect makes a reverse name look-up: one client per process,
  connected to a numeric address.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # public, not in __all__

from flashrun.rendezvous.endpoint import EndpointError, join_host_port, resolve
from flashrun.rendezvous.kv import HOST_LOST_REMEDY, KeyValue, StoreLost
from flashrun.rendezvous.links import client
from flashrun.rendezvous.probe import NotAStore, probe_store

__all__ = ["Cancelled", "ConnectTimeout", "NotAStore", "TorchKeyValue", "connect"]

_PROBE_S = 2.0  # one connection attempt to a host that swallows packets
_ANSWER_S = 5.0  # for a server that is there to answer
_RETRY_S = 0.1  # between attempts while the host is not up yet


class ConnectTimeout(TimeoutError):
    """Nobody served the endpoint in time."""


class Cancelled(RuntimeError):
    """The wait was ended by the caller (``cancel``)."""


class TorchKeyValue(KeyValue):
    """A KeyValue on ``store``; ``where`` names it in errors.

    Not for several threads: a blocked call holds the client.
    """

    def __init__(self, store: Store, where: str) -> None:
        self._store = store
        self._where = where

    def _lost(self, error: Exception) -> StoreLost:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return StoreLost(
            f"The rendezvous store at {self._where} does not answer ({first_line}). "
            f"The node that hosts it has ended or can't be reached; {HOST_LOST_REMEDY}"
        )

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        # torch's errors are RuntimeErrors (DistNetworkError, DistStoreError) for everything.
        try:
            if keys and self._store.check(list(keys)):  # the usual case: all there, two trips
                return [bytes(v) for v in self._store.multi_get(list(keys))]
            return [bytes(self._store.get(k)) if self._store.check([k]) else None for k in keys]
        except RuntimeError as error:
            raise self._lost(error) from error

    def put(self, key: str, value: bytes) -> None:
        try:
            self._store.set(key, value.decode())
        except RuntimeError as error:
            raise self._lost(error) from error

    def compare_and_swap(self, key: str, expected: bytes | None, value: bytes) -> bool:
        old = "" if expected is None else expected.decode()
        try:
            return bytes(self._store.compare_set(key, old, value.decode())) == value
        except RuntimeError as error:
            raise self._lost(error) from error

    def increment(self, key: str) -> int:
        try:
            return int(self._store.add(key, 1))
        except RuntimeError as error:
            raise self._lost(error) from error

    def counter(self, key: str) -> int:
        if not isinstance(self._store, TCPStore):
            return super().counter(key)  # where it would be a write
        try:
            return int(self._store.add(key, 0))  # one trip, not two
        except RuntimeError as error:
            raise self._lost(error) from error

    def delete(self, key: str) -> None:
        try:
            self._store.delete_key(key)
        except RuntimeError as error:
            raise self._lost(error) from error

    def list_keys(self, prefix: str = "") -> list[str]:
        try:
            return [k for k in self._store.list_keys() if k.startswith(prefix)]
        except RuntimeError as error:
            raise self._lost(error) from error


def connect(
    host: str,
    port: int,
    timeout_s: float,
    read_timeout_s: float = 60.0,
    cancel: threading.Event | None = None,
    waiting: Callable[[float, str], None] | None = None,
    remedy: str = "",
    refused_s: float = math.inf,
) -> TorchKeyValue:
    """As :func:`connect_store`."""
    return TorchKeyValue(
        *connect_store(host, port, timeout_s, read_timeout_s, cancel, waiting, remedy, refused_s)
    )


def connect_store(
    host: str,
    port: int,
    timeout_s: float,
    read_timeout_s: float = 60.0,
    cancel: threading.Event | None = None,
    waiting: Callable[[float, str], None] | None = None,
    remedy: str = "",
    refused_s: float = math.inf,
) -> tuple[TCPStore, str]:
    """Connect to the TCPStore at ``host:port``, waiting until somebody serves it.

    Each attempt is made by :func:`probe_store` first: torch's own client can't be interrupted
    while it waits, and prints a stack trace for each refusal.

    Args:
        timeout_s: how long to wait for the host.
        read_timeout_s: how long any later call may take.
        cancel: ends the wait.
        waiting: called before each further attempt with the seconds waited so far, and what is in
            the way; "" where it is only that nobody serves it yet.
        remedy: what to do where nobody serves it.
        refused_s: how long to wait where connections are refused: a host that is there and serves
            no store yet, or no more.

    Returns:
        The client, and what it is connected to for messages.

    Raises:
        ConnectTimeout, Cancelled, NotAStore, StoreLost
    """
    started = time.monotonic()
    cancel = cancel or threading.Event()
    where = join_host_port(host, port)
    problem = "no answer"
    while True:
        try:
            answer_s = min(_ANSWER_S, read_timeout_s)
            address = _reachable(resolve(host, min(timeout_s, 10.0)), port, answer_s)
            break
        except NotAStore as error:
            raise NotAStore(
                f"What listens at {where} is not a rendezvous store: {error}. "
                "Choose another port, or end that process."
            ) from error
        except (OSError, EndpointError) as error:
            problem = str(error)
            early = isinstance(error, ConnectionRefusedError)
        waited = time.monotonic() - started
        patience = min(timeout_s, refused_s) if early else timeout_s
        if waited >= patience:
            raise ConnectTimeout(
                f"Nobody served the rendezvous store at {where} within {patience:g} s "
                f"(last: {problem}). {remedy or 'Start the node that hosts it'}, and check the "
                "address, the port and the firewall."
            )
        if waiting is not None:
            waiting(waited, "" if early else problem)
        if cancel.wait(min(_RETRY_S, timeout_s)):
            raise Cancelled(f"stopped while waiting for the rendezvous store at {where}")

    try:
        store = client(address, port, timedelta(seconds=read_timeout_s), read_timeout_s)
    except RuntimeError as error:
        raise StoreLost(f"The store at {where} went away while we connected: {error}") from error
    return store, where


def _reachable(addresses: Sequence[str], port: int, answer_s: float) -> str:
    """The first of ``addresses`` where a store answers; raises the last OSError, or NotAStore."""
    last: OSError = OSError("the name has no address")
    for address in addresses:
        try:
            probe_store(address, port, _PROBE_S, answer_s)
        except OSError as error:
            last = error
        else:
            return address
    raise last
