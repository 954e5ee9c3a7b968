"""What a skipped region drew, so that random states are right at every point of the replay.

Live: the generators are compared at both ends of every region. What was drawn goes to the log:
the number of draws where it is known at once, otherwise an open record whose number a thread finds
off the critical path (`mersenne.DrawCounter`); until it has, the state itself is in a ring beside
the log. Replay: the same numbers are drawn and dropped. A record that the dead process left open is
settled: nobody would count it any more, and its place in the ring is needed again.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import zlib
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from flashrun.worker.replay import kinds, mersenne
from flashrun.worker.replay.api import Divergence
from flashrun.worker.replay.journal import Reader, Record, Tail, Writer

_DRAWN = frozenset({kinds.DRAWS, kinds.DRAWS_OPEN, kinds.STATE})
_REGION = struct.Struct("<QB")  # ordinal of the region, generator
_STATE = struct.Struct("<BI")  # generator, length of its state
_COUNT = struct.Struct("<Q")
_RING_SLOT = 4096
_RING_SLOTS = 1024
_MOST_PENDING = 512
_FEW_TWISTS = 8  # up to here the draws are counted at once (3 µs a twist)
_PAUSE = 0.25  # s between the rounds of the counting thread, so that it seldom wants the GIL
_BOUNDARY_SLOT = 16384
_BOUNDARY_SLOTS = 8
_SLOT_HEADER = struct.Struct("<QII")  # number, length, checksum
_UNFOUND = 1 << 62  # the count is not one: the state is in the log of states


def _check(number: int, crc: int) -> int:
    """Of a whole slot, so that a header with another slot's payload is found out."""
    return crc ^ (number * 0x9E3779B1 & 0xFFFFFFFF)


def is_whole(number: int, payload: bytes, check: int) -> bool:
    """Whether a slot's content is what its header says."""
    return _check(number, zlib.crc32(payload)) == check


class SlotFile:
    """A ring of numbered slots in a file that outlives the process."""

    def __init__(self, path: Path, slot: int, slots: int, create: bool) -> None:
        self._slot, self._slots = slot, slots
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_TRUNC if create else 0)
        fd = os.open(path, flags, 0o600)
        try:
            if create:
                os.posix_fallocate(fd, 0, slot * slots)
            elif os.fstat(fd).st_size != slot * slots:
                raise ValueError(f"{path} has another size than this version writes")
            self._map = mmap.mmap(fd, slot * slots, mmap.MAP_SHARED)
        finally:
            os.close(fd)

    def put(self, number: int, payload: bytes, crc: int | None = None) -> None:
        """Write slot `number`.

        Args:
            crc: of `payload`, where the caller has it.
        """
        at = (number % self._slots) * self._slot
        if len(payload) > self._slot - _SLOT_HEADER.size:
            raise ValueError(f"a state of {len(payload)} bytes does not fit a slot")
        check = _check(number, zlib.crc32(payload) if crc is None else crc)
        header = _SLOT_HEADER.pack(number + 1, len(payload), check)
        self._map[at : at + len(header) + len(payload)] = header + payload

    def get(self, number: int) -> bytes | None:
        at = (number % self._slots) * self._slot
        stored, length, crc = _SLOT_HEADER.unpack_from(self._map, at)
        if stored != number + 1 or length > self._slot:
            return None
        payload = self._map[at + _SLOT_HEADER.size : at + _SLOT_HEADER.size + length]
        return payload if is_whole(number, payload, crc) else None

    def numbers(self) -> list[int]:
        stored = [
            int(_SLOT_HEADER.unpack_from(self._map, i * self._slot)[0]) - 1
            for i in range(self._slots)
        ]
        return sorted(n for n in stored if n >= 0 and self.get(n) is not None)

    def drop_after(self, number: int) -> None:
        for n in self.numbers():
            if n > number:
                at = (n % self._slots) * self._slot
                self._map[at : at + _SLOT_HEADER.size] = bytes(_SLOT_HEADER.size)


def _goes_on(folder: Path) -> Writer:
    """The log of states, after what dead processes have written to it.

    Raises:
        OSError: there is none, and no room for one.
    """
    try:
        reader = Reader(folder)
    except (FileNotFoundError, ValueError):  # ValueError: it had just been created
        return Writer(folder)
    while reader.take() is not None:
        pass
    return Writer(folder, reader.here)


class Philox:
    """A CUDA generator: seed and offset say everything, and both are on the host."""

    name = "cuda"

    def __init__(self, ident: int, generator: torch.Generator) -> None:
        self.ident = ident
        self._generator = generator
        self.looks: list[memoryview] = []
        self.calls = (generator.initial_seed, generator.get_offset)

    def fingerprint(self) -> tuple[Any, ...]:
        return tuple(call() for call in self.calls)

    def capture(self) -> bytes:
        return struct.pack("<QQ", self._generator.initial_seed(), self._generator.get_offset())

    def restore(self, state: bytes) -> None:
        seed, offset = struct.unpack("<QQ", state)
        self._generator.manual_seed(seed)
        self._generator.set_offset(offset)


class Sink(Protocol):
    """Where records go."""

    def append(self, kind: int, site: int, payload: bytes) -> None: ...


Generator = mersenne.Twister | Philox
_FIRST_CUDA = 16


class Randomness:
    """The generators of this process and what is known of them.

    Args:
        folder: this rank's folder, see `SlotFile` and `Writer`.
        create: begin new files (first incarnation), or open those of the dead one.

    Raises:
        mersenne.LayoutError: the generators can't be seen in place.
        OSError: files can't be created, or are missing.
    """

    def __init__(self, folder: Path, create: bool) -> None:
        self.generators: list[Generator] = list(mersenne.script_twisters())
        self._by_ident: dict[int, Generator] = {g.ident: g for g in self.generators}
        self._folder = folder
        self._ring = SlotFile(folder / "pending", _RING_SLOT, _RING_SLOTS, create)
        self._boundaries = SlotFile(
            folder / "boundaries", _BOUNDARY_SLOT, _BOUNDARY_SLOTS, create
        )
        self._looks: list[memoryview] = []
        self._calls: list[Callable[[], Any]] = []
        self._marks: list[tuple[Any, ...]] = []
        self._states: list[bytes] = []
        for generator in self.generators:
            self._watch(generator)
        self._seen = self._look()
        self._sequence = 0
        self._queue: deque[tuple[int, bytes, bytes, Tail]] = deque()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._found: dict[int, bytes] | None = None
        self._settled: Writer | None = None  # the log of states
        self._first = create
        (folder / "states").mkdir(exist_ok=True)

    def note_cuda(self) -> None:
        """Add the CUDA generators once CUDA is in use (looking must not initialise it)."""
        if _FIRST_CUDA not in self._by_ident and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            for index, generator in enumerate(torch.cuda.default_generators):
                self._add(Philox(_FIRST_CUDA + index, generator))

    def _add(self, generator: Generator) -> None:
        self.generators.append(generator)
        self._by_ident[generator.ident] = generator
        self._watch(generator)
        self._seen = b"", []  # look at each

    def _watch(self, generator: Generator) -> None:
        self._looks += generator.looks
        self._calls += generator.calls
        self._marks.append(generator.fingerprint())
        self._states.append(generator.capture())

    def _look(self) -> tuple[bytes, list[Any]]:
        return b"".join(self._looks), [call() for call in self._calls]

    def moved(self) -> bool:
        """Whether any generator has moved since the last comparison. Mostly none has."""
        memory, values = self._seen
        if b"".join(self._looks) != memory:
            return True
        for call, value in zip(self._calls, values, strict=True):  # noqa: SIM110  # a frame less
            if call() != value:
                return True
        return False

    def _moves(self) -> list[tuple[Generator, bytes, bytes]]:
        """The generators that have moved since the last comparison, with what they were then and
        what they are now, which is what the next one compares with."""
        self._seen = self._look()
        found = []
        for i, generator in enumerate(self.generators):
            mark = generator.fingerprint()
            if mark != self._marks[i]:
                self._marks[i] = mark
                before, self._states[i] = self._states[i], generator.capture()
                found.append((generator, before, self._states[i]))
        return found

    # --- live

    def begin(self) -> None:
        """A region begins: what the script itself drew before is the script's own."""
        if self.moved():
            self._moves()

    def end(self, ordinal: int, writer: Writer) -> None:
        """The region ended: log what it drew."""
        for generator, before, after in self._moves():
            self._write(writer, ordinal, generator, before, after)

    def _write(
        self, writer: Writer, ordinal: int, generator: Generator, before: bytes, after: bytes
    ) -> None:
        place = _REGION.pack(ordinal, generator.ident)
        state = mersenne.STATE
        seeded = isinstance(generator, Philox) or (
            isinstance(generator, mersenne.TorchTwister)
            and before[state : state + 8] != after[state : state + 8]
        )
        extra = b"" if before[state:] == after[state:] else b"e" + after[state:]
        if seeded:
            writer.append(kinds.STATE, 0, place + after)
            return
        if before[4:12] == after[4:12]:
            drawn = int.from_bytes(after[:4], "little") - int.from_bytes(before[:4], "little")
            if drawn >= 0:
                writer.append(kinds.DRAWS, 0, place + _COUNT.pack(drawn) + extra)
                return
        few = mersenne.count_few(before, after, _FEW_TWISTS)
        if few is not None:
            writer.append(kinds.DRAWS, 0, place + _COUNT.pack(few) + extra)
            return
        if len(self._queue) >= _MOST_PENDING:  # the thread lags: pay in bytes, not in time
            writer.append(kinds.STATE, 0, place + after)
            return
        number = self._sequence
        self._sequence += 1
        self._ring.put(number, after)
        tail = writer.append_open(kinds.DRAWS_OPEN, 0, place + _COUNT.pack(number) + extra)
        self._queue.append((number, before, after, tail))
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._count_draws, name="flashrun-draws", daemon=True
            )
            self._thread.start()

    def _count_draws(self) -> None:
        counter = mersenne.DrawCounter()
        while not self._stop.is_set():
            if not self._queue:
                self._stop.wait(_PAUSE)
                continue
            number, before, after, tail = self._queue.popleft()
            drawn = counter.count(before, after)
            if drawn is not None:
                tail.fill(drawn)
                continue
            self._settle(number, after, tail)

    def _settle(self, number: int, state: bytes, tail: Tail) -> None:
        """The state takes the place of the number of draws, for good. (Live: in the thread.)"""
        try:
            if self._settled is None:
                folder = self._folder / "states"
                self._settled = Writer(folder) if self._first else _goes_on(folder)
            self._settled.append(kinds.STATE, 0, _COUNT.pack(number) + state)
        except OSError:
            return  # no room: the ring has it for a while
        tail.fill(_UNFOUND)

    def stop(self) -> None:
        """Wait for the counting thread to end, before the interpreter does. That ends any thread
        which asks for the GIL from then on, and where torch asks for it, in a C++ destructor, this
        terminates the process (pybind11's ``gil_scoped_release``; Python before 3.14)."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def end_past(self, ordinal: int, sink: Sink, known: set[int]) -> None:
        """The same past the end of a dead worker's log, which has the generators `known`."""
        for generator, _, after in self._moves():
            if generator.ident not in known:
                sink.append(kinds.STATE, 0, _REGION.pack(ordinal, generator.ident) + after)

    def keep(self, b: int, whole: bytes, crc: int | None = None) -> None:
        """Keep the states of all generators at boundary `b` (and `crc`, their checksum)."""
        self._boundaries.put(b, whole, crc)

    def whole(self) -> bytes:
        """The states of all generators."""
        return self._joined([generator.capture() for generator in self.generators])

    def whole_between(self) -> bytes:
        """The same between two regions of a live script, at less cost: captures what has moved."""
        self.begin()
        return self._joined(self._states)

    def _joined(self, states: list[bytes]) -> bytes:
        parts: list[bytes] = []
        for generator, state in zip(self.generators, states, strict=True):
            parts += (_STATE.pack(generator.ident, len(state)), state)
        return b"".join(parts)

    def restore_whole(self, whole: bytes) -> None:
        """Set the generators to what `whole` returned."""
        at = 0
        while at < len(whole):
            ident, length = _STATE.unpack_from(whole, at)
            at += _STATE.size
            self._get(ident).restore(whole[at : at + length])
            at += length

    def capture_one(self, ident: int) -> bytes:
        return self._get(ident).capture()

    def rebase(self) -> None:
        """Take the present states as the base of the next comparison."""
        self._seen = self._look()
        for i, generator in enumerate(self.generators):
            self._marks[i] = generator.fingerprint()
            self._states[i] = generator.capture()

    # --- replay

    def boundary_state(self, b: int) -> bytes | None:
        return self._boundaries.get(b)

    def newest_boundary(self) -> int:
        numbers = self._boundaries.numbers()
        return numbers[-1] if numbers else 0

    def take(self, ordinal: int, reader: Reader) -> list[Record]:
        """The records of region `ordinal` that come next in the log."""
        taken: list[Record] = []
        while True:
            record = reader.peek()
            if record is None or record.kind not in _DRAWN:
                return taken
            theirs = _REGION.unpack_from(record.payload)[0]
            if theirs > ordinal:
                return taken
            if theirs < ordinal:
                raise Divergence(
                    f"region {ordinal} of the replay, but the log has draws of region "
                    f"{theirs}"
                )
            reader.take()
            taken.append(self._closed(record))

    def _closed(self, record: Record) -> Record:
        """The same; one that was left open is settled."""
        if record.kind != kinds.DRAWS_OPEN or record.tail is not None or record.place is None:
            return record
        number = _COUNT.unpack_from(record.payload, _REGION.size)[0]
        state = self._ring.get(number)
        if state is not None:
            self._settle(number, state, record.place)
        return record

    def apply(self, records: list[Record]) -> None:
        """Draw what the records say."""
        for record in records:
            generator = self._get(_REGION.unpack_from(record.payload)[1])
            rest = record.payload[_REGION.size :]
            if record.kind == kinds.STATE:
                generator.restore(rest)
                continue
            number = _COUNT.unpack_from(rest)[0]
            extra = rest[_COUNT.size :]
            if record.kind == kinds.DRAWS_OPEN:
                if record.tail is None or record.tail == _UNFOUND:
                    generator.restore(self._pending(number, record.tail))
                    continue
                number = record.tail
            if not isinstance(generator, mersenne.Twister):
                raise Divergence("a number of draws for a generator that has an offset")
            generator.advance(number)
            if extra:
                generator.set_extra(extra[1:])

    def _pending(self, number: int, tail: int | None) -> bytes:
        if tail is None:
            state = self._ring.get(number)
        else:
            if self._found is None:
                self._found = self._read_states()
            state = self._found.get(number)
        if state is None:
            raise Divergence(f"the random state of draw record {number} is not in the log")
        return state

    def _read_states(self) -> dict[int, bytes]:
        found = {}
        reader = Reader(self._folder / "states")
        while (record := reader.take()) is not None:
            number = _COUNT.unpack_from(record.payload)[0]
            found[number] = record.payload[_COUNT.size :]
        return found

    def _get(self, ident: int) -> Generator:
        if ident not in self._by_ident:
            self.note_cuda()
        if ident not in self._by_ident:
            raise Divergence(f"the log has draws of generator {ident}, which this process lacks")
        return self._by_ident[ident]

    def drop_after(self, b: int, sequence: int) -> None:
        """The log was cut at boundary `b`; open records go on with number `sequence`."""
        self._boundaries.drop_after(b)
        self._sequence = sequence
