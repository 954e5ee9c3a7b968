"""The few Linux calls that Python's standard library does not wrap.

Each function names the manual page it relies on. Nothing here knows of jobs or ranks, except
:func:`overwrite_in_environ`, which exists so that a worker's tag can be read by others.
"""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36

_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, argument: int) -> None:
    if _libc.prctl(option, argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {argument}): {os.strerror(number)}")


def become_subreaper() -> None:
    """Orphaned descendants become children of this process (PR_SET_CHILD_SUBREAPER, prctl(2)).

    Raises:
        OSError: the kernel refused (it has known the call since Linux 3.4).
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent_pid: int, with_signal: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send ``with_signal`` to this process when its parent ends.

    PR_SET_PDEATHSIG (prctl(2)) fires for the death of the parent *thread* at the time of the call,
    so it must be called after a reparenting, and the parent must have one thread that lives as
    long as the process. The check afterwards closes the window between fork and call.

    Args:
        parent_pid: who the parent has to be; if it is somebody else already, the real one has died.
        with_signal: what the kernel sends.
    """
    _prctl(_PR_SET_PDEATHSIG, int(with_signal))
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), with_signal)


def set_thread_name(name: str) -> None:
    """Name the calling thread in ``ps -L`` and ``top`` (15 bytes at most, PR_SET_NAME)."""
    buffer = ctypes.create_string_buffer(name.encode()[:15])
    if _libc.prctl(_PR_SET_NAME, buffer, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NAME)")


def punch_hole(fd: int, length: int) -> None:
    """Give the first ``length`` bytes of a file back to the disk; its size stays (fallocate(2)).

    A file system that has no holes keeps them.
    """
    _libc.fallocate(
        fd,
        _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE,
        ctypes.c_longlong(0),
        ctypes.c_longlong(length),
    )


def _stat_address(field: int) -> int:
    """A field of /proc/self/stat, counted from 1 as in proc_pid_stat(5)."""
    with open("/proc/self/stat", "rb") as file:
        after_name = file.read().rpartition(b")")[2].split()
    return int(after_name[field - 3])


def overwrite_in_environ(old: bytes, new: bytes) -> bool:
    """Replace ``old`` by ``new`` in the memory that /proc/PID/environ shows of this process.

    ``os.environ`` changes do not reach that memory, and a forked child inherits its parent's; so a
    tag that others are to find there is written in place.

    Args:
        old: bytes to look for; ``new`` has to be of the same length.
        new: the replacement.

    Returns:
        Whether ``old`` was found (and replaced).
    """
    if len(old) != len(new):
        raise ValueError(f"a tag is overwritten in place: {len(old)} bytes are not {len(new)}")
    with open("/proc/self/environ", "rb") as file:
        at = file.read().find(old)
    if at < 0:
        return False
    ctypes.memmove(_stat_address(50) + at, new, len(new))  # field 50: env_start
    return True


def set_command_line(arguments: list[str]) -> None:
    """Show ``arguments`` as this process's command line in ``ps`` and /proc/PID/cmdline.

    A forked worker would show the launcher's. The memory is what the kernel gave at exec: a longer
    command line is cut, a shorter one padded with NULs.
    """
    start, end = _stat_address(48), _stat_address(49)  # arg_start, arg_end
    room = end - start
    text = b"\0".join(os.fsencode(a) for a in arguments)[: max(room - 1, 0)]
    ctypes.memmove(start, text.ljust(room, b"\0"), room)
