"""What a benchmark has to reach, and where and when it was run."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any


class Bars:
    """Compares figures with what issues ask for, says so, and gives the status to end with.

    Attributes:
        found: what was compared, for the raw results.
    """

    def __init__(self) -> None:
        self.found: dict[str, dict[str, float | bool]] = {}

    def at_most(self, what: str, value: float, bar: float) -> None:
        self._note(what, value, "at most", bar, value <= bar)

    def at_least(self, what: str, value: float, bar: float) -> None:
        self._note(what, value, "at least", bar, value >= bar)

    def _note(self, what: str, value: float, how: str, bar: float, met: bool) -> None:
        self.found[what] = {"value": value, how: bar, "met": met}
        word = "met" if met else "MISSED"
        print(f"bar {word}: {what}: {value:.4g}, asked for {how} {bar:g}", flush=True)

    def status(self) -> int:
        """1: one was missed."""
        return int(not all(bar["met"] for bar in self.found.values()))


def facts() -> dict[str, Any]:
    """Of this run: commit, time, machine and what else it was doing as the run began."""
    described = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return {
        "commit": described.stdout.strip(),
        "began": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "load": os.getloadavg(),
        "machine": platform.platform(),
        "cores": os.cpu_count(),
        "python": sys.version,
    }
