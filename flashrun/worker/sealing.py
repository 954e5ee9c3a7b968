"""What a worker of a job of several nodes says of its files: which boundary is complete
(:mod:`flashrun.seals`); and what a replacement knows of those that it was left.

A lost node takes the files of its ranks along, but for copies that another node has. A copy may end
earlier than the dead worker did. What that did later shows in the survivors (its collectives) and
in the file system; so it has to be known where the copy ends.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping
from pathlib import Path

from flashrun import messages, seals
from flashrun.seals import Seal
from flashrun.worker.replay.api import WORLD_UNTIL, Divergence


class Sealing:
    """Writes the seals of one rank; does nothing in a job of one node."""

    def __init__(self, environ: Mapping[str, str], rank: int, incarnation: int) -> None:
        self._incarnation = incarnation
        self._map: mmap.mmap | None = None
        self._bell = -1
        if not environ.get(messages.ADDRESS):
            return
        folder = environ[messages.RUN_DIR]
        path = seals.path(folder, rank)
        if not incarnation:
            path.unlink(missing_ok=True)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, seals.SIZE)
                self._map = mmap.mmap(fd, seals.SIZE)
            finally:
                os.close(fd)
            self._bell = seals.open_bell(folder)
        except OSError:
            return  # nothing is sealed, so nothing is copied: the loss of this node restarts all

    def seal(self, boundary: int) -> None:
        """All that a replacement needs of this boundary is written."""
        if self._map is None:
            return
        self._map[:] = Seal(self._incarnation, boundary).pack()
        self.ring()

    def ring(self) -> None:
        """There is something new in the log."""
        if self._bell >= 0:
            seals.ring(self._bell)


class Copied:
    """What a replacement works from, where that is a copy from another node.

    Attributes:
        boundary: what is of this one is complete; what comes after it may be.
    """

    def __init__(self, path: Path, rank: int, boundary: int, holder: str) -> None:
        self._path = path
        self._rank = rank
        self.boundary = boundary
        self._holder = holder

    @classmethod
    def find(cls, folder: Path, rank: int) -> Copied | None:
        """None: the files are the dead worker's own."""
        path = seals.copied(folder, rank)
        try:
            said = json.loads(path.read_text())
        except FileNotFoundError:
            return None
        return cls(path, rank, int(said["boundary"]), said["holder"])

    def reaches(self, target: int, newest: int) -> None:
        """The survivors are at `target`, and the newest boundary of the log is `newest`.

        Raises:
            Divergence: what the dead worker did in between is not known.
        """
        if target < WORLD_UNTIL:
            raise Divergence(
                "its node was lost before the second step, and what its script had told others of"
                " the outside world (run names, clocks) may not have been copied"
            )
        end = min(self.boundary, newest)
        if end < target - 1:
            raise Divergence(
                f"the copy of the host-read log of rank {self._rank} at {self._holder} ends at"
                f" boundary {end}, and the survivors are at {target}: what came last had not"
                " arrived when the node was lost"
            )

    def has(self, boundary: int) -> bool:
        """Whether files that are written several times on the way to a boundary hold its own."""
        return boundary <= self.boundary

    def end(self) -> None:
        """This process is live: from here on the files are its own."""
        self._path.unlink(missing_ok=True)
