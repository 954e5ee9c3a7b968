"""Asks whether a TCPStore answers at an address, with a deadline.

torch's client has none there: it waits for ever for the answer of a listener that says nothing,
and prints stack traces for one that says something else (torch 2.13). So the first two messages
that it sends are sent from here before. Wire format of ``torch/csrc/distributed/c10d/TCPStore.cpp``
and ``TCPStoreBackend.hpp``, unchanged since torch 2.3: one byte ``VALIDATE`` (0) with a magic
number, then ``PING`` (13) with a number that comes back; integers as the machine has them.
"""

from __future__ import annotations

import os
import socket
import struct

_VALIDATE = struct.pack("=BI", 0, 0x3C85F7CE)
_PING = 13


class NotAStore(RuntimeError):
    """Something listens there, but it is not a TCPStore."""


def probe_store(address: str, port: int, connect_s: float, answer_s: float) -> None:
    """Return when a TCPStore answers at the numeric ``address``.

    Raises:
        OSError: no connection within ``connect_s`` seconds.
        NotAStore: no or a wrong answer within ``answer_s`` seconds.
    """
    nonce = struct.pack("=I", os.getpid())
    with socket.create_connection((address, port), timeout=connect_s) as link:
        link.settimeout(answer_s)
        answer = b""
        try:
            link.sendall(_VALIDATE + struct.pack("=B", _PING) + nonce)
            while len(answer) < len(nonce):
                more = link.recv(len(nonce) - len(answer))
                if not more:
                    break
                answer += more
        except TimeoutError:
            raise NotAStore(f"it accepts connections but says nothing for {answer_s:g} s") from None
        except OSError as error:
            raise NotAStore(f"it broke the connection ({error.strerror})") from error
    if answer != nonce:
        raise NotAStore("it closed the connection" if not answer else "it speaks something else")
