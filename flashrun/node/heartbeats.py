"""Which workers hang, judged from their heartbeats and from what the kernel says of them.

A missing beat alone proves nothing: whoever holds the GIL for a minute (a long C call, a slow read)
is busy, not hung. What the agent acts on here is a worker that *can't* run: it was stopped (SIGSTOP
and the like) while the rest of its job goes on. Other hangs show themselves to the peers, which
wait for the rank in a collective: the group's own timeout names who did not come (see
`flashrun.control.recovery`).

The rule, `judge`: a worker misses a look when it has not beaten since the look before and is
stopped (state T) at both. `detection_timeout` of looks missed in a row, and it is hung. Not missed:

- any other state. R, S and D are alive, however long a call takes; t is held by a debugger, whose
  user looks at it; a process that has ended is seen elsewhere, at once.
- when *every* worker is stopped, or the supervisor is: somebody has suspended the job as a whole
  (SIGSTOP to all, Ctrl-Z at the launcher) and will continue it. When it goes on, each worker has
  the full time again to be continued, too.
- time in which the agent itself did not look, because it was stopped or the machine slept: looks
  are counted, not seconds. Nor while it has paused them itself (:mod:`flashrun.node.pausing`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from flashrun.beats import Beat

_STOPPED = "T"


@dataclass(frozen=True)
class Sight:
    """What one look at a worker showed.

    Attributes:
        beat: how often it has beaten; -1: not yet, in this process.
        state: letter of proc_pid_stat(5); "": there is no such process.
    """

    beat: int
    state: str


def judge(
    missed: Mapping[int, int],
    before: Mapping[int, Sight],
    now: Mapping[int, Sight],
    supervisor: str,
) -> dict[int, int]:
    """How many looks in a row each worker has missed, this one included. See the module.

    Args:
        missed: up to the look before.
        before: that look.
        now: this look.
        supervisor: its state.
    """
    suspended = is_suspended(now, supervisor)
    counts = {}
    for rank, sight in now.items():
        last = before.get(rank)
        stopped = last == sight and sight.state == _STOPPED and sight.beat >= 0
        counts[rank] = missed.get(rank, 0) + 1 if stopped and not suspended else 0
    return counts


def is_suspended(sights: Mapping[int, Sight], supervisor: str) -> bool:
    """Whether the job stands still because somebody has stopped it as a whole."""
    states = {sight.state for sight in sights.values()}
    return supervisor == _STOPPED or states == {_STOPPED}


def state_of(pid: int) -> str:
    """The process's state letter; "" if it is gone (field 3 of proc_pid_stat(5))."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return chr(file.read().rpartition(b")")[2].split()[0][0])
    except (OSError, IndexError):
        return ""


class Heartbeats:
    """Looks at the workers of one node.

    Args:
        run_dir: private folder of the job on this node.
        interval: s between two looks, and between two beats.
        timeout: s without an answer after which a worker counts as hung.
        paused: whether the agent has stopped all of them.

    Attributes:
        suspended: the job was, at the last look.
    """

    def __init__(
        self, run_dir: str, interval: float, timeout: float,
        paused: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        self._run_dir = run_dir
        self.interval = interval
        self.timeout = timeout
        self._paused = paused
        self._enough = max(2, math.ceil(timeout / interval))
        self.suspended = False
        self._missed: dict[int, int] = {}
        self._before: dict[int, Sight] = {}
        self.next = time.monotonic() + interval

    def look(self, pids: Mapping[int, int], supervisor: int, now: float) -> list[int]:
        """Look once.

        Args:
            pids: the present process of each rank.
            supervisor: pid.
            now: ``time.monotonic()``.

        Returns:
            Ranks that hang; each is told once, since it is to be killed.
        """
        self.next = now + self.interval
        if self._paused():
            self._missed, self._before = {}, {}
            return []
        sights = {rank: self._see(rank, pid) for rank, pid in pids.items()}
        state = state_of(supervisor)
        self.suspended = is_suspended(sights, state)
        self._missed = judge(self._missed, self._before, sights, state)
        self._before = sights
        hung = [rank for rank, missed in self._missed.items() if missed >= self._enough]
        for rank in hung:
            del self._before[rank]
        return hung

    def _see(self, rank: int, pid: int) -> Sight:
        beat = Beat.read(self._run_dir, rank)
        count = beat.count if beat is not None and beat.pid == pid else -1
        return Sight(count, state_of(pid))
