"""What the helpers do when the supervisor has been killed: leave nothing of the job on this node.

The kernel has ended the workers by then (PR_SET_PDEATHSIG); their children are left.
"""

from __future__ import annotations

import os
import time

import psutil

from flashrun.node import run_folder, tags
from flashrun.node.process_tree import KILL_PATIENCE, sweep, table

# How long the kernel may take to give the orphans of a dead supervisor another parent.
_ORPHAN_GRACE = 5.0


def _leaders_file(run_dir: str) -> str:
    return os.path.join(run_dir, "leaders")


def note_worker(run_dir: str, pid: int) -> None:
    """Keep a worker's pid, which is its session too, for who sweeps up after the supervisor."""
    try:
        born = psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        return  # ended and reaped already; what it left behind has its tag
    with open(_leaders_file(run_dir), "a") as file:
        file.write(f"{pid} {born}\n")


def _is_another(pid: int, born: float) -> bool:
    """Whether the number ``pid`` has been given to another process since."""
    try:
        return psutil.Process(pid).create_time() != born
    except psutil.NoSuchProcess:
        return False


def _sessions_of_workers(run_dir: str) -> list[int]:
    """The sessions that workers have led: who is in one belongs to the job, tag or no tag."""
    try:
        with open(_leaders_file(run_dir)) as file:
            leaders = [line.split() for line in file]
    except FileNotFoundError:
        return []  # no worker was started yet
    return [int(pid) for pid, born in leaders if not _is_another(int(pid), float(born))]


def sweep_after_supervisor(tag: str, supervisor: int, run_dir: str) -> None:
    """What a helper does when the supervisor has been killed: leave nothing of the job behind.

    Every helper does it, since any of them may be gone too; they spare each other, and each ends
    after it.
    """
    # The wire closes a moment before the kernel gives the orphans another parent. A supervisor that
    # closes it while it lives kills its helpers right away.
    mine = tags.job_of(tag)
    sessions = _sessions_of_workers(run_dir)
    deadline = time.monotonic() + _ORPHAN_GRACE
    while os.getppid() == supervisor:
        if time.monotonic() > deadline:
            return
        time.sleep(0.005)

    def is_ours(other: str) -> bool:
        return tags.job_of(other) == mine and not tags.is_helper(other)

    keep = [row.pid for row in table() if tags.job_of(row.tag) == mine and tags.is_helper(row.tag)]
    sweep(is_ours, keep, KILL_PATIENCE, sessions)
    run_folder.remove(run_dir)
