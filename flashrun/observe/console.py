"""What a person reads: one line on standard error for each fault and decision; and its twin, one
structured record per line in the job's event file.

``logging`` is left alone: workers are forks of this process, and their root logger is the script's.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

LEVELS = ("debug", "info", "warning", "error")

_threshold = LEVELS.index("info")
_event_file: str | None = None
_end_line: Callable[[], str] = str


def configure(level: str, event_file: str | None = None) -> None:
    """Set what is shown and where records go.

    Args:
        level: one of ``LEVELS``; lines below it are not shown (their records are written anyway).
        event_file: JSON lines are appended here; None: no file.
    """
    global _threshold, _event_file
    _threshold = LEVELS.index(level)
    if event_file is not None:
        _event_file = event_file


def begin_with(end_line: Callable[[], str]) -> None:
    """Have each line begin with what ends a line that somebody else has left unfinished.

    Args:
        end_line: gives a newline where there is such a line, otherwise "".
    """
    global _end_line
    _end_line = end_line


def shows(level: str) -> bool:
    """Whether lines of this level are shown."""
    return LEVELS.index(level) >= _threshold


def say(line: str, level: str = "info", event: str | None = None, **fields: Any) -> None:
    """Show one line and write its record.

    Args:
        line: for a person, without prefix or newline.
        level: one of ``LEVELS``.
        event: short name of what happened (``worker-failed``); None: the line is no event.
        fields: values of the record, JSON types.
    """
    if shows(level):
        prefix = "flashrun:" if level in ("debug", "info") else f"flashrun: {level}:"
        try:
            os.write(sys.stderr.fileno(), f"{_end_line()}{prefix} {line}\n".encode())
        except (OSError, ValueError):
            # The terminal is gone (or the stream was replaced): training goes on without it.
            pass
    if event is not None and _event_file is not None:
        record = {"time": time.time(), "event": event, "level": level, "line": line, **fields}
        data = (json.dumps(record) + "\n").encode()
        fd = os.open(_event_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.write(fd, data)
        finally:
            os.close(fd)
