"""A node that is cut off stops its workers before others may act as its ranks.

The others count from when they have *seen* its last heartbeat, and it counts from when it *sent*
that one: its time is over first, and no clocks of two machines are compared. It looks around in
time to be sure, and to have stopped, when the others give its ranks away.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_TRY_S = 1.0


def try_s(detection_timeout: float) -> float:
    """How long each of the two tries to reach somebody may take, and the stopping after them."""
    return min(_TRY_S, detection_timeout / 8)


def is_cut_off(nodes: int, unanswered: int) -> bool:
    """Whether a node that the store does not answer has to stop: nobody on its side has the store
    then, and those on the other side may have it. Most nodes together go on, since as a rule it is
    the store that is away; then the others give nothing away (`liveness.given_up`).

    Args:
        nodes: of the round, with this one.
        unanswered: those that this one does not reach.
    """
    return 2 * unanswered >= nodes


class Fence:
    """See the module. A thread that waits.

    Args:
        look: why this node is cut off, None: it is not; told how long a try may take.
        on_cut_off: told why, from the thread, once.
        kept: file for the time of the last answered heartbeat, which the agent after this one goes
            on from: its own first one may meet a link that is down for a moment.
    """

    def __init__(
        self,
        detection_timeout: float,
        look: Callable[[float], str | None],
        on_cut_off: Callable[[str], None],
        kept: Path | None = None,
    ) -> None:
        self._timeout = detection_timeout
        self._try = try_s(detection_timeout)
        self._look = look
        self._on_cut_off = on_cut_off
        self._kept = kept
        self._sent = -1.0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fence", daemon=True)

    def start(self, sent: float | None) -> None:
        """
        Args:
            sent: as of `answered`; None: by the agent before this one. (Where nothing is kept of
                that it may have been long ago.)
        """
        if sent is None:
            self._sent = self._before()
        else:
            self.answered(sent)
        self._thread.start()

    def answered(self, sent: float) -> None:
        """The store has answered to a heartbeat that was sent at that time (monotonic)."""
        self._sent = sent
        if self._kept is not None:
            # In one piece: the reader may come at any time.
            beside = self._kept.with_suffix(".new")
            with suppress(OSError):
                beside.write_text(repr(sent))
                beside.replace(self._kept)

    def _before(self) -> float:
        try:
            return float(self._kept.read_text()) if self._kept is not None else float("-inf")
        except (OSError, ValueError):
            return float("-inf")

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        # One try more: to stop the workers.
        looking = 3 * self._try
        looked = float("-inf")
        while True:
            # (While the store is away for all, the others give away nothing. When it is back, they
            # wait for half the timeout at least, see `liveness.Heartbeats`.)
            due = max(self._sent + self._timeout, looked + self._timeout / 2) - looking
            if self._closed.wait(max(0.0, due - time.monotonic())):
                return
            if time.monotonic() < self._sent + self._timeout - looking:
                continue  # it has been answered since
            sent, looked = self._sent, time.monotonic()
            why = self._look(self._try)
            if why is not None and sent == self._sent and not self._closed.is_set():
                self._on_cut_off(
                    f"This node is cut off: {why}. Its workers are stopped, since the others may go"
                    " on without it. Mend its network and start its agent again."
                )
                return
