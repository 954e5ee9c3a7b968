"""The worker's pulse: every few seconds, where it is, into shared memory for its agent.

A thread of its own writes it, so it needs the GIL once per beat. A beat that does not come proves
little (a C call may hold the GIL for minutes): what the agent makes of it is in
`flashrun.node.heartbeats`.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic_ns  # by name: the replay puts its door into the module

from flashrun.beats import Beat, path


class Heartbeat:
    """See the module.

    Args:
        folder: private folder of the job on this node.
        rank: this worker's.
        interval: s between two beats.
        where: tells the boundary and the phase.
    """

    def __init__(
        self, folder: Path, rank: int, interval: float, where: Callable[[], tuple[int, str]]
    ) -> None:
        self._interval = interval
        self._where = where
        self._pid = os.getpid()
        self._count = 0
        size = Beat.LAYOUT.size
        fd = os.open(path(folder, rank), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)
            self._map = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flashrun-beat", daemon=True)

    def start(self) -> None:
        self.beat()
        self._thread.start()

    def beat(self) -> None:
        self._count += 1
        boundary, phase = self._where()
        self._map[:] = Beat(self._pid, self._count, monotonic_ns(), boundary, phase).pack()

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self.beat()

    def stop(self) -> None:
        self._stop.set()
