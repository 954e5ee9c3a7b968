"""Shows what workers write into their log files, with a prefix per line, as it is written.

A worker whose output is tee'd writes into its file itself, so nothing is lost and nothing blocks
when the agent dies; the agent follows the files (inotify) and remembers in a small file how far it
came, so that its successor goes on from there. A line is shown at least once: an agent that is
killed between showing a line and noting it leaves that one line to be shown again.

A complete line is shown at once. A line without an end (a prompt, a progress bar) is shown after
``PARTIAL_DELAY``: ``print`` of an unbuffered worker writes a line in several pieces, and pieces of
several ranks must not mix.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from inotify_simple import INotify, flags

from flashrun.node import linux

PARTIAL_DELAY = 0.1  # seconds

_HOLD = 1 << 20  # bytes of a raw file that has been passed on: no more of it stays on the disk
_KEEP = 1 << 16  # bytes of those that stay, for the last lines of a failure

_OFFSET = struct.Struct("<Q")
_CHUNK = 1 << 18
# As text mode reads it (torch's TailLog does): \r, \n and \r\n each end a line.
_LINE_END = re.compile(rb"\r\n|\n|\r")


def split_lines(data: bytes) -> tuple[list[tuple[bytes, int]], bytes]:
    r"""(complete lines, each ending in ``\n``, with its length in ``data``; the rest).

    A final ``\r`` is left to the rest: it may yet become ``\r\n``.
    """
    lines = []
    at = 0
    for match in _LINE_END.finditer(data):
        if match.group() == b"\r" and match.end() == len(data):
            break
        lines.append((data[at : match.start()] + b"\n", match.end() - at))
        at = match.end()
    return lines, data[at:]


@dataclass(eq=False)
class Sink:
    """Where lines go: a descriptor, and whose unfinished line stands there at the moment.

    Attributes:
        midline: an unfinished line stands there, whosesoever.
    """

    fd: int
    owner: Tail | None = None
    midline: bool = False

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        self.midline = not data.endswith(b"\n")
        while view:
            try:
                view = view[os.write(self.fd, view) :]
            except BlockingIOError:
                # Somebody made the terminal non-blocking; wait until it takes more.
                import select

                select.select([], [self.fd], [])
            except BrokenPipeError:
                return  # nobody reads any more; training goes on


@dataclass(eq=False)
class Tail:
    """One followed file.

    Attributes:
        header: put before each line.
        keep: whether a line is shown (duplicate filters).
        offset_file: where the position is kept; "" if it need not be.
        raw: pass the bytes on as they come, no headers, no lines; the file is ours alone, and what
            has been passed on is given back to the disk.
    """

    path: str
    header: bytes
    sink: Sink
    keep: Callable[[bytes], bool]
    offset_file: str
    raw: bool = False
    offset: int = 0
    rest: bytes = b""
    shown: int = 0  # bytes of the unfinished line that are shown already
    since: float = 0.0  # when the unfinished line began to wait
    freed: int = 0  # bytes at the beginning of a raw file that are a hole
    _noted: mmap.mmap | None = None
    _fd: int = field(default=-1)

    def open(self) -> None:
        how = os.O_RDWR if self.raw else os.O_RDONLY
        self._fd = os.open(self.path, how | os.O_CREAT | os.O_CLOEXEC, 0o666)
        if self.offset_file:
            fd = os.open(self.offset_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(fd, _OFFSET.size)
                self._noted = mmap.mmap(fd, _OFFSET.size)
            finally:
                os.close(fd)
            (self.offset,) = _OFFSET.unpack_from(self._noted)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
        if self._noted is not None:
            self._noted.close()
        self._noted = None

    def advance(self, now: float) -> None:
        """Show what has been written since."""
        while data := os.pread(self._fd, _CHUNK, self.offset + len(self.rest)):
            if self.raw:
                self.sink.write(data)
                self._moved(len(data))
                if self.offset - self.freed > _HOLD:
                    self.freed = self.offset - _KEEP
                    linux.punch_hole(self._fd, self.freed)
                continue
            lines, rest = split_lines(self.rest + data)
            if lines or not self.rest:
                self.since = now
            self.rest = rest
            for line, length in lines:
                self._show(line)
                self._moved(length)

    def _moved(self, by: int) -> None:
        self.offset += by
        if self._noted is not None:  # memory outlives the agent as a file does, without a call
            _OFFSET.pack_into(self._noted, 0, self.offset)

    def _show(self, line: bytes) -> None:
        if not self.keep(line):
            self.shown = 0
            return
        if self.sink.owner is self and self.shown:
            self.sink.write(line[self.shown :])
        else:
            self._begin()
            self.sink.write(self.header + line)
        self.sink.owner = None
        self.shown = 0

    def _begin(self) -> None:
        if self.sink.owner is not None:  # another rank's unfinished line stands there
            self.sink.write(b"\n")
            self.sink.owner = None

    def show_partial(self, now: float) -> None:
        """Show an unfinished line that has waited long enough."""
        text = self.rest.removesuffix(b"\r")
        if len(text) <= self.shown or now - self.since < PARTIAL_DELAY or not self.keep(text):
            return
        if self.sink.owner is self and self.shown:
            self.sink.write(text[self.shown :])
        else:
            self._begin()
            self.sink.write(self.header + text)
        self.sink.owner = self
        self.shown = len(text)

    def finish(self, now: float) -> None:
        """Show everything: the writer has ended."""
        self.advance(now)
        if self.rest:
            rest, self.rest = self.rest, b""
            ended = rest.endswith(b"\r")
            if ended or len(rest) > self.shown:
                self._show(rest.removesuffix(b"\r") + (b"\n" if ended else b""))
                if not ended and self.keep(rest):
                    self.sink.owner = self
            self._moved(len(rest))


class LogTee:
    """Follows any number of files; owned by the agent's loop.

    Attributes:
        out, err: the launcher's own standard output and error.

    Use: register ``fileno()`` for reading and call :meth:`on_readable`; call :meth:`tick` after at
    most :meth:`timeout` seconds.
    """

    def __init__(self) -> None:
        self.out, self.err = Sink(1), Sink(2)
        one_place = os.path.samestat(os.fstat(1), os.fstat(2))
        self._shown = (self.out, self.err) if one_place else (self.err,)
        self._inotify = INotify()
        self._tails: dict[int, list[Tail]] = {}

    def fileno(self) -> int:
        return int(self._inotify.fileno())

    def follow(self, tails: Sequence[Tail]) -> None:
        """Start following; what is in the files beyond the remembered position is shown now."""
        for tail in tails:
            tail.open()
            # The same file may be followed twice (console and filtered copy): one watch each file.
            watch = self._inotify.add_watch(tail.path, flags.MODIFY)
            self._tails.setdefault(watch, []).append(tail)
            tail.advance(time.monotonic())

    def end_line(self) -> str:
        """What a line of somebody else's on standard error has to begin with. A rank's line that it
        interrupts is shown whole when it is complete, as after one of another rank."""
        midline = any(sink.midline for sink in self._shown)
        for sink in self._shown:
            sink.owner, sink.midline = None, False
        return "\n" if midline else ""

    def on_readable(self) -> None:
        now = time.monotonic()
        events = self._inotify.read(timeout=0)
        if any(event.mask & flags.Q_OVERFLOW for event in events):
            changed = set(self._tails)  # the kernel dropped some: look at every file
        else:
            changed = {event.wd for event in events}
        for watch in changed:
            for tail in self._tails.get(watch, ()):
                tail.advance(now)

    def timeout(self) -> float | None:
        """Seconds until :meth:`tick` has something to do; None: nothing waits."""
        waiting = [
            tail.since + PARTIAL_DELAY
            for tails in self._tails.values()
            for tail in tails
            if len(tail.rest) > tail.shown
        ]
        return max(0.0, min(waiting) - time.monotonic()) if waiting else None

    def tick(self) -> None:
        now = time.monotonic()
        for tails in self._tails.values():
            for tail in tails:
                tail.show_partial(now)

    def finish(self) -> None:
        """Show the rest of every file and stop following."""
        now = time.monotonic()
        for watch, tails in self._tails.items():
            for tail in tails:
                tail.finish(now)
                tail.close()
            try:
                self._inotify.rm_watch(watch)
            except OSError:
                continue  # the file has been deleted; the watch went with it
        self._tails.clear()

    def close(self) -> None:
        self.finish()
        self._inotify.close()
