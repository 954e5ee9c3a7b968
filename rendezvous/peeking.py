"""Reading a key of a TCPStore that may be absent, in one trip: ``get`` would wait for it.

Relied on in torch 2.13: ``compare_set`` of an absent key, where something is expected, writes
nothing and gives back what was expected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_ABSENT = b"\0absent\0"  # no value is this


def peek(compare_set: Callable[[bytes, bytes], Any]) -> bytes | None:
    """The value of a key, None when it is absent.

    Args:
        compare_set: for that key; takes what is expected and what to write.
    """
    found = bytes(compare_set(_ABSENT, _ABSENT))
    return None if found == _ABSENT else found
