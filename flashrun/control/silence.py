"""Who is silent, noted by who leads for people to see: nothing is decided by it.

A node is noted with the heartbeat at which it stands still, so a note is void by itself as soon as
the heartbeat moves on, whoever has written it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flashrun.rendezvous.kv import KeyValue


@dataclass(frozen=True)
class Silence:
    """Attributes:
    beat: at which the heartbeat stands still; "": none was ever seen.
    since: when that was first seen, by the clock (Unix, s) of who led then.
    """

    beat: str
    since: float


class SilenceBook:
    """The notes of a job.

    Args:
        prefix: of the job's keys.
    """

    def __init__(self, kv: KeyValue, prefix: str) -> None:
        self._kv = kv
        self._key = f"{prefix}silent"
        self._beat = f"{prefix}beat/"
        self._noted: dict[int, Silence] | None = None

    def note(
        self, beats: Mapping[int, bytes | None], silent: Mapping[int, float], now: float
    ) -> None:
        """Write down what has changed, if anything has.

        Args:
            beats: order of a node -> its heartbeat.
            silent: order -> for how many seconds it has stood still; those for too long only.
            now: Unix, s.
        """
        if self._noted is None:  # the one that led before knows more
            self._noted = self._read()
        present = {order: (beat or b"").decode() for order, beat in beats.items()}
        known = {o: s for o, s in self._noted.items() if present.get(o) == s.beat}
        new = {o: Silence(present[o], now - s) for o, s in silent.items() if o not in known}
        noted = {**known, **new}
        if noted != self._noted:
            text = json.dumps({order: [s.beat, s.since] for order, s in noted.items()})
            self._kv.put(self._key, text.encode())
            self._noted = noted

    def _read(self) -> dict[int, Silence]:
        raw = self._kv.get(self._key)
        said = {} if raw is None else json.loads(raw)
        return {int(order): Silence(beat, since) for order, (beat, since) in said.items()}

    def read(self, orders: Iterable[int]) -> dict[int, float]:
        """Those of some nodes that are silent now: order -> for how many seconds, about (by the
        clocks of two machines)."""
        noted = self._read()
        asked = [order for order in orders if order in noted]
        beats = self._kv.get_many([f"{self._beat}{order}" for order in asked])
        return {
            order: max(0.0, time.time() - noted[order].since)
            for order, beat in zip(asked, beats, strict=True)
            if (beat or b"").decode() == noted[order].beat
        }
