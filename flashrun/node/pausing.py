"""A node's workers stand still (SIGSTOP), with all that they have started, while it is not known
whether their ranks are still this node's (:mod:`flashrun.control.fence`).

Whoever stands still can't act. They go on (SIGCONT) when the ranks are known to be theirs, or are
killed; in between they are never let run, not to handle a signal either. What is to be is kept for
the next agent before it is done and looked after while it lasts: a process that was forked just
then, a replacement that had been asked for, a worker that somebody else has continued.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from flashrun.node.heartbeats import state_of
from flashrun.node.process_tree import belonging, send, table
from flashrun.node.worker_group import WorkerGroup
from flashrun.observe.console import say

_AGAIN_S = 1.0
_SCANS = 20  # a worker that forks faster than it can be listed stands still itself by then
_STILL = ("T", "t", "Z", "X", "")


@dataclass(frozen=True)
class Processes:
    """The workers of a node: their own processes, and their tags (:mod:`flashrun.node.tags`)."""

    pids: Sequence[int]
    tags: frozenset[str]

    @classmethod
    def of(cls, group: WorkerGroup | None) -> Processes:
        """Those that run, and what is left of those that have ended."""
        if group is None:
            return cls((), frozenset())
        pids = [member.pid for member in group.running if member.pid is not None]
        return cls(pids, frozenset(member.tag for member in group.members.values()))

    def all(self) -> set[int]:
        """With what they have started."""
        keep = [os.getpid(), os.getppid()]
        return belonging(table(), lambda tag: tag in self.tags, self.pids, keep)


def hold(workers: Processes) -> None:
    """Stop all of them. (One that is inside the kernel stops before it is out of it.)"""
    send(workers.pids, signal.SIGSTOP)
    stopped: set[int] = set()
    for _ in range(_SCANS):
        more = workers.all() - stopped
        if not more:
            return
        send(more, signal.SIGSTOP)
        stopped |= more


def let_go(workers: Processes) -> None:
    """Continue all of them; first what they have started, which they may wait for."""
    send(workers.all() - set(workers.pids), signal.SIGCONT)
    send(workers.pids, signal.SIGCONT)


class Standstill:
    """Whether the workers of this node are to stand still.

    Args:
        since: they were, for the agent before this one.

    Attributes:
        since: monotonic; None: they are not.
    """

    def __init__(self, since: float | None = None) -> None:
        self.since = since
        self._due = time.monotonic()

    def begin(self, group: WorkerGroup | None, why: str) -> None:
        """They are to be (`since`), and this is the moment."""
        workers = Processes.of(group)
        hold(workers)
        self._due = time.monotonic() + _AGAIN_S
        if workers.pids:
            say(f"this node is cut off for now: {why}; its workers are paused, since the others may"
                " go on without it", "warning", event="paused", why=why,
                workers=len(workers.pids))  # fmt: skip

    def end(self, group: WorkerGroup | None, why: str, paused_s: float) -> None:
        """They are not any more; the next agent is told after that."""
        workers = Processes.of(group)
        let_go(workers)
        if workers.pids:
            say(f"{why}; the workers go on after {paused_s:.1f} s", "info", event="goes-on",
                why=why, paused_s=round(paused_s, 3))  # fmt: skip
        self.since = None

    def tick(self, group: WorkerGroup | None) -> None:
        """Time has passed."""
        if self.since is None or time.monotonic() < self._due:
            return
        self._due = time.monotonic() + _AGAIN_S
        workers = Processes.of(group)
        if any(state_of(pid) not in _STILL for pid in workers.pids):
            hold(workers)

    def timeout(self) -> float | None:
        """Seconds until :meth:`tick` has something to do."""
        return None if self.since is None else max(0.0, self._due - time.monotonic())
