"""A node that is cut off has its workers stand still before others may act as its ranks.

The others count from when they have *seen* its last heartbeat, and it counts from when it *sent*
that one: its time is over first, and no clocks of two machines are compared. It looks around in
time to be sure, and to have stopped, when the others give its ranks away.

Until `safe_until` nobody else acts as this node's ranks, whatever happens:

- its heartbeat has to stand still for the detection timeout (``sent + timeout``), and
- it must not have answered at its door for `settled_s`, all the time (`liveness.given_up`); a look
  around in which every node of the round answered shows that this had not begun.

Where the store outlives jobs (etcd), what is cut off is *paused*, since who has the ranks by then
is written there: its workers go on, or end, when it has the store again. Where it does not, the
store is lost to this node for good, and its workers are ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_TRY_S = 1.0
_STOOD_STILL = "it has stood still, for longer than the others wait"


def try_s(detection_timeout: float) -> float:
    """How long each of the two tries to reach somebody may take, and the stopping after them."""
    return min(_TRY_S, detection_timeout / 8)


def _looking_s(detection_timeout: float) -> float:
    """For a look around, and one try more: to stop the workers."""
    return 3 * try_s(detection_timeout)


def settled_s(detection_timeout: float) -> float:
    """For how long a silent node must not have answered at its door before it surely stands still:
    it looks around every quarter of the timeout while it does not have the store."""
    return detection_timeout / 4 + _looking_s(detection_timeout)


@dataclass(frozen=True)
class Pausing:
    """How a node stands still instead of ending. All are told from a thread, in the order in which
    that came about.

    Attributes:
        at_most: seconds, then it ends after all.
        begin: told why, and since when (monotonic).
        end: told why, and for how long it stood still.
        since: the agent before this one had begun; None: it had not.
    """

    at_most: float
    begin: Callable[[str, float], None]
    end: Callable[[str, float], None]
    since: float | None = None


class Fence:
    """See the module. A thread that waits.

    Args:
        look: why this node is cut off, None: it is not; told how long a try may take.
        on_cut_off: told why, from the thread, once.
        kept: file for `safe_until`, from which the agent after this one goes on: its own first look
            may meet a link that is down for a moment.
        pausing: None: it ends at once.
    """

    def __init__(
        self,
        detection_timeout: float,
        look: Callable[[float], str | None],
        on_cut_off: Callable[[str], None],
        kept: Path | None = None,
        pausing: Pausing | None = None,
    ) -> None:
        self._timeout = detection_timeout
        self._try = try_s(detection_timeout)
        self._look = look
        self._on_cut_off = on_cut_off
        self._kept = kept
        self._pausing = pausing
        self._since = None if pausing is None else pausing.since  # it stands still
        self._safe_until = float("-inf")
        self._sent = float("-inf")  # while it stands still: the last answered heartbeat
        self._again = float("inf")  # while it stands still: the next look
        self._lock = threading.Lock()  # of what is above, and held while it is told
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fence", daemon=True)

    @property
    def paused(self) -> bool:
        return self._since is not None

    def start(self, sent: float | None) -> None:
        """
        Args:
            sent: as of `answered`; None: by the agent before this one. (Where nothing is kept of
                that it may have been long ago.)
        """
        if sent is None:
            self._safe_until = self._before()
        else:
            self._extend(sent + self._timeout)
        self._thread.start()

    def answered(self, sent: float) -> None:
        """The store has answered to a heartbeat that was sent at that time (monotonic)."""
        with self._lock:
            if self._lapsed(time.monotonic()):
                self._begin_pause(_STOOD_STILL)
            if self._since is None:
                self._extend(sent + self._timeout)
            else:
                self._sent = sent  # what the store says has not been looked at

    def go_on(self, why: str) -> None:
        """The store was asked after its last answer: nobody has this node's ranks, nor can anybody
        have them while that answer holds."""
        with self._lock:
            until = self._sent + self._timeout
            if self._since is not None and time.monotonic() < until:
                self._extend(until)
                self._end_pause(why)

    def close(self) -> None:
        self._closed.set()

    # --------------------------------------------------------------------------------------------

    def _extend(self, until: float) -> None:
        self._safe_until = max(until, self._safe_until)
        if self._kept is not None:
            # In one piece: the reader may come at any time.
            beside = self._kept.with_suffix(".new")
            with suppress(OSError):
                beside.write_text(repr(self._safe_until))
                beside.replace(self._kept)

    def _before(self) -> float:
        try:
            return float(self._kept.read_text()) if self._kept is not None else float("-inf")
        except (OSError, ValueError):
            return float("-inf")

    def _due(self) -> float:
        if self._since is None:
            return self._safe_until - _looking_s(self._timeout)
        assert self._pausing is not None
        # A look at the others tells nothing once they may have its ranks.
        last = self._since + self._pausing.at_most
        return min(self._again, last) if self._again < self._safe_until else last

    def _lapsed(self, now: float) -> bool:
        """Whether it stood still itself, with all of its machine: what it knew is not true now."""
        return self._pausing is not None and self._since is None and now >= self._safe_until

    def _run(self) -> None:
        while not self._closed.wait(max(0.0, self._due() - time.monotonic())):
            began = time.monotonic()
            with self._lock:
                if began < self._due():
                    continue  # the store has answered since
                if self._lapsed(began):
                    self._begin_pause(_STOOD_STILL)
            why = self._look(self._try)
            with self._lock:
                if not self._closed.is_set():
                    self._settle(began, why, time.monotonic())

    def _settle(self, began: float, why: str | None, now: float) -> None:
        """After a look that began then."""
        if self._since is None and now < self._due():
            return  # the store has answered meanwhile
        self._again = began + self._try
        if why is None and (self._pausing is None or now < self._safe_until):
            self._extend(began + settled_s(self._timeout))
            if self._since is not None:
                self._end_pause("all nodes of the round answer again")
        elif self._pausing is None:
            self._cut_off(why or "")
        elif self._since is None:
            self._begin_pause(why or _STOOD_STILL)
        elif now >= self._since + self._pausing.at_most:
            self._cut_off(why or _STOOD_STILL)

    def _begin_pause(self, why: str) -> None:
        assert self._pausing is not None
        self._since = time.monotonic()
        self._pausing.begin(why, self._since)

    def _end_pause(self, why: str) -> None:
        assert self._pausing is not None and self._since is not None
        since, self._since = self._since, None
        self._pausing.end(why, time.monotonic() - since)

    def _cut_off(self, why: str) -> None:
        self._closed.set()
        self._on_cut_off(
            f"This node is cut off: {why}. Its workers are stopped, since the others may go"
            " on without it. Mend its network and start its agent again."
        )
