"""Calls to an etcd cluster: all members known, the next one asked when one fails, with deadlines.

On the channels and message types of ``cslab-etcd3`` 0.12.1 (``etcd3.Endpoint``, ``etcd3.etcdrpc``),
not on its ``MultiEndpointEtcd3Client``: with ``time_retry=0`` (without it a member is left out for
300 s after a restart) that client never counts a member as failed and so never asks another; it
drops the text of an error, has one timeout for all calls, and its watcher is not resumed.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import Any, ClassVar, Literal

from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from flashrun.rendezvous.etcd_client import Endpoint, grpc, rpc
from flashrun.rendezvous.etcd_config import EtcdConfig
from flashrun.rendezvous.kv import Forked, StoreLost, StoreRefused

log = logging.getLogger(__name__)

_Code = grpc.StatusCode
_TRANSIENT = (
    _Code.UNAVAILABLE, _Code.DEADLINE_EXCEEDED, _Code.INTERNAL, _Code.CANCELLED, _Code.UNKNOWN,
    _Code.ABORTED, _Code.RESOURCE_EXHAUSTED,
)  # fmt: skip
_TLS_SIGNS = ("handshake failed", "SSL_ERROR", "certificate", "Hostname Verification", "(TSI_")


class Transient(Exception):
    """An attempt failed in a way that may pass; it may or may not have been carried out."""


@dataclass
class Member:
    """A member of the cluster and its one connection."""

    name: str
    endpoint: Any
    kv: Any
    lease: Any
    watch: Any
    auth: Any


Report = Callable[[str], None]


class EtcdLink:
    """The connections of one process to one cluster. For several threads.

    Args:
        config: where, and how to get in.
        report: told, in one line each, when the cluster stops answering and when it is back.
    """

    _sharing = threading.Lock()
    _shared: ClassVar[dict[tuple[int, EtcdConfig], EtcdLink]] = {}

    def __init__(self, config: EtcdConfig, report: Report = log.warning) -> None:
        self.config = config
        self.where = config.where
        self._reports = [report]
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._members = [_member(name, config) for name in config.endpoints]
        self._current = os.getpid() % len(self._members)  # spreads clients over the members
        self._streams: dict[Any, Member] = {}
        self._token: str | None = None
        self._authless = config.user is None
        self._troubled_since: float | None = None
        self._ever_answered = False
        self._tls_failures = 0

    @classmethod
    def shared(cls, config: EtcdConfig, report: Report) -> EtcdLink:
        """The one of this process for all that ask for it here; each closes it with its report."""
        key = os.getpid(), replace(config, prefix="")
        with cls._sharing:
            link = cls._shared.get(key)
            if link is None:
                link = cls._shared[key] = cls(config, report)
            else:
                link._reports.append(report)
            return link

    def _report(self, line: str) -> None:
        for report in list(self._reports):
            report(line)

    # --- calls ----------------------------------------------------------------------------------

    def call(
        self,
        ask: Callable[[Member], Any],
        request: Any,
        what: str,
        within_s: float | None = None,
        attempt_s: float | None = None,
    ) -> Any:
        """Send ``request`` until a member answers. Only for what may be carried out twice.

        Args:
            ask: the method of a member, ``lambda member: member.kv.Txn``.
            what: names in the error what was waited for.
            within_s: for all attempts; None: as configured. ``attempt_s``: the most for each.

        Raises:
            StoreLost: no answer in time. StoreRefused: an answer that trying again won't change.
            grpc.RpcError: NOT_FOUND, OUT_OF_RANGE and FAILED_PRECONDITION, for the caller to read.
        """
        within = self.config.timing.call if within_s is None else within_s
        deadline = time.monotonic() + within
        retrying = Retrying(
            stop=stop_after_delay(within),
            wait=wait_random_exponential(multiplier=0.02, max=0.5),
            retry=retry_if_exception_type(Transient),
            reraise=True,
        )
        longest = self.config.timing.attempt if attempt_s is None else attempt_s
        # The first are short, for longer than an election takes: what a member has passed on to a
        # leader that died is not answered at all. The later ones have patience with a slow server.
        limits = chain(repeat(longest / 4, 6), repeat(longest / 2, 4), repeat(longest))
        try:
            return retrying(self._attempt, ask, request, what, deadline, limits)
        except Transient as error:
            raise StoreLost(
                f"{self.where} did not answer within {within:g} s while waiting for {what} (last: "
                f"{error}). {self.remedy(str(error))}"
            ) from error

    def _attempt(
        self,
        ask: Callable[[Member], Any],
        request: Any,
        what: str,
        deadline: float,
        limits: Iterator[float],
    ) -> Any:
        member = self.member()
        timeout = max(0.05, min(next(limits), deadline - time.monotonic()))
        try:
            answer = ask(member)(request, timeout=timeout, metadata=self.metadata(member, timeout))
            self.answered()
        except grpc.RpcError as error:
            raise self.translate(error, member, what) from error
        except ValueError as error:  # of a closed channel
            raise StoreLost(
                f"The client of {self.where} was closed while waiting for {what}."
            ) from error
        return answer

    def translate(self, error: Any, member: Member, what: str) -> Exception:
        """What to raise for an RPC that ``member`` failed; moves on to the next member, logs out,
        where that is what it takes."""
        code, text = error.code(), f"{member.name}: {_text(error)}"
        kind = _kind(code, text)
        if kind == "login":
            self._token = None
            return Transient(text)
        if kind == "transient":
            self.leave(member, text)
            if not self._hopeless(text):
                return Transient(text)
        if kind == "answer":
            return error  # type: ignore[no-any-return]
        return StoreRefused(f"{self.where} refused {what} ({text}). {self.remedy(text)}")

    def _hopeless(self, text: str) -> bool:
        """Whether certificates keep us out everywhere, which no waiting will change."""
        if self._ever_answered or not self._is_tls(text):
            self._tls_failures = 0
            return False
        self._tls_failures += 1
        return self._tls_failures >= 2 * len(self._members)

    def _is_tls(self, text: str) -> bool:
        return self.config.tls and any(sign in text for sign in _TLS_SIGNS)

    def remedy(self, text: str) -> str:
        """What to do about an error with this text."""
        user = self.config.user
        for sign, remedy in _REMEDIES:
            if sign in text:
                return remedy.format(user=user, prefix=self.config.prefix)
        if self._is_tls(text):
            ours = "that ssl_cert and ssl_cert_key are signed by the authority that they trust"
            if self.config.cert is None:
                ours = "whether they want a certificate of ours (ssl_cert and ssl_cert_key)"
            return (
                "Check that ca_cert holds the authority that signed the servers' certificates, "
                f"that these name the hosts as the endpoint does, and {ours}."
            )
        hint = "" if self.config.tls else ", whether the servers want TLS (protocol=https)"
        return (
            "Check that a majority of the members runs (etcdctl endpoint health --cluster), the "
            f"addresses and ports, the firewall{hint}."
        )

    # --- members --------------------------------------------------------------------------------

    def member(self) -> Member:
        """The member to ask now."""
        if os.getpid() != self._pid:
            raise Forked(
                f"The client of {self.where} was made in process {self._pid} and can't be used in "
                f"process {os.getpid()}, which was forked from it: connections are not carried "
                "over. Open a client of its own there."
            )
        with self._lock:
            return self._members[self._current]

    def leave(self, member: Member, why: str) -> None:
        """Ask another member from now on; watches on this one are opened elsewhere."""
        with self._lock:
            if self._members[self._current] is member:
                self._current = (self._current + 1) % len(self._members)
            streams = [stream for stream, on in self._streams.items() if on is member]
            news = self._troubled_since is None
            if news:
                self._troubled_since = time.monotonic()
        for stream in streams:
            stream.cancel()
        if news:
            turn = "asking the members in turn" if len(self._members) > 1 else "trying again"
            self._report(f"{self.where}: no answer ({why}); {turn}")

    def answered(self) -> None:
        """A member has answered: say so if none did before."""
        self._ever_answered = True
        if self._troubled_since is None:
            return
        with self._lock:
            since, self._troubled_since = self._troubled_since, None
        if since is not None:
            self._report(f"{self.where}: answers again after {time.monotonic() - since:.1f} s")

    def hold(self, stream: Any, member: Member) -> None:
        """Have ``stream`` cancelled when ``member`` is left."""
        with self._lock:
            self._streams[stream] = member

    def release(self, stream: Any) -> None:
        with self._lock:
            self._streams.pop(stream, None)

    # --- who we are -----------------------------------------------------------------------------

    def metadata(self, member: Member, timeout: float) -> list[tuple[str, str]]:
        """Of a call or a watch; logs in where that is needed. Raises grpc.RpcError, StoreRefused.

        ``hasleader`` has a member that lost its leader say so, instead of being silent.
        """
        headers = [("hasleader", "true")]
        if self._authless:
            return headers
        token = self._token
        if token is None:
            token = self._log_in(member, timeout)
        return [*headers, ("token", token)] if token else headers

    def log_out(self) -> None:
        """The next call logs in again."""
        self._token = None

    def _log_in(self, member: Member, timeout: float) -> str | None:
        config = self.config
        request = rpc.AuthenticateRequest(name=config.user, password=config.password)
        try:
            answer = member.auth.Authenticate(request, timeout=timeout)
        except grpc.RpcError as error:
            text = _text(error)
            if "authentication is not enabled" in text:
                self._report(f"{self.where}: has no users; '{config.user}' is not needed")
                self._authless = True
                return None
            if error.code() in _TRANSIENT:
                raise
            raise StoreRefused(
                f"{self.where} refused the login of user '{config.user}' ({member.name}: {text}). "
                f"{self.remedy(text)}"
            ) from None  # the request with the password stays out of tracebacks
        self._token = str(answer.token)
        return self._token

    def close(self, report: Report) -> None:
        """Close all connections, if nobody else uses them; calls in flight end with Transient or
        StoreLost.

        Args:
            report: with which it was opened.
        """
        if os.getpid() != self._pid:
            return  # the parent's connections: not ours to close
        with self._sharing:
            self._reports.remove(report)
            if self._reports:
                return
            for key in [key for key, link in self._shared.items() if link is self]:
                del self._shared[key]
        for member in self._members:
            member.endpoint.close()


_REMEDIES = (
    ("invalid user ID or password", "Check the user and the password (password_file, or the "
     "environment variable ETCD_PASSWORD)."),
    ("user name is empty", "It wants a user: --rdzv-conf=user=NAME, with password_file=PATH or the "
     "environment variable ETCD_PASSWORD."),
    ("permission denied", "Give the user '{user}' a role that reads and writes keys under "
     "'{prefix}' (etcdctl role grant-permission ROLE --prefix=true readwrite {prefix})."),
    ("database space exceeded", "Its database is full: compact and defragment it, then disarm the "
     "alarm (etcdctl compact, defrag, alarm disarm), or raise --quota-backend-bytes."),
    ("request is too large", "Raise the servers' --max-request-bytes to its default of 1.5 MiB at "
     "least."),
)  # fmt: skip


def _kind(code: Any, text: str) -> Literal["login", "transient", "answer", "refused"]:
    if code is _Code.UNAUTHENTICATED or "auth store is old" in text:
        return "login"
    if "database space exceeded" in text or "larger than max" in text:
        return "refused"
    if code in _TRANSIENT:
        return "transient"
    if code in (_Code.NOT_FOUND, _Code.OUT_OF_RANGE, _Code.FAILED_PRECONDITION):
        return "answer"
    return "refused"


def _text(error: Any) -> str:
    """An RPC error in one line."""
    details = " ".join(str(error.details() or "").split())
    return details or str(error.code().name)


def _member(name: str, config: EtcdConfig) -> Member:
    credentials = None
    if config.tls:
        credentials = grpc.ssl_channel_credentials(
            *(None if path is None else path.read_bytes()
              for path in (config.ca, config.key, config.cert))
        )  # fmt: skip
    host, _, port = name.rpartition(":")
    endpoint = Endpoint(
        host, port, secure=config.tls, creds=credentials, time_retry=0, opts=_options(config)
    )
    channel = endpoint.channel
    return Member(
        name,
        endpoint,
        rpc.KVStub(channel),
        rpc.LeaseStub(channel),
        rpc.WatchStub(channel),
        rpc.AuthStub(channel),
    )


def _options(config: EtcdConfig) -> list[tuple[str, int]]:
    timing = config.timing
    return [
        ("grpc.keepalive_time_ms", round(timing.keepalive * 1000)),
        ("grpc.keepalive_timeout_ms", round(timing.ping * 1000)),
        ("grpc.http2.ping_timeout_ms", round(timing.ping * 1000)),  # else a frozen server stays
        ("grpc.keepalive_permit_without_calls", 0),  # the server takes such pings for an attack
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 50),  # 1 s … 120 s unless told otherwise
        ("grpc.min_reconnect_backoff_ms", 1000),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.max_receive_message_length", -1),  # a range may be longer than 4 MiB
        ("grpc.enable_http_proxy", 0),  # http_proxy is for the web, not for the cluster
        ("grpc.use_local_subchannel_pool", 1),  # two clients of a process share no fate
    ]


def until_none(requests: queue.SimpleQueue[Any]) -> Iterator[Any]:
    """The requests of a stream; it stays open until None is put."""
    while (request := requests.get()) is not None:
        yield request


def range_end(prefix: bytes) -> bytes:
    """The first key after all that begin with ``prefix``."""
    cut = prefix.rstrip(b"\xff")
    return cut[:-1] + bytes([cut[-1] + 1]) if cut else b"\0"
