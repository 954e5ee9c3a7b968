"""The outputs of the last forwards, kept where they outlive the process.

A script may use an output after the step that it led to (``correct += (out.argmax(1) == y).sum()``
after ``optimizer.step()``). Nobody can compute it again: its weights are gone. So each rank copies
the small outputs of its outermost forwards into a ring in shared memory, and a replay gives them
out again, so that everything derived from them is real.

Stores are made in an order in which a SIGKILL leaves nothing half-written that looks whole: the
ring's head first, then the content, then the entry that names it.
"""

from __future__ import annotations

import marshal
import mmap
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import torch

from flashrun.worker.replay import memory

LARGEST = 256 << 10  # bytes of one forward: 25 µs to copy, 1000 classes for a batch of 64
SIZE = 4 << 20  # bytes of the ring
_ENTRIES = 4096
_MAGIC = 0x31544F52  # "ROT1"
_HEADER = struct.Struct("<QQ")  # magic, head
_ENTRY = struct.Struct("<QQII")  # ordinal + 1, begin, length of the description, of all
_CHECK = struct.Struct("<I")
_SLOT = _ENTRY.size + _CHECK.size
_INDEX = 64
_DATA = _INDEX + _ENTRIES * _SLOT


def leaves(output: Any) -> list[torch.Tensor]:
    """The tensors of an output that are kept, in order."""
    kind = type(output)
    if kind is torch.Tensor:
        return [output] if output.is_cpu and output.layout is torch.strided else []
    members: Any = ()
    if isinstance(output, (tuple, list)):
        members = output
    elif isinstance(output, dict):
        members = output.values()
    return [leaf for member in members for leaf in leaves(member)]


class Recent:
    """The ring of one rank.

    Args:
        folder: of this rank's log.
        create: a new ring, or that of the incarnation before.

    Raises:
        OSError: it can't be created, or is missing.
        ValueError: it is another version's.
    """

    def __init__(self, folder: Path, create: bool) -> None:
        size = _DATA + SIZE
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_TRUNC if create else 0)
        path = folder / "outputs"
        fd = os.open(path, flags, 0o600)
        try:
            if create:
                os.posix_fallocate(fd, 0, size)
            elif os.fstat(fd).st_size != size:
                raise ValueError(f"{path} has another size than this version writes")
            self._map = mmap.mmap(fd, size, mmap.MAP_SHARED)
        finally:
            os.close(fd)
        self._head = 0
        if not create:
            magic, self._head = _HEADER.unpack_from(self._map, 0)
            if magic not in (0, _MAGIC):
                raise ValueError(f"{path} is not a ring of outputs of this version")
        self._found: dict[int, tuple[int, int, int]] | None = None
        self._described: tuple[Any, bytes] = None, b""

    def keep(self, ordinal: int, output: Any) -> None:
        """Keep an output, where it is small."""
        tensors = leaves(output)
        sizes = [t.numel() * t.element_size() for t in tensors]
        if not sizes or sum(sizes) > LARGEST:
            return
        description = self._describe(tensors, sizes)
        length = len(description) + sum(sizes)
        begin = self._head
        if begin % SIZE + length > SIZE:
            begin += SIZE - begin % SIZE
        self._head = begin + length
        _HEADER.pack_into(self._map, 0, _MAGIC, self._head)
        at = _DATA + begin % SIZE
        self._map[at : at + length] = b"".join([description, *map(memory.content, tensors)])
        entry = _ENTRY.pack(ordinal + 1, begin, len(description), length)
        slot = _INDEX + ordinal % _ENTRIES * _SLOT
        self._map[slot : slot + _SLOT] = entry + _CHECK.pack(zlib.crc32(entry))

    def _describe(self, tensors: list[torch.Tensor], sizes: list[int]) -> bytes:
        """Types, shapes and sizes; most outputs look like the one before."""
        looks = [(t.dtype, t.shape) for t in tensors]
        if looks != self._described[0]:
            described = [
                (str(dtype)[6:], tuple(shape), size)
                for (dtype, shape), size in zip(looks, sizes, strict=True)
            ]
            self._described = looks, marshal.dumps(described)
        return self._described[1]

    def _entries(self) -> dict[int, tuple[int, int, int]]:
        found = {}
        for i in range(_ENTRIES):
            at = _INDEX + i * _SLOT
            entry = self._map[at : at + _ENTRY.size]
            ordinal, begin, description, length = _ENTRY.unpack(entry)
            if (
                ordinal
                and _CHECK.unpack_from(self._map, at + _ENTRY.size)[0] == zlib.crc32(entry)
                and self._head - SIZE <= begin
                and begin + length <= self._head
            ):
                found[ordinal - 1] = begin, description, length
        return found

    def get(self, ordinal: int) -> list[torch.Tensor] | None:
        """What the dead worker's forward gave; None: it is not kept."""
        if self._found is None:
            self._found = self._entries()
        place = self._found.get(ordinal)
        if place is None:
            return None
        begin, description, length = place
        at = _DATA + begin % SIZE
        content = self._map[at : at + length]
        at = description
        given = []
        for dtype, shape, size in marshal.loads(content[:description]):
            kind = getattr(torch, dtype)
            if size:
                part = torch.frombuffer(bytearray(content[at : at + size]), dtype=kind)
            else:
                part = torch.empty(0, dtype=kind)
            given.append(part.reshape(shape))
            at += size
        return given
