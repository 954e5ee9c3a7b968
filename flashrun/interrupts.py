"""Ctrl-C while the launcher loads torch and reads its command line.

An exception out of an import is lost where C code goes on without what it wanted (torch without
numpy), and leaves half a module, which every forked worker would have.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

INTERRUPTED = "flashrun: interrupted"


@contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # ignored (a background job): it stays so
        yield
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, f"{INTERRUPTED}\n".encode())
    os._exit(1)


@contextmanager
def end_at_once() -> Iterator[None]:
    """An interrupt ends the process; it has made nothing yet that would be left behind."""
    with _handled_by(_end):
        yield


@contextmanager
def wait_until_after() -> Iterator[None]:
    """
    Raises:
        KeyboardInterrupt: at the end, if there was one meanwhile.
    """
    noted: list[int] = []
    with _handled_by(lambda number, frame: noted.append(number)):
        yield
    if noted:
        raise KeyboardInterrupt
