"""Python's garbage collector, kept out of the way where there is nothing for it to find."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def off_while_loading() -> Iterator[None]:
    """Torch's modules make half a million objects and no garbage; the collections on the way are a
    fifth of the time that loading them takes."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def leave_to_the_kernel() -> None:
    """For a process of ours that is about to end: the interpreter would look through all of these
    objects several times, half a second after everything is done."""
    gc.freeze()
