"""Follows files that a worker writes through a mapping: what is new in them since the last look.

Read with ``pread``: a mapping of a file that its writer cuts would end this process. Each file has
marks by which half-written content is known (a checksum chain, or headers that are written last),
and whatever is not whole yet is left for the next look.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flashrun.worker.replay import journal, randomness, recent

_FIRST_LOOK = 4 << 10
_LOOK = 256 << 10  # more than one record


@dataclass(frozen=True)
class Patch:
    """A piece of a file.

    Attributes:
        path: in the folder of the job on this node.
        size: of the whole file, as its writer has made it.
    """

    path: str
    size: int
    offset: int
    content: bytes = field(repr=False)


class _File:
    """A file that may not be there yet, and may be another one under the same name later."""

    def __init__(self, root: Path, path: str) -> None:
        self.path = path
        self._where = root / path
        self._fd = -1
        self._known: tuple[int, int] = (0, 0)
        self.size = 0

    def look(self) -> bool | None:
        """None: it is not there. True: it is another one, or has another size, than at last."""
        try:
            status = os.stat(self._where)
        except FileNotFoundError:
            self.close()
            return None
        known = status.st_ino, status.st_size
        if known == self._known and self._fd >= 0:
            return False
        self.close()
        try:
            self._fd = os.open(self._where, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        self._known, self.size = known, status.st_size
        return True

    def read(self, length: int, offset: int) -> bytes:
        return os.pread(self._fd, length, offset)

    def patch(self, offset: int, content: bytes) -> Patch:
        return Patch(self.path, self.size, offset, content)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._known = -1, (0, 0)


class Slots:
    """A file of numbered slots, each with a header whose first word tells that it is valid.

    Args:
        slots: how many.
        header: number + 1, length of the content, checksum.
        check: whether the content is whole.
    """

    def __init__(
        self, root: Path, path: str, slots: int, header: struct.Struct,
        check: Callable[[int, bytes, int], bool],
    ) -> None:  # fmt: skip
        self._file = _File(root, path)
        self._slots = slots
        self._header = header
        self._check = check
        self._sent: dict[int, bytes] = {}

    def more(self) -> Iterator[Patch]:
        file, header = self._file, self._header
        look = file.look()
        if look is None:
            return
        if look:
            self._sent.clear()
        slot = file.size // self._slots
        for i in range(self._slots):
            at = i * slot
            head = file.read(header.size, at)
            if len(head) < header.size or head == self._sent.get(i):
                continue
            stored, length, checksum = header.unpack(head)
            if not stored or length > slot - header.size:
                continue
            content = file.read(length, at + header.size)
            if file.read(header.size, at) == head and self._check(stored - 1, content, checksum):
                self._sent[i] = head
                yield file.patch(at, head + content)

    def shape(self) -> Iterator[Patch]:
        """What makes an empty file of its size."""
        if self._file.look() is not None:
            yield self._file.patch(0, b"")

    def one(self, number: int) -> Patch | None:
        """The slot of a number, if it is there."""
        file, header = self._file, self._header
        if file.look() is None:
            return None
        at = number % self._slots * (file.size // self._slots)
        head = file.read(header.size, at)
        stored, length, checksum = header.unpack(head)
        content = file.read(length, at + header.size)
        whole = stored == number + 1 and self._check(number, content, checksum)
        return file.patch(at, head + content) if whole else None

    def close(self) -> None:
        self._file.close()


def numbered(root: Path, path: str, slots: int) -> Slots:
    """A :class:`flashrun.worker.replay.randomness.SlotFile`."""
    return Slots(root, path, slots, randomness._SLOT_HEADER, randomness.is_whole)


class Outputs:
    """A ring of outputs (:mod:`flashrun.worker.replay.recent`): the index is read first, then the
    contents, and the head, which tells what was overwritten meanwhile, last."""

    _MOST = 1 << 20  # bytes at once: older ones are of no use to a replacement

    def __init__(self, root: Path, path: str) -> None:
        self._file = _File(root, path)
        self._index = b""

    def more(self) -> Iterator[Patch]:
        file = self._file
        look = file.look()
        if look is None:
            return
        length = recent._ENTRIES * recent._SLOT
        if look:
            self._index = bytes(length)
            yield file.patch(0, b"")
        index = file.read(length, recent._INDEX)
        if index == self._index or len(index) < length:
            return
        shape = recent._ENTRIES, recent._SLOT
        rows = [np.frombuffer(i, np.uint8).reshape(shape) for i in (index, self._index)]
        changed = np.flatnonzero((rows[0] != rows[1]).any(axis=1))
        entries = []
        for row in map(int, changed):
            raw = index[row * recent._SLOT : (row + 1) * recent._SLOT]
            entry, check = raw[: recent._ENTRY.size], recent._CHECK.unpack(raw[-4:])[0]
            if zlib.crc32(entry) == check:
                _, begin, _, size = recent._ENTRY.unpack(entry)
                entries.append((begin, size, row, raw))
        room = self._MOST
        for begin, size, row, raw in sorted(entries, reverse=True):
            room -= size
            if room < 0:
                break
            at = recent._DATA + begin % recent.SIZE
            yield file.patch(at, file.read(size, at))
            yield file.patch(recent._INDEX + row * recent._SLOT, raw)
        yield file.patch(0, file.read(recent._HEADER.size, 0))
        self._index = index

    def close(self) -> None:
        self._file.close()


class Log:
    """A journal (:mod:`flashrun.worker.replay.journal`).

    Attributes:
        unfound: a tail says that the state itself is in the log of states.
    """

    def __init__(self, root: Path, folder: str) -> None:
        self._root = root
        self._folder = folder
        self._number = 0
        self._offset = 0
        self._crc = 0
        self._file = self._segment()
        self._tails: list[list[Any]] = []  # file, offset, number, whether its state was given
        self.unfound = False

    def _segment(self) -> _File:
        return _File(self._root, f"{self._folder}/log.{self._number:04d}")

    def more(self) -> Iterator[Patch]:
        """What was appended, in pieces of up to 256 KB."""
        look = _FIRST_LOOK
        while self._file.look() is not None:
            chunk = self._file.read(look, self._offset)
            end, following = self._parse(chunk)
            if end:
                yield self._file.patch(self._offset, chunk[:end])
                self._offset += end
            if following:
                if not any(tail[0] is self._file for tail in self._tails):
                    self._file.close()
                self._number, self._offset = self._number + 1, 0
                self._file = self._segment()
                look = _FIRST_LOOK
                continue
            rest = chunk[end : end + journal._HEAD]
            if rest == bytes(journal._HEAD) or (look == _LOOK and not end):
                return
            look = _LOOK

    def _parse(self, chunk: bytes) -> tuple[int, bool]:
        """How far the records in it are whole, and whether another segment follows."""
        at = 0
        if not self._offset:
            if chunk[:4] != journal.MAGIC:
                return 0, False
            at = journal._SEGMENT_HEADER
        head = journal._HEAD
        crc = self._crc
        while at + head <= len(chunk):
            length, kind, flags, _, check = journal._HEADER.unpack_from(chunk, at)
            end = at + head + length
            if kind == 0 or end + journal.TAIL_SIZE * bool(flags & journal._TAIL) > len(chunk):
                break
            payload = chunk[at + head : end]
            if zlib.crc32(payload, zlib.crc32(chunk[at : at + 8], crc)) != check:
                break
            crc = check
            if kind == journal._END_OF_SEGMENT:
                self._crc = crc
                return end, True
            at = end
            if flags & journal._TAIL:
                number = randomness._COUNT.unpack_from(payload, randomness._REGION.size)[0]
                self._tails.append([self._file, self._offset + at, number, False])
                at += journal.TAIL_SIZE
        self._crc = crc
        return at, False

    def tails(self, pending: Slots) -> Iterator[Patch]:
        """Those that were filled in since; for the others, what stands for them."""
        left = []
        for tail in self._tails:
            file, offset, number, given = tail
            raw = file.read(journal.TAIL_SIZE, offset)
            value, check = journal._tail_struct.unpack(raw)
            if zlib.crc32(raw[:8], journal.TAIL_SEED) == check:
                self.unfound = self.unfound or value == randomness._UNFOUND
                yield file.patch(offset, raw)
                continue
            left.append(tail)
            state = None if given else pending.one(number)
            if state is not None:
                tail[3] = True
                yield state
        self._tails = left

    def close(self) -> None:
        self._file.close()
        for tail in self._tails:
            tail[0].close()


class Whole:
    """A small file that is taken whole whenever it has changed."""

    def __init__(self, root: Path, path: str) -> None:
        self._file = _File(root, path)

    def more(self) -> Iterator[Patch]:
        if self._file.look():
            yield self._file.patch(0, self._file.read(self._file.size, 0))

    def close(self) -> None:
        self._file.close()

