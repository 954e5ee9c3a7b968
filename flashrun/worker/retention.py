"""What is kept of collectives' inputs, so that an interrupted one can be issued again: how many
bytes at most, and until when.

An in-place operation overwrites its input, so that is copied before (`Op.retain`). It is kept until
every rank is known to have completed the interval: when an operation of the next one, which waits
for every rank, has completed here.

Results are kept by reference until then, so an interval without an end (an evaluation that gathers
all it computes, a script without an optimizer) would fill memory. What an interval keeps is
therefore limited to some times what one with a step has kept; beyond it, what has completed is let
go of, and a fault before the next step restarts all.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flashrun.worker import reductions
from flashrun.worker.oplog import Entry, Op

LEAST = 256 << 20  # bytes that an interval may keep in any case
SHARE = 16  # of the machine's memory, for all of its workers
TIMES = 4  # what steps usually keep


def _at_first() -> int:
    """How much an interval may keep before one has ended."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(LEAST, memory // SHARE // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


class Retention:
    """See the module.

    Args:
        setting: "on", "off" (no copies), or a number of bytes.
        tell: takes an event for the log.

    Attributes:
        bytes: kept now.
        peak: the most there was.
        held: what all entries keep in memory, results that are referred to included.
        limit: of `held`.
        let_go: the last interval of which something was let go of.
    """

    def __init__(self, setting: str, tell: Callable[[Mapping[str, Any]], None]) -> None:
        self._setting = setting
        self._cap = None if setting == "on" else 0 if setting == "off" else int(setting)
        self._tell = tell
        self._needed = 0  # bytes that this interval would have kept without a cap
        self._told = False
        self._interval = 0  # bytes that this interval has kept, or had let go of
        self._before = 0  # the one before
        self.bytes = 0
        self.peak = 0
        self.held = 0
        self.limit = _at_first()
        self.let_go = -1

    def keep(self, op: Op) -> None:
        """Keep what `op` needs to be issued again, as far as the cap allows."""
        room = math.inf if self._cap is None else self._cap - self.bytes
        self._needed += op.set_aside(room) if reductions.by_reducer(op) else op.retain(room)
        self.bytes += op.kept
        self.peak = max(self.peak, self.bytes)
        op.held = op.weight()
        self.held += op.held
        self._interval += op.held

    def relieve(self, log: list[Entry], interval: int) -> None:
        """`held` is beyond the limit: let go of what has completed in this interval."""
        done = [e for e in log if isinstance(e, Op) and e.done]
        if not done:
            return
        if self.let_go < 0:
            self._tell(
                {
                    "event": "retention-limit",
                    "bytes": self.held,
                    "reason": (
                        f"{self.held / 1e6:.3g} MB of collectives without an optimizer's step"
                        " between them are more than is kept: a fault before the next step"
                        " restarts all workers"
                    ),
                }
            )
        self.let_go = interval
        self.release(done)
        log[:] = [e for e in log if not (isinstance(e, Op) and e.done)]

    def release(self, entries: Iterable[Entry]) -> None:
        """Nobody will ask for these again."""
        for entry in entries:
            if isinstance(entry, Op):
                self.bytes -= entry.kept
                entry.kept = 0
                self.held -= entry.held
                entry.held = 0
                entry.saved = entry.results = None

    def at_boundary(self, report: bool) -> None:
        """An interval has ended: say once what the cap left out.

        Args:
            report: tell how much is kept.
        """
        over = self._cap is not None and self._needed > self._cap
        if over and not self._told:
            self._told = True
            self._tell(
                {
                    "event": "retention-cap",
                    "bytes": self._needed,
                    "cap": self._setting,
                    "reason": (
                        f"one step's collectives have {self._needed / 1e6:.3g} MB of inputs, and"
                        f" --retain={self._setting} does not keep them: a fault while one of these"
                        " collectives is under way restarts all workers"
                    ),
                }
            )
        self._needed = 0
        # Two in a row, so that one with an evaluation does not count.
        self.limit = max(self.limit, TIMES * min(self._interval, self._before))
        self._before, self._interval = self._interval, 0
        if report:
            self._tell({"event": "retained", "bytes": self.bytes, "peak": self.peak})
