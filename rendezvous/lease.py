"""A lease as its holder sees it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Lease:
    """Keys written with it go when it runs out or is revoked. Its client renews it.

    The holder judges by its own monotonic clock, from the moment at which it *sent* its last
    renewal that was answered; everybody else starts counting later. So when ``remaining_s`` is 0
    for the holder, it is not yet over for the others: who acts only while it is positive is never
    one of two.

    Attributes:
        id: unique in its store.
        ttl_s: how long it lives without a renewal, seconds.
        lost: set when the store says that it has run out; then it never comes back.
    """

    def __init__(
        self, id_: str, ttl_s: float, sent_at: float, revoke: Callable[[Lease], None]
    ) -> None:
        self.id = id_
        self.ttl_s = ttl_s
        self.lost = threading.Event()
        self._sent_at = sent_at
        self._revoke = revoke
        self.renewing = True

    def __repr__(self) -> str:
        return f"Lease({self.id}, ttl_s={self.ttl_s:g})"

    def remaining_s(self) -> float:
        """Seconds for which it is certainly held, 0 when it is lost or may be (it can rise again
        when the store answers after a silence)."""
        if self.lost.is_set():
            return 0.0
        return max(0.0, self._sent_at + self.ttl_s - time.monotonic())

    def renewed(self, sent_at: float, ttl_s: float | None = None) -> None:
        """For the client: a renewal that was sent at ``sent_at`` (monotonic) was answered."""
        self._sent_at = sent_at
        if ttl_s is not None:
            self.ttl_s = ttl_s

    def renewal_due(self) -> float:
        """For the client: when (monotonic) to renew; two may fail before it is over."""
        return self._sent_at + self.ttl_s / 3

    def revoke(self) -> None:
        """Give it back: its keys go now."""
        self.renewing = False
        self._revoke(self)
        self.lost.set()

    def abandon(self) -> None:
        """Renew it no more: its keys go when it runs out."""
        self.renewing = False
