"""A step boundary in the log: where the script is, its random states, small tensors."""

from __future__ import annotations

import struct
import sys
import zlib
from typing import TYPE_CHECKING

from torch.utils.weak import TensorWeakRef

from flashrun.worker.replay import carried, kinds

if TYPE_CHECKING:
    from types import FrameType

    from flashrun.worker.replay.randomness import Randomness
    from flashrun.worker.replay.session import Session

_BOUNDARY = struct.Struct("<QQI")  # boundary, regions so far, checksum of the random states


def _record(session: Session, b: int, crc: int) -> bytes:
    return _BOUNDARY.pack(b, session.ordinal, crc)


def log(session: Session, randomness: Randomness, b: int) -> None:
    """Live: append the records of boundary `b`. The states come last: whoever finds them finds what
    is carried, too; who does not takes the last interval's results from peers (`completion`)."""
    whole = randomness.whole_between()
    crc = zlib.crc32(whole)
    session.append(kinds.BOUNDARY, 0, _record(session, b, crc))
    session.append(kinds.CARRY, 0, carried.collect(sys._getframe(1)))
    randomness.keep(b, whole, crc)


def compare(session: Session, randomness: Randomness, b: int) -> None:
    """Catch-up: the log must have the same boundary here; what is carried comes from it.

    Raises:
        Divergence: it has not.
    """
    record = session.peek()
    mine = _record(session, b, zlib.crc32(randomness.whole()))
    frame = sys._getframe(1)
    if record is None:
        session.append(kinds.BOUNDARY, 0, mine)
        _carry(session, frame)
        return
    if record.kind != kinds.BOUNDARY:
        raise session.diverged(
            f"the script is at boundary {b}, but the log has '{kinds.name(record.kind)}' before it"
        )
    if record.payload != mine:
        there, regions, crc = _BOUNDARY.unpack_from(record.payload)
        raise session.diverged(
            f"boundary {b} after {session.ordinal} regions with random states"
            f" {_BOUNDARY.unpack(mine)[2]:08x}, but the log has boundary {there} after {regions}"
            f" with {crc:08x}"
        )
    session.take()
    record = session.peek()
    if record is None:  # killed between the two: what is carried is known only to this process
        _carry(session, frame)
        return
    if record.kind != kinds.CARRY:
        raise session.diverged(f"boundary {b} has no record of carried values")
    session.take()
    problem, tensors = carried.restore(frame, record.payload, session.quiet())
    if problem:
        raise session.diverged(problem)
    if session.unreal is not None:
        for tensor in tensors:
            session.unreal.clear(tensor)
    session.carried = [TensorWeakRef(tensor) for tensor in tensors]


def _carry(session: Session, frame: FrameType) -> None:
    with session.quiet():
        session.append(kinds.CARRY, 0, carried.collect(frame))
