"""What is kept of collectives' inputs, so that an interrupted one can be issued again: how many
bytes at most, and until when.

An in-place operation overwrites its input, so that is copied before (`Op.retain`). It is kept until
every rank is known to have completed the interval: when an operation of the next one, which waits
for every rank, has completed here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flashrun.worker import reductions
from flashrun.worker.oplog import Entry, Op


class Retention:
    """See the module.

    Args:
        setting: "on", "off" (no copies), or a number of bytes.
        tell: takes an event for the log.

    Attributes:
        bytes: kept now.
        peak: the most there was.
    """

    def __init__(self, setting: str, tell: Callable[[Mapping[str, Any]], None]) -> None:
        self._setting = setting
        self._cap = None if setting == "on" else 0 if setting == "off" else int(setting)
        self._tell = tell
        self._needed = 0  # bytes that this interval would have kept without a cap
        self._told = False
        self.bytes = 0
        self.peak = 0

    def keep(self, op: Op) -> None:
        """Keep what `op` needs to be issued again, as far as the cap allows."""
        room = math.inf if self._cap is None else self._cap - self.bytes
        self._needed += op.set_aside(room) if reductions.by_reducer(op) else op.retain(room)
        self.bytes += op.kept
        self.peak = max(self.peak, self.bytes)

    def release(self, entries: Iterable[Entry]) -> None:
        """Nobody will ask for these again."""
        for entry in entries:
            if isinstance(entry, Op):
                self.bytes -= entry.kept
                entry.kept = 0
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
        if report:
            self._tell({"event": "retained", "bytes": self.bytes, "peak": self.peak})
