"""What a rank has sealed, as it lies in shared memory: written by the worker, read by its agent.

In a job of several nodes each worker says at every boundary, once all that it leaves for a
replacement is written, that this boundary is *sealed*, and rings a bell. So whoever copies its
files knows up to where a copy is complete (:mod:`flashrun.node.leavings`).
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

_LAYOUT = struct.Struct("<QQ")
SIZE = _LAYOUT.size + 4


@dataclass(frozen=True)
class Seal:
    """Attributes:
    incarnation: of the process; another one continues the log from an earlier place. (It does
        not seal the boundary at which it joins: what the one before had logged after that is still
        there until something is logged again.)
    boundary: the newest one that is complete.
    """

    incarnation: int
    boundary: int

    def pack(self) -> bytes:
        raw = _LAYOUT.pack(self.incarnation, self.boundary)
        return raw + zlib.crc32(raw).to_bytes(4, "little")

    @classmethod
    def read(cls, folder: str | Path, rank: int) -> Seal | None:
        """The newest one of a rank; None: there is none, or it is being written."""
        try:
            data = path(folder, rank).read_bytes()
        except FileNotFoundError:
            return None
        raw, check = data[: _LAYOUT.size], data[_LAYOUT.size :]
        if len(data) != SIZE or zlib.crc32(raw).to_bytes(4, "little") != check or not any(data):
            return None
        return cls(*_LAYOUT.unpack(raw))


def path(folder: str | Path, rank: int) -> Path:
    """Where the seal of a rank is.

    Args:
        folder: private folder of the job on this node.
    """
    return Path(folder) / f"sealed.{rank}"


def bell(folder: str | Path) -> Path:
    """The FIFO into which workers put a byte at every boundary."""
    return Path(folder) / "bell"


def copied(folder: str | Path, rank: int) -> Path:
    """Says, where there is one, that what a rank has left on this node is a copy from another."""
    return Path(folder) / f"copied.{rank}"


def open_bell(folder: str | Path) -> int:
    """A descriptor of it; neither reading nor writing ever waits, whoever is at the other end.

    Raises:
        FileNotFoundError: nobody has hung it up.
    """
    return os.open(bell(folder), os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)


def ring(bell: int) -> None:
    """Put a byte into it; `bell` is its descriptor."""
    with contextlib.suppress(BlockingIOError):  # it rings already
        os.write(bell, b"!")
