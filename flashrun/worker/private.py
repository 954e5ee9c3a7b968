"""State that each rank has for itself, kept where it outlives the process.

Running statistics of a BatchNorm follow the rank's own batches, so no peer has them. They are
small: each rank writes its modules' buffers to a file of the run folder (shared memory) whenever it
issues a collective after they have changed, and at each boundary. Survivors can't reach boundary b
+ 1 without this rank's gradients of interval b, so when they have, what it held then has been
written.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

import torch

from flashrun.worker.checksum import checksum_of
from flashrun.worker.replay import memory

_HEADER = struct.Struct("<QQQ")  # boundary + 1, length, checksum
_SLOTS = 4
PER_RANK = ("private", "own", "hooks", "unchanged")  # `NAME.RANK` in the run folder
LARGEST = 4 << 20  # bytes per boundary


class Private:
    """The file of one rank. Where it can't be written (no room), there is none, and nothing is
    found in it later."""

    def __init__(self, folder: Path, rank: int, fresh: bool, name: str = "private") -> None:
        """
        Args:
            fresh: this is the first process of the rank, so what there is was left by an earlier
                round of the job.
        """
        self._path = folder / f"{name}.{rank}"
        if fresh:
            self._path.unlink(missing_ok=True)
        self._map: mmap.mmap | None = None
        self._length = -1
        self._versions: tuple[int, ...] = ()

    def keep(self, boundary: int, tensors: list[torch.Tensor]) -> None:
        """Write what `tensors` hold, for `boundary`; does nothing where they have not changed since
        the last call for it."""
        versions = (boundary, *[t._version for t in tensors])
        if versions == self._versions:
            return
        self._versions = versions
        self.write(boundary, b"".join([memory.content(t.detach().cpu()) for t in tensors]))

    def write(self, boundary: int, payload: bytes | memoryview) -> None:
        """Write bytes for `boundary`."""
        if len(payload) > LARGEST:
            return
        if self._length != len(payload):
            self._open(len(payload))
        if self._map is None:
            return
        at = (boundary % _SLOTS) * (_HEADER.size + self._length)
        self._map[at : at + 8] = bytes(8)  # not valid while it is written
        self._map[at + _HEADER.size : at + _HEADER.size + len(payload)] = payload
        header = _HEADER.pack(boundary + 1, len(payload), checksum_of(memoryview(payload)))
        self._map[at : at + _HEADER.size] = header

    def _open(self, length: int) -> None:
        self._length = length
        self._map = None
        size = (_HEADER.size + length) * _SLOTS
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(fd).st_size != size:  # else: the records of the incarnation before stay
                os.ftruncate(fd, 0)
            os.posix_fallocate(fd, 0, size)
            self._map = mmap.mmap(fd, size)
        except OSError:
            os.ftruncate(fd, 0)  # no room: better none than a half
        finally:
            os.close(fd)

    def restore(self, boundary: int, tensors: list[torch.Tensor]) -> bool:
        """Fill `tensors` with what the rank held at `boundary`; False: it is not there."""
        payload = self.read(boundary)
        if payload is None or len(payload) != sum(t.numel() * t.element_size() for t in tensors):
            return False
        at = 0
        with torch.no_grad():
            for tensor in tensors:
                size = tensor.numel() * tensor.element_size()
                if size:
                    part = torch.frombuffer(bytearray(payload[at : at + size]), dtype=tensor.dtype)
                    tensor.detach().copy_(part.reshape(tensor.shape))
                at += size
        return True

    def read(self, boundary: int) -> bytes | None:
        """What was written for `boundary`; None: nothing, or not all of it."""
        try:
            raw = self._path.read_bytes()
        except FileNotFoundError:
            return None
        slot = len(raw) // _SLOTS
        if slot < _HEADER.size:
            return None
        at = (boundary % _SLOTS) * slot
        stored, length, checksum = _HEADER.unpack_from(raw, at)
        payload = raw[at + _HEADER.size : at + slot]
        if stored != boundary + 1 or length != len(payload):
            return None
        return payload if checksum_of(memoryview(payload)) == checksum else None
