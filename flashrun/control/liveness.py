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
        return now - self._seen[node][1]


def given_up(
    silent: Collection[str], answering: Collection[str], gone: Collection[str], nodes: int
) -> frozenset[str]:
    """Which silent nodes of a round are lost, where the store is none of the nodes' own.

    One that answers at its door lives, and only does not reach the store. Those that do not may be
    cut off together: they stop (`fence.is_cut_off`), unless they are most of the nodes.

    Args:
        gone: of these nothing is left.
        nodes: how many the round has.
    """
    hidden = frozenset(silent) - frozenset(answering) - frozenset(gone)
    lost = frozenset(silent) & frozenset(gone)
    return lost if 2 * len(hidden) > nodes else lost | hidden
