"""A watch on an etcd cluster that goes on where it stopped."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from flashrun.rendezvous.etcd_client import grpc, rpc
from flashrun.rendezvous.etcd_link import EtcdLink, Member, Transient, range_end, until_none
from flashrun.rendezvous.kv import Compacted, Event, Snapshot, StoreLost, StoreRefused
from flashrun.rendezvous.watch import Watch, difference, note

_PENDING = 10_000  # events read ahead of a slow reader; then the stream waits
_PAUSE_S = (0.05, 1.0)  # between attempts: the first, the longest


class EtcdWatch(Watch):
    """Reads a stream of one member in a thread; another's when that fails.

    Args:
        keys: the bytes before every key of ours.
        start: see ControlStore.watch.
        snapshot: reads all keys under a prefix, after a compaction.
    """

    def __init__(
        self,
        link: EtcdLink,
        keys: bytes,
        prefix: str,
        start: Snapshot | int,
        snapshot: Callable[[str], Snapshot],
    ) -> None:
        super().__init__(prefix, start if isinstance(start, int) else start.revision)
        self._link = link
        self._keys = keys
        self._snapshot = snapshot
        self._known: dict[str, int] | None = None
        if isinstance(start, Snapshot):
            self._known = {key: entry.revision for key, entry in start.entries.items()}
        self._position = self.revision  # of what was read; ``revision``: of what was given out
        self._news = threading.Condition()
        self._pending: list[Event] = []
        self._error: Exception | None = None
        self.closed = False
        self._cancel: Callable[[], None] | None = None
        self._thread = threading.Thread(target=self._run, name=f"watch {prefix}", daemon=True)
        self._thread.start()

    def get(self, timeout_s: float) -> list[Event]:
        self._link.member()  # raises Forked
        with self._news:
            self._news.wait_for(lambda: self._pending or self._error or self.closed, timeout_s)
            events, self._pending = self._pending, []
            if not events and self._error is not None and not self.closed:
                raise self._error
            if events:
                self.revision = events[-1].revision
            self._news.notify_all()
            return events

    def close(self) -> None:
        with self._news:
            self.closed = True
            self._news.notify_all()
            cancel = self._cancel
        if cancel is not None:
            cancel()
        if self._thread is not threading.current_thread():
            self._thread.join(self._link.config.timing.attempt)

    # --- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        pause = _PAUSE_S[0]
        denied = False  # a token that the server has forgotten looks like a lack of permission
        while not self.closed:
            member = self._link.member()
            try:
                self._read(member)
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.CANCELLED:  # by us: closed, or the member left
                    failure: Exception = Transient(f"{member.name}: the watch was cancelled")
                else:
                    failure = self._link.translate(error, member, f"a watch of {self.prefix!r}")
            except (Transient, StoreLost, StoreRefused, Compacted, ValueError) as error:
                failure = error  # ValueError: the channel is closed
            else:
                pause, denied = _PAUSE_S[0], False
                continue
            if isinstance(failure, _Denied) and not denied:
                denied = True
                self._link.log_out()
            elif not isinstance(failure, (Transient, StoreLost)) and not self.closed:
                with self._news:
                    self._error = failure
                    self._news.notify_all()
                return
            with self._news:
                self._news.wait_for(lambda: self.closed, pause)
            pause = min(pause * 2, _PAUSE_S[1])

    def _read(self, member: Member) -> None:
        """Read one stream until the watch is closed or resynced; raises what ended it."""
        start = self._keys + self.prefix.encode()
        create = rpc.WatchCreateRequest(
            key=start, range_end=range_end(start), start_revision=self._position + 1
        )
        requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        requests.put(rpc.WatchRequest(create_request=create))
        metadata = self._link.metadata(member, self._link.config.timing.attempt)
        stream = member.watch.Watch(until_none(requests), metadata=metadata)
        with self._news:
            self._cancel = stream.cancel
        self._link.hold(stream, member)
        # A member that takes the request and does not answer is not noticed by pings alone.
        silent = f"{member.name}: no answer to a watch"
        watchdog = threading.Timer(
            self._link.config.timing.attempt, self._link.leave, (member, silent)
        )
        watchdog.daemon = True
        watchdog.start()
        try:
            if self.closed:
                return
            for response in stream:
                watchdog.cancel()
                if response.compact_revision:
                    self._resync(int(response.compact_revision))
                    return
                if response.canceled:
                    raise self._ended(response.cancel_reason, member)
                self._link.answered()
                self._take([self._event(event) for event in response.events])
        finally:
            watchdog.cancel()
            requests.put(None)
            self._link.release(stream)
            stream.cancel()
        if not self.closed:
            raise Transient(f"{member.name}: ended the watch")

    def _ended(self, reason: str, member: Member) -> Exception:
        if "permission denied" in reason:
            return _Denied(
                f"{self._link.where} refused a watch of {self.prefix!r} ({member.name}: {reason}). "
                f"{self._link.remedy(reason)}"
            )
        self._link.leave(member, f"{member.name}: {reason or 'ended the watch'}")
        return Transient(f"{member.name}: {reason}")

    def _event(self, event: Any) -> Event:
        key = event.kv.key[len(self._keys) :].decode()
        revision = int(event.kv.mod_revision)
        if event.type == event.DELETE:
            return Event("delete", key, b"", revision)
        return Event("put", key, bytes(event.kv.value), revision)

    def _take(self, events: list[Event]) -> None:
        if not events:
            return
        with self._news:
            self._news.wait_for(lambda: len(self._pending) < _PENDING or self.closed)
            self._pending += events
            self._position = events[-1].revision
            if self._known is not None:
                note(self._known, events)
            self._news.notify_all()

    def _resync(self, compacted: int) -> None:
        if self._known is None:
            raise Compacted(
                f"{self._link.where} keeps nothing from before revision {compacted}, and the watch "
                f"of {self.prefix!r} is to go on after {self._position}. Take a snapshot and watch "
                "from that."
            )
        now = self._snapshot(self.prefix)
        self._take(difference(self._known, self._position, now))
        self._position = now.revision


class _Denied(StoreRefused):
    pass
