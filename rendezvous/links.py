"""The sockets of TCPStore clients, which torch does not show: found among this process's own."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not in __all__

_making: dict[int, threading.Lock] = {}  # by port


def client(address: str, port: int, within: timedelta, answer_s: float) -> TCPStore:
    """A client of the TCPStore at a numeric address (a name costs a look-up). The first answer that
    takes longer ends this one; other clients there, which the script may have, are left alone.

    Args:
        within: for the connection, and what the client itself waits for.
        answer_s: seconds.
    """
    store, links = with_links(
        lambda: TCPStore(address, port, None, False, within, wait_for_workers=False), port
    )
    for link in links:
        set_deadline(link, answer_s)
        link.close()
    return store


def with_links(make: Callable[[], TCPStore], port: int) -> tuple[TCPStore, list[socket.socket]]:
    """Have ``make`` connect to a TCPStore at ``port``.

    Returns:
        The client and its socket, found as the one that is new: a duplicate that the caller
        closes. (A list, for another thread may connect there meanwhile without us.)
    """
    with _making.setdefault(port, threading.Lock()):
        before = links_to(port)
        store = make()
        after = links_to(port)
    for link in [*before.values(), *(after[inode] for inode in after if inode in before)]:
        link.close()
    return store, [link for inode, link in after.items() if inode not in before]


def links_to(port: int) -> dict[str, socket.socket]:
    """Duplicates of our sockets that are connected to ``port``, one for each, by what names it."""
    found: dict[str, socket.socket] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
            if not target.startswith("socket:") or target in found:  # in two descriptors
                continue
            link = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # closed meanwhile
        try:
            ours = link.family != socket.AF_UNIX and link.getpeername()[1] == port
        except OSError:
            ours = False  # not connected
        if ours:
            found[target] = link
        else:
            link.close()
    return found


def set_deadline(link: socket.socket, seconds: float) -> None:
    """No answer may take longer; then the call fails, and the client is of no use any more."""
    whole = int(seconds)
    rest = round((seconds - whole) * 1e6) if whole or seconds > 1e-6 else 1
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", whole, rest))
