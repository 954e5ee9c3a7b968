"""The checksum of state on its way notices what can go wrong with blocks of bytes."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from flashrun.worker.checksum import Checksum

SIZES = (0, 1, 7, 8, 9, 64, 1001)


def value(*blocks: bytes) -> int:
    checksum = Checksum()
    for block in blocks:
        checksum.add(memoryview(block))
    return checksum.value


def blocks(seed: int) -> list[bytes]:
    draw = random.Random(seed)
    return [draw.randbytes(draw.choice(SIZES[1:])) for _ in range(4)]


def _bit(given: list[bytes], draw: random.Random) -> list[bytes]:
    at = draw.randrange(len(given))
    changed = bytearray(given[at])
    changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return [*given[:at], bytes(changed), *given[at + 1 :]]


def _words(given: list[bytes], draw: random.Random) -> list[bytes]:
    """Two different words of one block change places."""
    words = [draw.randbytes(8) for _ in range(16)]
    swapped = [words[1], words[0], *words[2:]]
    given[:] = [b"".join(words), *given[1:]]
    return [b"".join(swapped), *given[1:]]


@pytest.mark.parametrize(
    "change",
    [
        _bit,
        _words,
        lambda given, draw: [given[0] + b"x", *given[1:]],
        lambda given, draw: given[1:],
        lambda given, draw: [*given, given[-1]],
        lambda given, draw: [*given[:-1], given[-1] + b"\0"],
        lambda given, draw: [b"a" + given[0], *given[1:]],
    ],
    ids=["bit", "words", "longer", "missing", "twice", "zero", "shifted"],
)
@pytest.mark.parametrize("seed", range(20))
def test_a_change_is_seen(
    change: Callable[[list[bytes], random.Random], list[bytes]], seed: int
) -> None:
    given = blocks(seed)
    changed = change(given, random.Random(seed))
    assert value(*given) != value(*changed)


@pytest.mark.parametrize("seed", range(5))
def test_the_same_is_the_same_in_another_order_it_is_not(seed: int) -> None:
    given = blocks(seed)
    assert value(*given) == value(*[bytes(block) for block in given])
    assert value(*given) != value(*reversed(given))
