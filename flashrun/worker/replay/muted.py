"""Prints of the replayed part are dropped."""

from __future__ import annotations

import os
import sys


class Muted:
    """Descriptors 1 and 2 lead to nowhere until `end`. The Python objects stay the same, so that a
    logging handler made during the replay speaks afterwards."""

    def __init__(self) -> None:
        self._flush()
        self.stdout = os.dup(1)
        self.stderr = os.dup(2)
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(null, 1)
        os.dup2(null, 2)
        os.close(null)

    @staticmethod
    def _flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()

    def end(self) -> None:
        self._flush()
        os.dup2(self.stdout, 1)
        os.dup2(self.stderr, 2)
        os.close(self.stdout)
        os.close(self.stderr)
