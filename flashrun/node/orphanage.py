"""Daemons that cleared their environment: nothing but what they have open tells whose they are.

The kernel gives a process whose parent has ended to the nearest subreaper, the supervisor. One that
has a session of its own by then, and an environment without the tag, has lost every mark of its
rank but the files that it inherited.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from dataclasses import dataclass

from flashrun.node.process_tree import KILL_PATIENCE, kill, table, wait_until_gone

_Identity = tuple[int, int]  # device and inode


@dataclass(frozen=True)
class Orphanage:
    """Where such daemons end up.

    Attributes:
        supervisor: their parent then.
        spare: its children from before the job.
    """

    supervisor: int
    spare: list[int]

    def present(self, stuck: set[int], but: Collection[str] = ()) -> set[int]:
        """Pids of those that are there.

        Args:
            stuck: pids that could not be killed before: left out.
            but: so are those that have one of these files open.
        """
        found = {
            row.pid
            for row in table()
            if row.parent == self.supervisor
            and not (row.zombie or row.tag or row.pid in stuck or row.pid in self.spare)
        }
        return found - _users(found, but)

    def sweep(self, stuck: set[int], files: Collection[str] | None = None) -> set[int]:
        """Kill them, and what they have started.

        Args:
            stuck: pids that could not be killed before.
            files: only those that have one of these open; None: all, to be called when no other
                rank runs on this node, whose they could be.

        Returns:
            ``stuck``, and those that cannot be killed now.
        """
        while orphans := self.present(stuck):
            if files is not None:
                orphans = _users(orphans, files)
                if not orphans:
                    break
            doomed = _with_descendants(orphans) - stuck
            kill(doomed)
            stuck = stuck | wait_until_gone(doomed, time.monotonic() + KILL_PATIENCE)
        return stuck


def _with_descendants(pids: set[int]) -> set[int]:
    rows = table()
    found = set(pids)
    while more := {row.pid for row in rows if row.parent in found} - found:
        found |= more
    return found


def _users(pids: set[int], files: Collection[str]) -> set[int]:
    """Those of ``pids`` that have one of ``files`` open."""
    wanted = {identity for path in files if (identity := _identity(path)) is not None}
    return {pid for pid in pids if wanted and wanted & _open_files(pid)}


def _open_files(pid: int) -> set[_Identity]:
    folder = f"/proc/{pid}/fd"
    try:
        numbers = os.listdir(folder)
    except OSError:
        return set()  # gone, or another user's
    found = (_identity(os.path.join(folder, number)) for number in numbers)
    return {identity for identity in found if identity is not None}


def _identity(path: str) -> _Identity | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino
