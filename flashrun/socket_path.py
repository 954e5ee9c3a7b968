"""Unix sockets at paths of any length: an address holds 107 bytes (``sun_path``, unix(7)), and a
job's folder lies wherever TMPDIR says."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_LONGEST = 107
_open = os.open  # taken before a replay puts its view of files there


@contextmanager
def address(path: str) -> Iterator[str]:
    """An address for ``bind`` or ``connect``; a long path goes by way of its opened folder.

    Raises:
        OSError: the folder can't be opened.
    """
    if len(os.fsencode(path)) <= _LONGEST:
        yield path
        return
    folder, name = os.path.split(path)
    fd = _open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{name}"
    finally:
        os.close(fd)
