"""The three Mersenne Twisters of a training script, seen in place.

torch's CPU generator, Python's ``random`` and NumPy's global generator are all MT19937: 624 words
and a position. Their public ``get_state`` functions cost 1, 9 and 39 µs; looking at the words where
they lie in memory costs a fraction of a microsecond, which lets every region of the script be
compared. Where they lie is found and proved at start-up (`locate`), never assumed:

- torch 2.13 ``aten/src/ATen/core/MT19937RNGEngine.h``: ``seed u64, left i32, seeded bool, next u32,
  state u32[624]`` inside the object that ``Generator._cdata`` points to; the cached normals follow.
- CPython ``Modules/_randommodule.c``: ``PyObject_HEAD, index i32, state u32[624]``.
- NumPy: ``_mt19937.h``: ``key u32[624], pos i32`` at ``bit_generator.ctypes.state_address``;
  ``aug_bitgen_t`` (pointer, has_gauss i32, gauss f64) inside the RandomState object.

A captured state has one form for all: ``pos u32 | 624 words u32 | extra``, position as in NumPy
(624: used up). torch's ``left`` is 625 - position.
"""

from __future__ import annotations

import ctypes
import functools
import random
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

N = 624
WORDS = 4 * N
FEW = 64  # twists up to which they are made one by one, without drawing what they give
STATE = 4 + WORDS  # length of a captured state without its extra part


class LayoutError(RuntimeError):
    """A generator does not lie in memory as this version of the code expects."""


def _memory(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


class Twister:
    """One generator: where its words are and how its position is kept.

    Attributes:
        looks, calls: memory and functions whose values differ whenever the state differs, and
            hardly ever else: position, first words (a twist changes all), cached normals.
    """

    name: str
    ident: int
    looks: list[memoryview]
    calls: tuple[Callable[[], Any], ...] = ()
    _words: memoryview

    def position(self) -> int:
        raise NotImplementedError

    def set_position(self, position: int) -> None:
        raise NotImplementedError

    def extra(self) -> bytes:
        """State besides words and position: cached normals."""
        raise NotImplementedError

    def set_extra(self, extra: bytes) -> None:
        raise NotImplementedError

    def fingerprint(self) -> tuple[Any, ...]:
        """What `looks` and `calls` give now."""
        return b"".join(self.looks), *[call() for call in self.calls]

    def seed_mark(self) -> int:
        """Changes when the generator was seeded, where it says so."""
        return 0

    def capture(self) -> bytes:
        return b"".join((self.position().to_bytes(4, "little"), self._words, self.extra()))

    def restore(self, state: bytes) -> None:
        self._words[:] = state[4:STATE]
        self.set_position(int.from_bytes(state[:4], "little"))
        self.set_extra(state[STATE:])

    def advance(self, draws: int) -> None:
        """Draw `draws` 32-bit numbers and drop them."""
        position = self.position()
        if position + draws <= N:
            if draws:
                self.set_position(position + draws)
            return
        scratch = _scratch()
        scratch.words[:] = self._words
        twists, last = divmod(position + draws - 1, N)
        if twists <= FEW:
            for _ in range(twists):
                scratch.twist()
            scratch.set_position(last + 1)
        else:
            scratch.set_position(position)
            scratch.draw(draws)
        self._words[:] = scratch.words
        self.set_position(scratch.position())


class TorchTwister(Twister):
    name = "torch"
    ident = 0

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        official = generator.get_state().numpy().tobytes()
        words = np.frombuffer(official[24 : 24 + 8 * N], dtype=np.uint64).astype(np.uint32)
        address: int = generator._cdata  # type: ignore[attr-defined]
        head = _memory(address, 512).tobytes()
        at = head.find(words[:8].tobytes())
        if at < 20:
            raise LayoutError("torch's CPU generator: words not found")
        # the object is larger than header + words + cached normals (engine, two optionals)
        self._all = _memory(address + at - 20, 20 + WORDS + 32)
        self._words = self._all[20 : 20 + WORDS]
        self._left = self._all[8:12].cast("i")
        self._next = self._all[16:20].cast("I")
        # 4 bytes of padding, optional<float> (value, flag), optional<double> (value, flag); what
        # is not valid is whatever was in memory
        self._cache = self._all[20 + WORDS :]
        self.looks = [self._all[:28], self._cache[:21]]

    def position(self) -> int:
        return 625 - self._left[0]

    def set_position(self, position: int) -> None:
        self._left[0] = 625 - position
        self._next[0] = position

    def _normals(self) -> bytes:
        cache = self._cache
        if not cache[8] and not cache[20]:
            return b""
        single = cache[4:9].tobytes() if cache[8] else bytes(5)
        double = cache[12:21].tobytes() if cache[20] else bytes(9)
        return single + double

    def seed_mark(self) -> int:
        return int.from_bytes(self._all[:8], "little")

    def extra(self) -> bytes:
        return self._all[:8].tobytes() + self._normals()

    def set_extra(self, extra: bytes) -> None:
        self._all[:8] = extra[:8]
        normals = extra[8:] or bytes(14)
        self._cache[4:9] = normals[:5]
        self._cache[12:21] = normals[5:]


class PythonTwister(Twister):
    name = "python"
    ident = 1

    def __init__(self, generator: random.Random) -> None:
        self._generator = generator
        self._all = _memory(id(generator) + object.__basicsize__, 4 + WORDS)
        self._words = self._all[4:]
        self._index = self._all[:4].cast("i")
        self.looks = [self._all[:12]]
        self.calls = (functools.partial(getattr, generator, "gauss_next"),)

    def position(self) -> int:
        return self._index[0]

    def set_position(self, position: int) -> None:
        self._index[0] = position

    def extra(self) -> bytes:
        cached = self._generator.gauss_next  # type: ignore[attr-defined]
        return b"" if cached is None else struct.pack("<d", cached)

    def set_extra(self, extra: bytes) -> None:
        cached = struct.unpack("<d", extra)[0] if extra else None
        self._generator.gauss_next = cached  # type: ignore[attr-defined]


class NumpyTwister(Twister):
    name = "numpy"
    ident = 2

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        bits = generator._bit_generator
        if type(bits).__name__ != "MT19937":
            raise LayoutError(f"NumPy's global generator is a {type(bits).__name__}")
        self._all = _memory(bits.ctypes.state_address, WORDS + 4)
        self._words = self._all[:WORDS]
        self._pos = self._all[WORDS:].cast("i")
        # aug_bitgen_t begins with a pointer to the copy of bitgen_t in the same object
        base, size = id(generator), type(generator).__basicsize__
        body = _memory(base, size)
        for at in range(object.__basicsize__, size - 24, 8):
            pointer = int.from_bytes(body[at : at + 8], "little")
            if base < pointer < base + size and self._is_gauss(body[at + 8 : at + 24]):
                gauss = body[at + 8 : at + 24]
                break
        else:
            raise LayoutError("NumPy's cached normal not found")
        self._gauss = gauss
        self.looks = [self._all[:8], self._all[WORDS:], gauss]

    def _is_gauss(self, place: memoryview) -> bool:
        before = self._generator.get_state(legacy=False)
        try:
            self._generator.set_state({**before, "has_gauss": 1, "gauss": 0.40625})
            set_one = struct.unpack("<ixxxxd", place) == (1, 0.40625)
            self._generator.set_state({**before, "has_gauss": 0, "gauss": 0.0})
            return set_one and struct.unpack("<ixxxxd", place) == (0, 0.0)
        finally:
            self._generator.set_state(before)

    def position(self) -> int:
        return self._pos[0]

    def set_position(self, position: int) -> None:
        self._pos[0] = position

    def extra(self) -> bytes:
        return self._gauss.tobytes()

    def set_extra(self, extra: bytes) -> None:
        self._gauss[:] = extra


class _Scratch:
    """A NumPy bit generator of our own, for advancing any MT19937."""

    def __init__(self) -> None:
        self._bits = np.random.MT19937(0)
        whole = _memory(self._bits.ctypes.state_address, WORDS + 4)
        self.words = whole[:WORDS]
        self._pos = whole[WORDS:].cast("i")
        interface = self._bits.ctypes
        self._one, self._address = interface.next_uint32, interface.state

    def set_position(self, position: int) -> None:
        self._pos[0] = position

    def position(self) -> int:
        return self._pos[0]

    def twist(self) -> None:
        """Make the next 624 words; the first of them is drawn."""
        self._pos[0] = N
        self._one(self._address)

    def draw(self, draws: int) -> None:
        while draws > 0:  # the C loop counts in an int
            part = min(draws, 1 << 30)
            self._bits.random_raw(part, output=False)
            draws -= part


_SCRATCH: list[_Scratch] = []


def _scratch() -> _Scratch:
    if not _SCRATCH:
        _SCRATCH.append(_Scratch())
    return _SCRATCH[0]


def _prove(twister: Twister, draw: Any, get: Any) -> None:
    """Check on a generator of our own that capture, advance and restore agree with drawing."""
    before = twister.capture()
    first = [draw() for _ in range(1300)]
    after = twister.capture()
    mark = twister.fingerprint()
    twister.restore(before)
    if twister.fingerprint() == mark:
        raise LayoutError(f"{twister.name}: the fingerprint does not move")
    public = get()
    twister.advance(1300)
    if twister.capture()[:STATE] != after[:STATE]:
        raise LayoutError(f"{twister.name}: advancing is not drawing")
    twister.restore(before)
    if [draw() for _ in range(1300)] != first or get() == public:
        raise LayoutError(f"{twister.name}: restoring is not going back")


def prove_layouts() -> None:
    """Raise `LayoutError` unless all three generators lie in memory as expected. Touches only
    generators of its own."""
    generator = torch.Generator()
    generator.manual_seed(5)
    buffer = torch.empty((), dtype=torch.int32)
    _prove(
        TorchTwister(generator),
        lambda: torch.Tensor.random_(buffer, generator=generator).tolist(),
        lambda: generator.get_state().numpy().tobytes(),
    )
    twister = TorchTwister(generator)
    torch.randn(1, dtype=torch.float64, generator=generator)  # caches a normal
    state = twister.capture()
    first = torch.randn(3, dtype=torch.float64, generator=generator)
    twister.restore(state)
    again = torch.randn(3, dtype=torch.float64, generator=generator)
    if len(state) == STATE + 8 or not bool((first == again).all()):
        raise LayoutError("torch's cached normal not found")
    own = random.Random(5)
    _prove(PythonTwister(own), lambda: own.getrandbits(32), own.getstate)
    numpy = np.random.RandomState(5)
    _prove(
        NumpyTwister(numpy),
        lambda: int(numpy.randint(0, 1 << 32, dtype=np.uint32)),
        lambda: str(numpy.get_state()),
    )


def script_twisters() -> list[Twister]:
    """The global generators of torch (CPU), Python and NumPy.

    Raises:
        LayoutError: they can't be seen in place.
    """
    prove_layouts()
    return [
        TorchTwister(torch.default_generator),
        PythonTwister(random._inst),
        NumpyTwister(np.random.mtrand._rand),
    ]


def temper(word: int) -> int:
    """MT19937's output for a state word (Matsumoto and Nishimura 1998)."""
    word ^= word >> 11
    word ^= (word << 7) & 0x9D2C5680
    word ^= (word << 15) & 0xEFC60000
    return word ^ (word >> 18)


def count_few(before: bytes, after: bytes, most: int) -> int | None:
    """Draws between two states if they are at most `most` twists apart, else None."""
    scratch = _scratch()
    scratch.words[:] = before[4:STATE]
    wanted = after[4:12]
    first = scratch.words[:8]
    for twists in range(most):
        scratch.twist()
        if first == wanted:
            start, end = (int.from_bytes(state[:4], "little") for state in (before, after))
            return (N - start) + twists * N + end
    return None


class DrawCounter:
    """Finds how many numbers were drawn between two states.

    One twist makes 624 numbers, the tempered words of the next state; so the state after the
    region is found by drawing on from the state before it until the first two numbers of a twist
    are the tempered first two words. The drawing is done by torch, which lets other Python threads
    run meanwhile: 2,000,000 draws take about 5 ms of another core.
    """

    CHUNK = 256  # twists per step

    def __init__(self, limit: int = 1 << 26) -> None:
        self._limit = limit  # draws after which the search is given up
        self._generator = torch.Generator()
        self._view = TorchTwister(self._generator)
        self._buffer = torch.empty(self.CHUNK * N, dtype=torch.int32)
        self._columns = self._buffer.numpy().reshape(self.CHUNK, N)[:, :2]
        self._empty_extra = self._view.extra()

    def count(self, before: bytes, after: bytes) -> int | None:
        """Draws between two captured states (extra parts ignored); None if there is no such
        number within the limit (the generator was seeded)."""
        start = int.from_bytes(before[:4], "little")
        end = int.from_bytes(after[:4], "little")
        if before[4:STATE] == after[4:STATE]:
            return end - start if end >= start else None
        two = struct.unpack("<2I", after[4:12])
        wanted = np.array([temper(word) & 0x7FFFFFFF for word in two], dtype=np.int32)
        # draws 31 bits of each number; start at a used-up state, so chunks begin with a twist
        self._view.restore((N).to_bytes(4, "little") + before[4:STATE] + self._empty_extra)
        twists, step = 0, 8
        while twists * N < self._limit:
            torch.Tensor.random_(self._buffer[: step * N], generator=self._generator)
            hits = np.flatnonzero((self._columns[:step] == wanted).all(axis=1))
            if len(hits):
                return (N - start) + (twists + int(hits[0])) * N + end
            twists += step
            step = min(self.CHUNK, step * 4)
        return None
