"""Who is silent: heartbeats judged by the observer's own clock. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping


class Heartbeats:
    """Remembers when each node's heartbeat value last changed.

    Only changes are looked at, and only the observer's clock: two machines' clocks are never
    compared. A node that was never seen before counts as alive at that moment. While the observer
    itself did not look (the store was away, or it stood still) nobody can be found silent: of such
    a time no more than half the timeout counts, so that the others have the rest to beat again.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout = timeout_s
        self._seen: dict[str, tuple[bytes | None, float]] = {}
        self._looked: float | None = None

    def observe(self, values: Mapping[str, bytes | None], now: float) -> frozenset[str]:
        """Take in the present values (None: no beat yet); returns the silent nodes."""
        unseen = 0.0 if self._looked is None else now - self._looked - self._timeout / 2
        if unseen > 0:
            self._seen = {node: (value, at + unseen) for node, (value, at) in self._seen.items()}
        self._looked = now
        silent = set()
        for node, value in values.items():
            last = self._seen.get(node)
            if last is None or last[0] != value:
                self._seen[node] = (value, now)
            elif now - last[1] > self._timeout:
                silent.add(node)
        return frozenset(silent)

    def still_for(self, node: str, now: float) -> float:
        """For how many seconds a node's heartbeat has not changed, as far as was seen here."""
        return now - self._seen[node][1] if node in self._seen else 0.0


class Doors:
    """Remembers since when nodes do not answer at their doors, without a break that was seen.

    Args:
        unseen_s: what was not looked at for longer may have answered meanwhile.
    """

    def __init__(self, unseen_s: float) -> None:
        self._unseen = unseen_s
        self._missed: dict[str, tuple[float, float]] = {}  # since when, and last seen so

    def note(self, missed: Collection[str], now: float) -> dict[str, float]:
        """Take in who did not answer to rings that began now; for how many seconds each has not."""
        kept = {n: s for n, s in self._missed.items() if n in missed and now - s[1] <= self._unseen}
        self._missed = {n: (kept.get(n, (now, now))[0], now) for n in missed}
        return {node: now - since for node, (since, _) in self._missed.items()}


def given_up(
    silent: Collection[str], missed: Mapping[str, float], gone: Collection[str], settled_s: float
) -> frozenset[str]:
    """Which silent nodes of a round are lost, where the store is none of the nodes' own.

    One that answers at its door lives, and only does not reach the store. Those that do not may be
    cut off, however many: they stand still by now (:mod:`flashrun.control.fence`).

    Args:
        missed: for how many seconds the others have not answered at their doors.
        gone: of these nothing is left.
        settled_s: how long a node that is cut off takes to stand still.
    """
    stopped = {node for node, seconds in missed.items() if seconds >= settled_s}
    return frozenset(silent) & (stopped | frozenset(gone))
