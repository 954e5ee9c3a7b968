"""The host-read log of one rank: an append-only file that outlives a SIGKILL of its writer.

The file lies in shared memory (or any file system) and is written through a shared mapping, so
what was stored before the process died is in it without a system call per record. It grows by
segments, each a file of its own whose pages are reserved before they are used: a full file system
is an `OSError` at that moment and not a bus error later.

Record: ``length u16 | kind u8 | flags u8 | site u32 | crc u32 | payload [| tail]``. The checksum
covers header and payload and is chained (seeded by the previous record's), so that a torn record,
a flipped bit, and the remains of a longer log after the log was cut are all seen as its end. A
payload over 60,000 bytes is split over records with the flag MORE. A record may have a `tail` of
12 bytes outside of the checksum, which may be filled in later (see `Tail`).

Not thread-safe: one thread appends. Only tails may be filled in by another.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

MAGIC = b"FRJ1"
_HEADER = struct.Struct("<HBBII")
_HEAD = _HEADER.size
_PREFIX = struct.Struct("<HBBI")  # the header up to the checksum
_SEGMENT_HEADER = 16
_MORE = 1  # the next record continues this payload
_TAIL = 2  # 12 bytes follow that the checksum does not cover
_MAX_PAYLOAD = 60_000
_END_OF_SEGMENT = 255
TAIL_SIZE = 12
TAIL_SEED = 0x7A11  # of their checksum
FIRST_SEGMENT = 1 << 20
LARGEST_SEGMENT = 16 << 20
_tail_struct = struct.Struct("<QI")


@dataclass(frozen=True)
class Position:
    """A place between two records: segment number, offset in it, checksum so far."""

    segment: int
    offset: int
    crc: int


class Tail:
    """The part of a record that is filled in later, by one store of 12 bytes."""

    __slots__ = ("_map", "_offset")

    def __init__(self, segment: mmap.mmap, offset: int) -> None:
        self._map = segment
        self._offset = offset

    def fill(self, value: int) -> None:
        raw = struct.pack("<Q", value)
        self._map[self._offset : self._offset + TAIL_SIZE] = raw + struct.pack(
            "<I", crc32(raw, TAIL_SEED)
        )


class Record(NamedTuple):
    """One record as it was read."""

    kind: int
    site: int
    payload: bytes
    tail: int | None = None  # the value that was filled in, None if there is none (yet)
    place: Tail | None = None  # of the tail, where it has one


def _segment_path(folder: Path, number: int) -> Path:
    return folder / f"log.{number:04d}"


def _map_segment(path: Path, size: int | None) -> mmap.mmap:
    """Map a segment; with `size` create it and reserve its pages."""
    flags = os.O_RDWR | (os.O_CREAT | os.O_TRUNC if size is not None else 0)
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        if size is not None:
            os.posix_fallocate(fd, 0, size)
        else:
            size = os.fstat(fd).st_size
        return mmap.mmap(fd, size, mmap.MAP_SHARED)
    finally:
        os.close(fd)


class Writer:
    """Appends records.

    Args:
        folder: existing folder of this rank's log; old segments in it are removed unless `at` is
            given.
        at: continue there: what comes after it in an older log ends with the next append.

    Raises:
        OSError: the first segment can't be created (full, read-only).
    """

    def __init__(self, folder: Path, at: Position | None = None) -> None:
        self._folder = folder
        if at is None:
            for old in folder.glob("log.*"):
                old.unlink()
            self._number = -1
            self.crc = 0
            self._offset = self._size = 0
            self._map = self._new_segment()
        else:
            self._number, self._offset, self.crc = at.segment, at.offset, at.crc
            self._map = _map_segment(_segment_path(folder, at.segment), None)
            self._size = len(self._map)
            number = at.segment + 1
            while (old := _segment_path(folder, number)).exists():
                old.unlink()
                number += 1

    def _new_segment(self) -> mmap.mmap:
        number = self._number + 1
        size = min(LARGEST_SEGMENT, FIRST_SEGMENT << min(number, 10))
        new = _map_segment(_segment_path(self._folder, number), size)
        new[0:_SEGMENT_HEADER] = struct.pack("<4sIII", MAGIC, number, self.crc, 0)
        if number > 0:  # only now: the log may go on there
            self._store(_END_OF_SEGMENT, 0, 0, b"")
        self._number, self._offset, self._size = number, _SEGMENT_HEADER, size
        self._map = new
        return new

    def _store(self, kind: int, flags: int, site: int, payload: bytes) -> int:
        prefix = _PREFIX.pack(len(payload), kind, flags, site)
        crc = crc32(payload, crc32(prefix, self.crc))
        offset = self._offset
        end = offset + _HEAD + len(payload)
        self._map[offset:end] = prefix + crc.to_bytes(4, "little") + payload
        self.crc = crc
        self._offset = end
        return end

    def append(self, kind: int, site: int, payload: bytes) -> None:
        """Append a record.

        Raises:
            OSError: a new segment was needed and could not be reserved; nothing was appended.
        """
        while len(payload) > _MAX_PAYLOAD:
            self._reserve(_MAX_PAYLOAD)
            self._store(kind, _MORE, site, payload[:_MAX_PAYLOAD])
            payload = payload[_MAX_PAYLOAD:]
        # room for the end-of-segment record is always kept
        if self._offset + 2 * _HEAD + len(payload) > self._size:
            self._new_segment()
        self._store(kind, 0, site, payload)

    def append_open(self, kind: int, site: int, payload: bytes) -> Tail:
        """Append a record with an empty tail and return the tail."""
        self._reserve(len(payload) + TAIL_SIZE)
        offset = self._offset + _HEAD + len(payload)
        self._map[offset : offset + TAIL_SIZE] = bytes(TAIL_SIZE)  # an older log may lie here
        end = self._store(kind, _TAIL, site, payload)
        self._offset = end + TAIL_SIZE
        return Tail(self._map, end)

    def _reserve(self, size: int) -> None:
        if self._offset + 2 * _HEAD + size > self._size:
            self._new_segment()

    def position(self) -> Position:
        return Position(self._number, self._offset, self.crc)


class Reader:
    """Reads a log from its start, one record ahead.

    Raises:
        FileNotFoundError: there is no log.
        ValueError: it is of another format.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = 0
        self._map = self._open(0)
        self._crc = 0
        self._offset = _SEGMENT_HEADER
        self._ahead: Record | None = None
        self.damaged = False  # it ends in bytes that are not a record (killed while storing)
        self._here = (0, _SEGMENT_HEADER, 0)
        self.count = 0

    def _open(self, number: int) -> mmap.mmap:
        path = _segment_path(self._folder, number)
        segment = _map_segment(path, None)
        if segment[:4] != MAGIC:
            raise ValueError(f"{path} is not a host-read log of this version")
        return segment

    @property
    def here(self) -> Position:
        """After what has been taken."""
        return Position(*self._here)

    def _one(self) -> tuple[int, int, int, bytes, int | None, Tail | None] | None:
        while True:
            offset = self._offset
            segment = self._map
            begin = offset + _HEAD
            if begin > len(segment):
                return None
            length, kind, flags, site, crc = _HEADER.unpack_from(segment, offset)
            if kind == 0:
                self.damaged = self.damaged or length != 0 or crc != 0
                return None
            end = begin + length
            payload = segment[begin:end]
            if crc32(payload, crc32(segment[offset : offset + 8], self._crc)) != crc:
                self.damaged = True
                return None
            if kind == _END_OF_SEGMENT:
                if not _segment_path(self._folder, self._number + 1).exists():
                    self.damaged = True
                    return None
                self._number += 1
                self._map = self._open(self._number)
                self._offset, self._crc = _SEGMENT_HEADER, crc
                continue
            self._crc, self._offset = crc, end
            tail: int | None = None
            place: Tail | None = None
            if flags & _TAIL:
                place = Tail(segment, end)
                value, check = _tail_struct.unpack_from(segment, end)
                self._offset = end + TAIL_SIZE
                if crc32(struct.pack("<Q", value), TAIL_SEED) == check:
                    tail = value
            return kind, flags, site, payload, tail, place

    def peek(self) -> Record | None:
        """The next record, None at the end of the log."""
        if self._ahead is None:
            one = self._one()
            if one is None:
                return None
            kind, flags, site, payload, tail, place = one
            if flags & _MORE:
                parts = [payload]
                while flags & _MORE:
                    one = self._one()
                    if one is None:
                        return None
                    kind, flags, site, payload, tail, place = one
                    parts.append(payload)
                payload = b"".join(parts)
            self._ahead = Record(kind, site, payload, tail, place)
        return self._ahead

    def take(self) -> Record | None:
        """The next record, and go past it."""
        record = self._ahead or self.peek()
        if record is not None:
            self._here = (self._number, self._offset, self._crc)
            self._ahead = None
            self.count += 1
        return record
