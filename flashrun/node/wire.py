"""Messages between the processes of one node: JSON over a SOCK_SEQPACKET socket pair.

A packet is one message: no framing, no partial reads, and the end of the other process is an
empty packet. The peers are parent and child, so no authentication is needed; JSON keeps a broken
peer from doing more than send a wrong value.
"""

from __future__ import annotations

import json
import socket
from typing import Any

Message = dict[str, Any]

# A packet has to fit into the send buffer, which net.core.wmem_max caps (212,992 bytes on an
# untouched kernel). What is large is inherited by fork, not sent.
_BUFFER = 4 << 20
_LIMIT = 180_000


class Wire:
    """One end of a socket pair that carries messages.

    Attributes:
        closed: the other end is gone; ``send`` is then a no-op that returns False.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self.closed = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message) -> bool:
        """Send one message; blocks only while the peer's buffer is full.

        Returns:
            False if the peer is gone (its replacement is told the whole state anyway).

        Raises:
            ValueError: the message is larger than a packet may be.
        """
        if self.closed:
            return False
        packet = json.dumps(message).encode()
        if len(packet) > _LIMIT:
            raise ValueError(f"a message of {len(packet)} bytes ({message.get('op')}) is too large")
        try:
            self._socket.send(packet)
        except (BrokenPipeError, ConnectionResetError):
            self.closed = True
            return False
        return True

    def receive(self, wait: bool = True) -> Message | None:
        """The next message; None: the peer is gone.

        Args:
            wait: block until there is one; otherwise None as well if there is none now.
        """
        if self.closed:
            return None
        try:
            packet = self._socket.recv(_LIMIT, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            packet = b""
        if not packet:
            self.closed = True
            return None
        message: Message = json.loads(packet)
        return message

    def close(self) -> None:
        self.closed = True
        self._socket.close()

    def forget(self) -> None:
        """Let go of a descriptor that has been closed behind this object's back (after a fork)."""
        self.closed = True
        self._socket.detach()


def pair() -> tuple[Wire, Wire]:
    """Two connected ends."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
    return Wire(ends[0]), Wire(ends[1])
