"""The last lines a worker wrote to ``sys.stderr``, kept where they outlive it.

On a terminal, and where it shares its place with standard output, a worker's standard error goes
straight there, as under torchrun (see `worker_group.relays_stderr`). So that the report of a
failure can show the last lines of the rank that failed first, without ``@record`` and with nothing
in between, the raw layer of ``sys.stderr`` notes what passes in a small shared file. What other
than Python's code writes is not noted; it stands right above the report.
"""

from __future__ import annotations

import io
import mmap
import os
import struct
import sys
from typing import Any

_RING_BYTES = 16 << 10
_HEADER = struct.Struct("<Q")  # bytes written since the beginning
_FILE_BYTES = _HEADER.size + _RING_BYTES


class FileIO(io.FileIO):
    """A raw file that notes its last bytes; named like its base, which scripts may print."""

    _ring: mmap.mmap
    _written = 0

    def write(self, data: Any, /) -> int:
        count = super().write(data)
        if count:
            self._note(bytes(memoryview(data).cast("B")[:count]))
        return count

    def _note(self, data: bytes) -> None:
        kept = data[-_RING_BYTES:]
        start = (self._written + len(data) - len(kept)) % _RING_BYTES
        first = kept[: _RING_BYTES - start]
        at = _HEADER.size + start
        self._ring[at : at + len(first)] = first
        rest = kept[len(first) :]
        self._ring[_HEADER.size : _HEADER.size + len(rest)] = rest
        self._written += len(data)
        _HEADER.pack_into(self._ring, 0, self._written)


def install(path: str) -> None:
    """Replace ``sys.stderr`` by one that is alike but noted in the file ``path``.

    Raises:
        OSError: ``path`` cannot be made.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, _FILE_BYTES)
        ring = mmap.mmap(fd, _FILE_BYTES)
    finally:
        os.close(fd)
    raw = FileIO(2, "wb", closefd=False)
    raw._ring = ring
    raw.name = "<stderr>"
    old = sys.stderr
    stream = io.TextIOWrapper(
        raw,  # unbuffered, as -u makes it
        encoding=old.encoding,
        errors=old.errors,
        newline="\n",
        line_buffering=bool(old.line_buffering),
        write_through=True,
    )
    stream.mode = "w"  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = stream  # type: ignore[misc]


def read(path: str) -> str:
    """What the worker of ``path`` wrote last, at most 16 KiB; empty if there is nothing."""
    try:
        with open(path, "rb") as file:
            data = file.read(_FILE_BYTES)
    except FileNotFoundError:
        return ""
    if len(data) < _FILE_BYTES:
        return ""
    (written,) = _HEADER.unpack_from(data)
    ring = data[_HEADER.size :]
    at = written % _RING_BYTES
    text = ring[:written] if written <= _RING_BYTES else ring[at:] + ring[:at]
    return text.decode(errors="replace")


def last_lines(text: str, count: int) -> list[str]:
    """The last ``count`` lines of ``text`` that a person would want to see; of one that was written
    over and over (a progress bar) what it showed last."""
    shown = []
    for line in text.split("\n"):
        frames = [frame.rstrip() for frame in line.split("\r") if frame.strip()]
        shown += frames[-1:]
    return shown[-count:]
