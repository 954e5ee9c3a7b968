"""The door: ``flashrun``, ``python -m flashrun``, and the process that these become.

The launcher starts itself again once, before anything is imported, as ``python -u …/__main__.py``:
workers are forks of it, so it must be what they are to be (``-u``, one hash seed for the job), and
the job's tag has to stand in the memory that /proc/PID/environ shows.
"""

from __future__ import annotations

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))

# The same for every process of every node: a replacement has to iterate sets in the order in which
# the one before it did. Any number but 0 (which turns hashing's randomness off and shows in
# sys.flags).
_HASH_SEED = "1"


def _open_closed_streams() -> None:
    """Give standard output and error something if the launcher was started without (``>&-``): the
    first socket would take the number, and what is shown would go there."""
    for fd in (1, 2):
        try:
            os.fstat(fd)
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            if null != fd:
                os.dup2(null, fd)
                os.close(null)
            os.set_inheritable(fd, True)


def _start_again(arguments: list[str]) -> None:
    """Replace this process; returns only in the process that it has become."""
    if os.environ.pop("FLASHRUN_EXEC_PID", "") == str(os.getpid()):
        return
    environ = dict(os.environ)
    if not environ.get("PYTHONHASHSEED"):  # python takes an empty one for "random"
        environ["PYTHONHASHSEED"] = _HASH_SEED
    environ["FLASHRUN_EXEC_PID"] = str(os.getpid())
    if sys.path and not getattr(sys.flags, "safe_path", False):
        environ["FLASHRUN_EXEC_FOLDER"] = sys.path[0]
    # flashrun.node.tags tells the format; a launcher inside a worker gets a tag of its own.
    environ["FLASHRUN_JOB_TAG"] = f"{os.urandom(8).hex()}:{'-' * 8}:{'-' * 4}"
    _open_closed_streams()
    os.execve(sys.executable, [sys.executable, "-u", __file__, *arguments], environ)


def main() -> int:
    """Run the command line of this process; returns its exit status (or ends in a worker)."""
    launcher = os.getpid()
    try:
        _start_again(sys.argv[1:])
        from flashrun.run import main as run

        outcome = run(sys.argv[1:])
    except KeyboardInterrupt:
        if sys.argv[1:2] == ["exec"] or os.getpid() != launcher:
            raise  # the program's own business, or a worker's
        from flashrun.interrupts import INTERRUPTED

        print(INTERRUPTED, file=sys.stderr)
        return 1
    if isinstance(outcome, int):
        return outcome
    outcome()  # a forked worker: nothing but this frame is below its script
    return 0


if __name__ == "__main__":
    if sys.path and sys.path[0] == _HERE and not getattr(sys.flags, "safe_path", False):
        # Run by its path, python has put this folder first; it must not hide top-level modules.
        del sys.path[0]
    sys.exit(main())
