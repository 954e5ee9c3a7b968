"""Who belongs to a job or to one of its ranks, and how to make sure that nobody is left.

A process belongs to a rank when /proc/PID/environ shows the rank's tag (children inherit that
memory, a double fork and ``setsid`` included), or when one of its ancestors or its session leader
does (a program started with an emptied environment). psutil walks the process table; the tag is
read directly, since psutil decodes whole environments.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import psutil

TAG_VARIABLE = "FLASHRUN_JOB_TAG"

# Seconds that SIGKILL may take to be obeyed before a process is named as unkillable.
KILL_PATIENCE = 5.0


@dataclass(frozen=True)
class Seen:
    """One process as the table showed it.

    Attributes:
        tag: value of the tag variable, "" if there is none or it cannot be read.
    """

    pid: int
    parent: int
    session: int
    tag: str
    zombie: bool


def read_tag(pid: int) -> str:
    """The job tag in the environment memory of ``pid``; "" if there is none."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            data = file.read()
    except OSError:
        return ""  # gone, or another user's
    for entry in data.split(b"\0"):
        if entry.startswith(TAG_VARIABLE.encode() + b"="):
            return entry.split(b"=", 1)[1].decode(errors="replace")
    return ""


def table() -> list[Seen]:
    """All processes of this machine that can be seen."""
    rows = []
    for pid in psutil.pids():
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue  # ended between the listing and the look
        zombie = fields[0] in (b"Z", b"X")
        rows.append(
            Seen(pid, int(fields[1]), int(fields[3]), "" if zombie else read_tag(pid), zombie)
        )
    return rows


def belonging(
    rows: Iterable[Seen], is_ours: Callable[[str], bool], roots: Iterable[int], keep: Iterable[int]
) -> set[int]:
    """Pids that carry a matching tag or descend from (or share the session of) one that does.

    A process with another tag is a job of its own kind (another rank, a nested launcher) only if
    ``is_ours`` says so of its tag; a nested job below a rank goes with it.

    Args:
        rows: the process table.
        is_ours: tells of a tag whether it belongs.
        roots: session leaders (a rank's own process, which may have ended): who is in such a
            session belongs.
        keep: pids that never belong (supervisor, agent …), nor does what descends through them.
    """
    alive = [row for row in rows if not row.zombie]
    kept = set(keep)
    roots = set(roots)
    members = {row.pid for row in alive if row.pid not in kept and row.tag and is_ours(row.tag)}
    sessions = members | roots
    grew = True
    while grew:
        more = {
            row.pid
            for row in alive
            if row.pid not in members
            and row.pid not in kept
            and (row.parent in members or row.session in sessions)
        }
        grew = bool(more)
        members |= more
    return members & {row.pid for row in alive}


def children(pid: int) -> set[int]:
    """Living direct children of ``pid``."""
    return {row.pid for row in table() if row.parent == pid and not row.zombie}


def send(pids: Iterable[int], number: int) -> None:
    """A signal to each; one that is gone already is fine."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
        except PermissionError:
            continue  # changed its user; it is named by who waits for it


def kill(pids: Iterable[int]) -> None:
    """SIGKILL to each, see `send`."""
    send(pids, signal.SIGKILL)


def wait_until_gone(pids: Iterable[int], deadline: float) -> set[int]:
    """Wait for the end of processes by pidfd (a zombie counts as ended).

    Args:
        pids: whom to wait for; need not be children.
        deadline: ``time.monotonic()`` value.

    Returns:
        Those that were still there at the deadline.
    """
    fds: dict[int, int] = {}
    poller = select.poll()
    try:
        for pid in pids:
            try:
                fd = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            fds[fd] = pid
            poller.register(fd, select.POLLIN)
        while fds:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            for fd, _ in poller.poll(left * 1000):
                poller.unregister(fd)
                os.close(fd)
                del fds[fd]
        return set(fds.values())
    finally:
        for fd in fds:
            os.close(fd)


def sweep(
    is_ours: Callable[[str], bool],
    keep: Iterable[int],
    patience: float,
    roots: Iterable[int] = (),
) -> set[int]:
    """Kill everything that belongs, again and again until nothing does.

    Args:
        is_ours: tells of a tag whether it belongs.
        keep: pids to spare.
        patience: seconds; what is still there after them cannot be killed.
        roots: session leaders, as in :func:`belonging`.

    Returns:
        Pids that did not end (stuck in the kernel, or another user's).
    """
    deadline = time.monotonic() + patience
    keep = list(keep)
    roots = list(roots)
    while True:
        members = belonging(table(), is_ours, roots, keep)
        if not members:
            return set()
        kill(members)
        left = wait_until_gone(members, deadline)
        if left or time.monotonic() >= deadline:
            return left or belonging(table(), is_ours, roots, keep)
