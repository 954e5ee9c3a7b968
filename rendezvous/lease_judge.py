"""Which leases of an embedded store have run out, by the clock of whoever is the judge."""

from __future__ import annotations

import time
from collections.abc import Mapping

from flashrun.rendezvous.ring import Ring

_EVERY_S = (0.1, 1.0)  # bounds of the time between two looks
_TERM = 4  # looks in which a judge has to be seen


class LeaseJudge:
    """One client's part in judging; ``me`` is its unique id."""

    def __init__(self, me: str) -> None:
        self._me = me
        self._due = 0.0
        self._count = 0
        self._office: tuple[bytes | None, float] = (None, 0.0)  # the judge's counter, seen since
        # For each lease: its counter, since when it is known to stand, when it was last looked at.
        self._seen: dict[str, tuple[bytes | None, float, float]] = {}

    def every(self, leases: Mapping[str, float]) -> float:
        """Seconds between two looks: several in the shortest time to live."""
        low, high = _EVERY_S
        return min(high, max(low, min(leases.values(), default=high) / 8))

    def is_due(self, every: float) -> bool:
        """Whether it is time to look; then the next time is ``every`` seconds later."""
        now = time.monotonic()
        if now < self._due:
            return False
        self._due = now + every * 0.9
        return True

    def in_office(self, ring: Ring, every: float) -> bool:
        """Whether we are the judge, from now on too."""
        now = time.monotonic()
        there = ring.peek("judge")
        ours = there is not None and there.startswith(self._me.encode())
        if not ours and there is not None:
            if there != self._office[0]:
                self._office = (there, now)
            if now - self._office[1] < _TERM * every:
                self._seen.clear()
                return False
        self._count += 1
        mine = f"{self._me} {self._count}".encode()
        return ring.swap("judge", there, mine) == mine

    def silent(
        self,
        counts: Mapping[str, bytes | None],
        leases: Mapping[str, float],
        begun: float,
        ended: float,
    ) -> list[str]:
        """The leases that have run out.

        Time counts only while we and the store were awake: after a gap between two looks of more
        than half a time to live, a lease has its whole time again.

        Args:
            counts: the leases' counters, read between ``begun`` and ``ended`` (monotonic).
            leases: their times to live, seconds.
        """
        seen, over = {}, []
        for name, count in counts.items():
            ttl = leases[name]
            before, since, last = self._seen.get(name, (None, ended, ended))
            if count is None or count != before or ended - last > ttl / 2:
                since = ended
            elif begun - since >= ttl:
                over.append(name)
            seen[name] = (count, since, ended)
        self._seen = seen
        return over
