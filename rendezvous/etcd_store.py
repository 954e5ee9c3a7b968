"""ControlStore on an etcd v3 cluster.

Keys: ours are ``<prefix>k/<key>``; ``<prefix>w/<id>`` are the writers' tokens, by which a write
that is sent again is done at most once, however late an attempt arrives (a frozen member carries
out what it had received when it thaws): each transaction asks for the token that the one before it
left and leaves its own, where it succeeds as where it fails; the first attempt decides for all.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flashrun.rendezvous.etcd_client import grpc, rpc
from flashrun.rendezvous.etcd_config import EtcdConfig
from flashrun.rendezvous.etcd_link import EtcdLink, Member, Transient, range_end, until_none
from flashrun.rendezvous.etcd_watch import EtcdWatch
from flashrun.rendezvous.kv import (
    ControlStore,
    Delete,
    Entry,
    LeaseLost,
    Put,
    Snapshot,
    StoreLost,
    StoreRefused,
    check_transaction,
)
from flashrun.rendezvous.lease import Lease

log = logging.getLogger(__name__)

_READS = 100  # keys of one request; a server takes 128 operations
_WRITER_TTL_S = 3600  # the tokens of writers that are gone go with it
_FAILED = b"-"  # after the token of a transaction whose comparisons failed
_RETRIES = 10  # of a transaction whose token or lease the server has lost; one is usual


@dataclass
class _Writer:
    """One transaction at a time; ``token`` is what the last one left, None: nothing."""

    key: bytes
    token: bytes | None = None


class EtcdStore(ControlStore):
    """One client of one process. Connects with the first call.

    Args:
        report: told, in one line each, when the cluster stops answering and when it is back.
        kept: id of the lease of what is written without one.
        link: another client's connections, which that one closes.
        alone: on connections of its own, not on those of this process.
    """

    def __init__(
        self,
        config: EtcdConfig,
        report: Callable[[str], None] = log.warning,
        kept: str = "",
        link: EtcdLink | None = None,
        alone: bool = True,
    ) -> None:
        self._closes = link is None
        if link is None:
            link = EtcdLink(config, report) if alone else EtcdLink.shared(config, report)
        self._link = link
        self._report = report
        prefix = config.prefix
        self._keys = f"{prefix}k/".encode()
        self._id = uuid.uuid4().hex
        self._prefix = prefix
        self._kept = int(kept or 0)
        self._lock = threading.Lock()
        self._writers: list[_Writer] = []
        self._writer_count = 0
        self._writer_lease = (0, 0.0)  # its id and when it was granted (monotonic)
        self._watches: list[EtcdWatch] = []
        self._keeper = _Keeper(self._link, report)

    @property
    def where(self) -> str:
        return self._link.where

    def under(self, folder: str, kept: Lease) -> EtcdStore:
        """The keys of a folder beside ours, on the same connections, which are closed with this
        store. What is written there without a lease has ``kept``."""
        config = replace(self._link.config, prefix=f"{self._prefix}{folder}/")
        return EtcdStore(config, self._report, kept.id, self._link)

    # --- reads ----------------------------------------------------------------------------------

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        found: list[bytes | None] = []
        for first in range(0, len(keys), _READS):
            part = [self._key(key) for key in keys[first : first + _READS]]
            request = rpc.TxnRequest(
                success=[rpc.RequestOp(request_range=rpc.RangeRequest(key=key)) for key in part]
            )
            answer = self._link.call(lambda m: m.kv.Txn, request, f"the value of {keys[first]!r}")
            for response in answer.responses:
                kvs = response.response_range.kvs
                found.append(bytes(kvs[0].value) if kvs else None)
        return found

    def list_keys(self, prefix: str = "") -> list[str]:
        answer = self._range(prefix, keys_only=True)
        return [self._name(kv.key) for kv in answer.kvs]

    def snapshot(self, prefix: str = "") -> Snapshot:
        answer = self._range(prefix)
        entries = {
            self._name(kv.key): Entry(bytes(kv.value), int(kv.mod_revision)) for kv in answer.kvs
        }
        return Snapshot(prefix, int(answer.header.revision), entries)

    def _range(self, prefix: str, keys_only: bool = False) -> Any:
        start = self._key(prefix)
        request = rpc.RangeRequest(key=start, range_end=range_end(start), keys_only=keys_only)
        return self._link.call(lambda m: m.kv.Range, request, f"the keys under {prefix!r}")

    def _key(self, key: str) -> bytes:
        return self._keys + key.encode()

    def _name(self, key: bytes) -> str:
        return key[len(self._keys) :].decode()

    # --- writes ---------------------------------------------------------------------------------

    def transaction(
        self, expected: Mapping[str, bytes | None], operations: Sequence[Put | Delete]
    ) -> bool:
        check_transaction(operations)
        names = ", ".join(repr(operation.key) for operation in operations) or "nothing"
        what = f"the write of {names}, which may or may not have been carried out"
        with self._lock:
            writer = self._writers.pop() if self._writers else self._new_writer()
        token = uuid.uuid4().bytes
        for _ in range(_RETRIES):
            request = self._request(writer, token, expected, operations, what)
            try:
                answer = self._link.call(lambda m: m.kv.Txn, request, what)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.NOT_FOUND:
                    raise StoreRefused(f"{self.where} refused {what}: {error.details()}") from error
                self._look_after_leases(operations)
                continue
            left: bytes | None = token
            if not answer.succeeded:  # what the first attempt left, if this is not the first
                found = answer.responses[0].response_range.kvs
                left = bytes(found[0].value) if found else None
            if left not in (token, token + _FAILED, writer.token):
                writer.token = left  # the server has lost it
                continue
            writer.token = token if left == token else token + _FAILED
            with self._lock:  # a writer whose outcome nobody knows is not used again
                self._writers.append(writer)
            return left == token
        raise StoreLost(f"{self.where} lost its leases {_RETRIES} times during {what}.")

    def _request(
        self,
        writer: _Writer,
        token: bytes,
        expected: Mapping[str, bytes | None],
        operations: Sequence[Put | Delete],
        what: str,
    ) -> Any:
        lease = self._lease_of_writers(what)
        first = _compare(writer.key, writer.token)

        def leave(value: bytes) -> Any:
            put = rpc.PutRequest(key=writer.key, value=value, lease=lease)
            return rpc.RequestOp(request_put=put)

        failed = rpc.TxnRequest(compare=[first], success=[leave(token + _FAILED)])
        return rpc.TxnRequest(
            compare=[first, *(_compare(self._key(key), value) for key, value in expected.items())],
            success=[leave(token), *(self._operation(operation) for operation in operations)],
            failure=[
                rpc.RequestOp(request_range=rpc.RangeRequest(key=writer.key)),
                rpc.RequestOp(request_txn=failed),
            ],
        )

    def _operation(self, operation: Put | Delete) -> Any:
        key = self._key(operation.key)
        if isinstance(operation, Delete):
            return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=key))
        lease = self._kept if operation.lease is None else int(operation.lease.id)
        put = rpc.PutRequest(key=key, value=operation.value, lease=lease)
        return rpc.RequestOp(request_put=put)

    def _new_writer(self) -> _Writer:
        self._writer_count += 1
        return _Writer(f"{self._prefix}w/{self._id}.{self._writer_count}".encode())

    def _lease_of_writers(self, what: str) -> int:
        with self._lock:
            lease, granted = self._writer_lease
        if lease and time.monotonic() - granted < _WRITER_TTL_S / 2:
            return lease
        lease = self._grant(_WRITER_TTL_S, what)[0]
        with self._lock:
            self._writer_lease = (lease, time.monotonic())
        return lease

    def _look_after_leases(self, operations: Sequence[Put | Delete]) -> None:
        """The server does not know a lease: whose? Raises LeaseLost when it is the caller's."""
        for operation in operations:
            if isinstance(operation, Delete) or not (operation.lease or self._kept):
                continue
            lease = operation.lease
            id_ = self._kept if lease is None else int(lease.id)
            request = rpc.LeaseTimeToLiveRequest(ID=id_)
            answer = self._link.call(lambda m: m.lease.LeaseTimeToLive, request, f"lease {id_}")
            if answer.TTL <= 0:
                if lease is not None:
                    lease.lost.set()
                raise LeaseLost(
                    f"Lease {id_} for {operation.key!r} has run out at {self.where}; nothing was "
                    "written. Take a new lease."
                )
        with self._lock:
            self._writer_lease = (0, 0.0)

    # --- leases, watches ------------------------------------------------------------------------

    def lease(self, ttl_s: float) -> Lease:
        sent = time.monotonic()
        id_, ttl = self._grant(max(1, math.ceil(ttl_s)), "a lease")
        lease = Lease(str(id_), ttl, sent, self._revoke)
        self._keeper.add(lease)
        return lease

    def share_lease(self, id_: str) -> Lease | None:
        """Keep alive a lease that another client took, too; None: it has run out."""
        sent = time.monotonic()
        request = rpc.LeaseKeepAliveRequest(ID=int(id_))
        answer = self._link.call(_renew, request, f"the renewal of lease {id_}")
        if answer.TTL <= 0:
            return None
        lease = Lease(id_, float(answer.TTL), sent, self._revoke)
        self._keeper.add(lease)
        return lease

    def _grant(self, ttl: int, what: str) -> tuple[int, float]:
        # With an id of our own, so that a request sent twice makes one lease.
        request = rpc.LeaseGrantRequest(TTL=ttl, ID=uuid.uuid4().int >> 66 or 1)
        try:
            answer = self._link.call(lambda m: m.lease.LeaseGrant, request, what)
        except grpc.RpcError as error:
            if "already exists" not in str(error.details()):
                raise StoreRefused(f"{self.where} refused {what}: {error.details()}") from error
            return request.ID, float(ttl)
        return int(answer.ID), float(answer.TTL)

    def _revoke(self, lease: Lease) -> None:
        request = rpc.LeaseRevokeRequest(ID=int(lease.id))
        try:
            self._link.call(lambda m: m.lease.LeaseRevoke, request, f"the end of {lease}")
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                raise StoreRefused(f"{self.where}: {error.details()}") from error

    def watch(self, prefix: str = "", start: Snapshot | int | None = None) -> EtcdWatch:
        if start is None:
            start = self.snapshot(prefix)
        watch = EtcdWatch(self._link, self._keys, prefix, start, self.snapshot)
        with self._lock:
            self._watches = [w for w in self._watches if not w.closed] + [watch]
        return watch

    def close(self) -> None:
        self._keeper.close()
        for watch in self._watches:
            watch.close()
        closes, self._closes = self._closes, False
        if closes:
            self._link.close(self._report)


class _Keeper:
    """Renews leases in a thread of its own, which starts with the first."""

    def __init__(self, link: EtcdLink, report: Callable[[str], None]) -> None:
        self._link = link
        self._report = report
        self._news = threading.Condition()
        self._leases: list[Lease] = []
        self._closed = False
        self._thread: threading.Thread | None = None

    def add(self, lease: Lease) -> None:
        with self._news:
            self._leases.append(lease)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="etcd leases", daemon=True)
                self._thread.start()
            self._news.notify()

    def close(self) -> None:
        with self._news:
            self._closed = True
            self._news.notify()
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join(self._link.config.timing.attempt)

    def _next(self) -> Lease | None:
        """Waits for the next renewal that is due; None at the end."""
        with self._news:
            while not self._closed:
                self._leases = [x for x in self._leases if x.renewing and not x.lost.is_set()]
                first = min(self._leases, key=Lease.renewal_due, default=None)
                wait = None if first is None else first.renewal_due() - time.monotonic()
                if first is not None and wait is not None and wait <= 0:
                    return first
                self._news.wait(wait)
            return None

    def _run(self) -> None:
        while (lease := self._next()) is not None:
            sent = time.monotonic()
            request = rpc.LeaseKeepAliveRequest(ID=int(lease.id))
            part = lease.ttl_s / 6  # several attempts before it is over
            try:
                answer = self._link.call(_renew, request, f"the renewal of {lease}", part * 2, part)
            except (StoreLost, StoreRefused, grpc.RpcError, ValueError) as error:
                if self._closed:  # ValueError: the channel is closed
                    return
                if not isinstance(error, StoreLost):
                    self._report(f"{self._link.where}: {lease} was not renewed: {error}")
                with self._news:
                    self._news.wait(0.05)
                continue
            if answer.TTL > 0:
                lease.renewed(sent, float(answer.TTL))
                continue
            lease.lost.set()
            self._report(f"{self._link.where}: {lease} has run out; its keys are gone")


def _renew(member: Member) -> Callable[..., Any]:
    def ask(request: Any, **options: Any) -> Any:
        # A stream for one renewal has a deadline; one for all of them would need its own pings.
        requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        requests.put(request)
        stream = member.lease.LeaseKeepAlive(until_none(requests), **options)
        try:
            for answer in stream:
                return answer
        finally:
            requests.put(None)
            stream.cancel()
        raise Transient(f"{member.name}: ended the renewal without an answer")

    return ask


def _compare(key: bytes, value: bytes | None) -> Any:
    if value is None:
        return rpc.Compare(key=key, target=rpc.Compare.VERSION, result=rpc.Compare.EQUAL, version=0)
    return rpc.Compare(key=key, target=rpc.Compare.VALUE, result=rpc.Compare.EQUAL, value=value)
