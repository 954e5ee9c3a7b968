"""While a store that outlives jobs does not answer: train on, and ask again within reason.

Nothing in the path of a step needs the store, so a job goes on without it. It ends where somebody
waits for what only the store can tell, for longer than an outage may take; and on a node that is
cut off from the others (:mod:`flashrun.control.fence`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from flashrun.control.events import Timing
from flashrun.rendezvous.kv import ControlStore, KeyValue, StoreLost
from flashrun.rendezvous.tcp_kv import Cancelled

T = TypeVar("T")

_PAUSE_S = 0.1  # beside what an attempt takes


class Patience:
    """See the module.

    Args:
        where: names the store.
        cancel: ends every wait.
        say: takes a line for a person.
        awaited: whether somebody waits for the store now.
        paused: whether this node's workers stand still meanwhile.
    """

    def __init__(
        self,
        where: str,
        timing: Timing,
        *,
        cancel: threading.Event,
        say: Callable[[str], None],
        awaited: Callable[[], bool],
        paused: Callable[[], bool] = lambda: False,
    ) -> None:
        self._where = where
        self._timing = timing
        self._cancel = cancel
        self._say = say
        self._awaited = awaited
        self._paused = paused
        self._line_due = 0.0

    def call(self, ask: Callable[[], T]) -> T:
        """What the store answers, however often that takes; ``ask`` may be carried out twice.

        Raises:
            StoreLost: the wait is over; the message says what to do.
            Cancelled: by ``cancel``.
        """
        since = time.monotonic()
        self._line_due = since + self._timing.waiting_line
        while True:
            if self._cancel.is_set():
                raise Cancelled("the wait for the store was ended")
            try:
                return ask()
            except StoreLost as error:
                self._consider(error, time.monotonic() - since)
            self._cancel.wait(_PAUSE_S)

    def _consider(self, error: StoreLost, silent_s: float) -> None:
        """Raises StoreLost where there is nothing to wait for any more."""
        limit = self._timing.outage
        if self._awaited() and silent_s > limit:
            raise StoreLost(
                f"{error} It has been away for {silent_s:.0f} s while this node waited for it "
                f"(--recovery-timeout={limit:g})."
            ) from error
        if time.monotonic() >= self._line_due:
            self._line_due = time.monotonic() + self._timing.waiting_line
            meanwhile = "training goes on, and what is lost meanwhile is dealt with when it is back"
            if self._paused():
                meanwhile = "this node's workers are paused until it does"
            self._say(f"{self._where} has not answered for {silent_s:.0f} s; {meanwhile}")


class PatientKeyValue(KeyValue):
    """A store that is asked with patience. A compare-and-swap that was carried out and not answered
    tells of a failure: its callers look at what is there."""

    def __init__(self, store: ControlStore, patience: Patience) -> None:
        self._store = store
        self._call = patience.call

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        return self._call(lambda: self._store.get_many(keys))

    def put(self, key: str, value: bytes) -> None:
        self._call(lambda: self._store.put(key, value))

    def compare_and_swap(self, key: str, expected: bytes | None, value: bytes) -> bool:
        return self._call(lambda: self._store.compare_and_swap(key, expected, value))

    def increment(self, key: str) -> int:
        return self._call(lambda: self._store.increment(key))

    def delete(self, key: str) -> None:
        self._call(lambda: self._store.delete(key))

    def list_keys(self, prefix: str = "") -> list[str]:
        return self._call(lambda: self._store.list_keys(prefix))
