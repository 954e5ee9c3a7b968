"""torch's file timer (TORCHELASTIC_ENABLE_FILE_TIMER=1): ends workers whose timer has run out.

As ``LocalElasticAgent._setup_local_watchdog`` (torch 2.13) does; the server is torch's own.
"""

from __future__ import annotations

import os
import tempfile
import uuid

from torch.distributed.elastic.timer.file_based_local_timer import FileTimerServer

_ENABLE = "TORCHELASTIC_ENABLE_FILE_TIMER"
_PATH = "TORCHELASTIC_TIMER_FILE"


class Watchdog:
    """The timer server of this node, or nothing if it is not asked for.

    Args:
        path: named pipe that workers write their timers to; None: no server.
        run_id: the job.
    """

    def __init__(self, path: str | None, run_id: str) -> None:
        self._path = path
        self._run_id = run_id
        self._server: FileTimerServer | None = None

    @classmethod
    def from_environment(cls, run_id: str) -> Watchdog:
        """Reads TORCHELASTIC_ENABLE_FILE_TIMER; sets TORCHELASTIC_TIMER_FILE for the workers."""
        if os.environ.get(_ENABLE) != "1":
            return cls(None, run_id)
        path = os.environ.setdefault(
            _PATH, os.path.join(tempfile.gettempdir(), f"watchdog_timer_{uuid.uuid4()}")
        )
        return cls(path, run_id)

    def start(self) -> None:
        """Start the server, if it is asked for and not running."""
        if self._path is None or self._server is not None:
            return
        self._server = FileTimerServer(
            file_path=self._path, run_id=self._run_id, max_interval=0.1, daemon=True
        )
        self._server.start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None
