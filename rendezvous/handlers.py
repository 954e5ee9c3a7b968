"""Rendezvous backends for torch's registry: ``flash`` (TCPStore) and ``flash-etcd`` (etcd v3).

They are found through the entry points ``torchrun.handlers`` and work under plain torchrun too. The
rounds are torch's own (``DynamicRendezvousHandler``); what is ours is where its state is kept, and
that no pickle comes from the network: the state is stored as JSON and given to torch as the pickle
that it wants. Written for torch 2.13 (``elastic/rendezvous/dynamic_rendezvous.py``).
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timezone
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]  # public, not in __all__
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousParameters,
    RendezvousStateError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousTimeout,
    _get_timeout,
    _NodeDesc,
    _RendezvousState,
)

from flashrun.rendezvous.endpoint import C10D_PORT, is_local, listen_address, parse_endpoint
from flashrun.rendezvous.etcd_config import etcd_config, prefix_of
from flashrun.rendezvous.kv import (
    ControlStore,
    Delete,
    KeyValue,
    LeaseLost,
    StoreLost,
    StoreRefused,
)
from flashrun.rendezvous.kv_store import KeyValueStore
from flashrun.rendezvous.lease import Lease
from flashrun.rendezvous.server import StoreInUse, StoreNotBound, open_listener, serve
from flashrun.rendezvous.tcp_kv import ConnectTimeout, NotAStore, TorchKeyValue, connect_store

log = logging.getLogger(__name__)

Create = Callable[[RendezvousParameters], RendezvousHandler]

_STATE = "rendezvous"
_ALIVE = "alive/"
_ALIVE_TTL_S = 10.0  # of an agent that is gone without a word
_KEPT_TTL_S = 3600.0  # of what an agent leaves behind


class StateBackend(RendezvousBackend):
    """Keeps torch's rendezvous state in one key, by compare-and-swap.

    Args:
        name: as the user gave it; torch compares.
    """

    def __init__(self, name: str, kv: KeyValue, key: str, lease: Lease | None = None) -> None:
        self._name = name
        self._kv = kv
        self._key = key
        self._lease = lease

    @property
    def name(self) -> str:
        return self._name

    def get_state(self) -> tuple[bytes, Any] | None:
        value = _reported(lambda: self._kv.get(self._key))
        return None if value is None else (_pickled(value), value)

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        new = state_to_json(pickle.loads(state))  # noqa: S301  # made by torch in this process
        expected = token if isinstance(token, bytes) else None
        if _reported(lambda: self._swap(expected, new)):
            return state, new, True
        there = self.get_state()
        return None if there is None else (*there, False)

    def _swap(self, expected: bytes | None, new: bytes) -> bool:
        if isinstance(self._kv, ControlStore):
            return self._kv.compare_and_swap(self._key, expected, new, self._lease)
        return self._kv.compare_and_swap(self._key, expected, new)


def _reported(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (StoreLost, StoreRefused, LeaseLost) as error:
        raise RendezvousConnectionError(str(error)) from error


def state_to_json(state: Any) -> bytes:
    """A rendezvous state with a serial number, so that no two writes are equal."""

    def node(desc: Any) -> list[Any]:
        return [desc.addr, desc.pid, desc.local_id]

    data = {
        "round": state.round,
        "complete": state.complete,
        "deadline": None if state.deadline is None else state.deadline.timestamp(),
        "closed": state.closed,
        "participants": [[node(n), rank] for n, rank in state.participants.items()],
        "wait_list": [node(n) for n in state.wait_list],
        "redundancy_list": [node(n) for n in state.redundancy_list],
        "last_heartbeats": [[node(n), t.timestamp()] for n, t in state.last_heartbeats.items()],
        "serial": uuid.uuid4().hex,
    }
    return json.dumps(data).encode()


def state_from_json(data: bytes) -> Any:
    """The rendezvous state; raises RendezvousStateError for anything else."""

    def node(fields: Any) -> Any:
        addr, pid, local_id = fields
        return _NodeDesc(str(addr), int(pid), int(local_id))

    def moment(seconds: Any) -> datetime:
        return datetime.fromtimestamp(float(seconds), timezone.utc)

    try:
        found = json.loads(data)
        state = _RendezvousState()
        state.round = int(found["round"])
        state.complete = bool(found["complete"])
        state.deadline = None if found["deadline"] is None else moment(found["deadline"])
        state.closed = bool(found["closed"])
        state.participants = {node(n): int(rank) for n, rank in found["participants"]}
        state.wait_list = {node(n) for n in found["wait_list"]}
        state.redundancy_list = {node(n) for n in found["redundancy_list"]}
        state.last_heartbeats = {node(n): moment(t) for n, t in found["last_heartbeats"]}
    except (ValueError, KeyError, TypeError) as error:
        raise RendezvousStateError(
            f"The rendezvous state is not one of flashrun's ({error}). Is the same --rdzv-id used "
            "by something else? Give this job an id of its own."
        ) from error
    return state


def _pickled(data: bytes) -> bytes:
    return pickle.dumps(state_from_json(data))


class FlashHandler(DynamicRendezvousHandler):
    """torch's handler, which closes what it was opened with."""

    close_with: Callable[[], None] = staticmethod(lambda: None)
    keep: Any = None  # a store that this process serves

    def shutdown(self) -> bool:
        done = super().shutdown()
        self.close_with()
        return bool(done)


def _handler(
    params: RendezvousParameters, backend: RendezvousBackend, store: Store
) -> FlashHandler:
    """As torch's ``dynamic_rendezvous.create_handler``."""
    timeouts = [_get_timeout(params, name) for name in ("join", "last_call", "close", "heartbeat")]
    handler = FlashHandler.from_backend(
        params.run_id,
        store,
        backend,
        params.min_nodes,
        params.max_nodes,
        params.local_addr,
        RendezvousTimeout(*timeouts),
        keep_alive_interval=params.get_as_int("keep_alive_interval", 5) or 5,
        keep_alive_max_attempt=params.get_as_int("keep_alive_max_attempt", 3) or 3,
    )
    assert isinstance(handler, FlashHandler)
    return handler


# --- flash: a TCPStore that one of the agents hosts ---------------------------------------------


def flash() -> Create:
    """Entry point of ``--rdzv-backend=flash``."""
    return create_flash


def create_flash(params: RendezvousParameters) -> RendezvousHandler:
    """The TCPStore at the endpoint, hosted as torch's c10d backend decides it (``is_host``, or the
    endpoint is this machine), but bound to that address only.

    Raises:
        RendezvousConnectionError: what is wrong with the store and what to do.
    """
    endpoint = parse_endpoint(params.endpoint, C10D_PORT)
    told = params.get_as_bool("is_host")
    several = params.max_nodes > 1
    server = None
    try:
        if is_local(endpoint.host, params.local_addr) if told is None else told:
            try:
                listener = open_listener(listen_address(endpoint.host, several), endpoint.port)
                server = serve(listener)
            except StoreInUse:
                if told is not None:
                    raise  # otherwise an agent of this machine was first
        host = endpoint.host if server is None else server.host
        port = endpoint.port if server is None else server.port
        wait = _get_timeout(params, "join")
        store, where = connect_store(
            host,
            port,
            600.0 if wait is None else wait.total_seconds(),
            float(params.get_as_int("read_timeout", 60) or 60),
        )
    except (StoreInUse, StoreNotBound, ConnectTimeout, NotAStore, StoreLost) as error:
        raise RendezvousConnectionError(str(error)) from error
    key = f"torch.rendezvous.{params.run_id}"
    backend = StateBackend(params.backend, TorchKeyValue(store, where), key)
    handler = _handler(params, backend, store)
    handler.keep = server
    return handler


# --- flash-etcd ---------------------------------------------------------------------------------


def flash_etcd() -> Create:
    """Entry point of ``--rdzv-backend=flash-etcd``."""
    return create_flash_etcd


def create_flash_etcd(params: RendezvousParameters) -> RendezvousHandler:
    """The etcd cluster at the endpoints; its configuration: ``etcd_config``.

    Raises:
        EndpointError: what is wrong with the configuration.
        RendezvousConnectionError: the cluster does not answer or refuses us.
    """
    config = etcd_config(params.endpoint, params.config, os.environ, prefix_of(params.run_id))
    try:
        from flashrun.rendezvous.etcd_store import EtcdStore

        kv = EtcdStore(config)
        try:
            return _on(kv, params)
        except BaseException:
            kv.close()
            raise
    except (StoreLost, StoreRefused) as error:
        raise RendezvousConnectionError(str(error)) from error


def _on(kv: ControlStore, params: RendezvousParameters) -> FlashHandler:
    _make_way(kv, params)
    alive = kv.lease(_ALIVE_TTL_S)
    kv.put(f"{_ALIVE}{uuid.uuid4().hex}", b"1", alive)
    kept = kv.lease(_KEPT_TTL_S)
    handler = _handler(
        params,
        StateBackend(params.backend, kv, _STATE, kept),
        KeyValueStore(kv, "store/", kept),
    )

    def close() -> None:
        with suppress(StoreLost, StoreRefused):  # it runs out by itself
            alive.revoke()
        kv.close()

    handler.close_with = close
    return handler


def _make_way(kv: ControlStore, params: RendezvousParameters) -> None:
    """Remove what an earlier job with our run id left: its rendezvous is closed, and its agents
    are gone or on their way. (etcd outlives a job, a TCPStore does not.)"""
    deadline = time.monotonic() + 3 * _ALIVE_TTL_S
    while (value := kv.get(_STATE)) is not None and state_from_json(value).closed:
        alive = kv.snapshot(_ALIVE)
        if not alive.entries:
            for key in kv.list_keys("store/"):
                kv.delete(key)
            if kv.transaction({_STATE: value}, [Delete(_STATE)]):
                log.info("removed what an earlier job '%s' left at %s", params.run_id, kv.where)
            continue
        left = deadline - time.monotonic()
        if left <= 0:
            raise RendezvousConnectionError(
                f"A job '{params.run_id}' has ended at {kv.where}, but {len(alive.entries)} of its "
                "agents still run. End them, or give this job another --rdzv-id."
            )
        with kv.watch(_ALIVE, alive) as watch:
            watch.get(left)
