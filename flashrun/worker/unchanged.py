"""Broadcasts before the first step that gave a rank what it had already.

DDP broadcasts rank 0's parameters as it is made. A replay has no peers then, and must take the
result for unreal, with all that is made of it: the copy of the initial weights that a script keeps
to go back to. Mostly nothing has changed by it, since the ranks were seeded alike. That is noted
here, in a file that outlives the worker, and lets the replay take its own input for the result.
"""

from __future__ import annotations

import os
from pathlib import Path

from flashrun.worker.checksum import BLOCK, Checksum
from flashrun.worker.oplog import Op
from flashrun.worker.state import as_bytes


def _fingerprint(op: Op) -> int | None:
    """Of what an operation's outputs hold; None where that is not on the CPU."""
    checksum = Checksum()
    for tensor in op.outputs():
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            return None
        view = as_bytes(tensor)
        for at in range(0, len(view), BLOCK):
            checksum.add(view[at : at + BLOCK])
    return checksum.value


class Unchanged:
    """See the module.

    Args:
        run_dir: the job's folder on this node.
        fresh: this is the first incarnation: nothing of a round before counts.
    """

    def __init__(self, run_dir: Path, rank: int, fresh: bool) -> None:
        self._path = run_dir / f"unchanged.{rank}"
        self._before: dict[int, int] = {}  # by id of operations that are under way
        self._known: set[str] = set()
        if fresh:
            self._path.unlink(missing_ok=True)
        elif self._path.exists():
            self._known = set(self._path.read_text().splitlines())

    @property
    def watches(self) -> bool:
        """Whether an operation is under way that `after` has to hear of."""
        return bool(self._before)

    @staticmethod
    def _name(op: Op) -> str:
        return f"{op.group.ident} {op.seq}"

    def before(self, op: Op) -> None:
        """An operation is about to be issued."""
        if op.kind == "broadcast" and op.interval == 0 and not op.is_root():
            found = _fingerprint(op)
            if found is not None:
                self._before[id(op)] = found

    def after(self, op: Op) -> None:
        """It has completed."""
        if self._before.pop(id(op), None) == _fingerprint(op):
            line = f"{self._name(op)}\n".encode()
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                os.write(fd, line)
            except OSError:
                pass  # no room: its result stays unreal in a replay
            finally:
                os.close(fd)

    def has(self, op: Op) -> bool:
        """Whether the dead worker had before it what it had after it."""
        return self._name(op) in self._known
