"""A worker's heartbeat as it lies in shared memory; written by the worker, read by its agent."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar


@dataclass(frozen=True)
class Beat:
    """One heartbeat.

    Attributes:
        pid: of the worker, so that a predecessor's last beat is nobody's.
        count: beats so far.
        at: ``time.monotonic_ns()`` of the beat.
        boundary: optimizer steps so far.
        phase: an entry of `PHASES`.
    """

    pid: int
    count: int
    at: int
    boundary: int
    phase: str

    PHASES: ClassVar[tuple[str, ...]] = ("live", "catch-up", "held", "finished")
    LAYOUT: ClassVar[struct.Struct] = struct.Struct("<IIQQB")

    def pack(self) -> bytes:
        phase = self.PHASES.index(self.phase)
        return self.LAYOUT.pack(self.pid, self.count, self.at, self.boundary, phase)

    @classmethod
    def unpack(cls, data: bytes) -> Beat:
        pid, count, at, boundary, phase = cls.LAYOUT.unpack_from(data)
        return cls(pid, count, at, boundary, cls.PHASES[phase])

    @classmethod
    def read(cls, folder: str | Path, rank: int) -> Beat | None:
        """The newest beat of a rank; None: there is none."""
        try:
            data = path(folder, rank).read_bytes()
        except FileNotFoundError:
            return None
        return cls.unpack(data) if len(data) == cls.LAYOUT.size and any(data) else None


def path(folder: str | Path, rank: int) -> Path:
    """Where the beats of a rank are.

    Args:
        folder: private folder of the job on this node.
    """
    return Path(os.fspath(folder)) / f"beat.{rank}"
