"""The agent's end of the workers' channel: who is connected, and JSON lines in both directions.

Workers connect again whenever the agent is restarted, and repeat where they stand; what was last
said to them is repeated as well, since it may have been lost with the connection before.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import selectors
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flashrun import messages
from flashrun.messages import Message
from flashrun.observe.console import say
from flashrun.socket_path import address

# Said once and not asked for again; the rest is the recovery machine's answer to a hello.
_REPEATED = ("confirmed", "own", "others", "exit", "stopping")


@dataclass(eq=False)
class _Connection:
    """One worker's connection; who it is, once it has said so with the token."""

    sock: socket.socket
    buffer: bytes = b""
    rank: int = -1
    incarnation: int = -1


class WorkersChannel:
    """See the module.

    Args:
        path: of the socket.
        token: the job's secret.
        backlog: connections at once.
        selector: of the agent's loop.
        incarnation_of: the present one of a rank.
        on_message: takes rank, incarnation and message.
        repeated: what the agent before this one had last said.
    """

    def __init__(
        self,
        path: str,
        token: str,
        backlog: int,
        selector: selectors.BaseSelector,
        incarnation_of: Callable[[int], int],
        on_message: Callable[[int, int, Message], None],
        repeated: dict[str, dict[str, Message]] | None = None,
    ) -> None:
        self.path = path
        self._token = token
        self._selector = selector
        self._incarnation_of = incarnation_of
        self._on_message = on_message
        self.repeated = repeated or {}
        self._connections: dict[int, _Connection] = {}
        self._open: set[_Connection] = set()
        self._heard: set[tuple[int, int]] = set()  # who has connected: rank, incarnation
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # of the agent before this one
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with address(path) as short:
            self._listener.bind(short)
        self._listener.listen(backlog)
        self._listener.setblocking(False)
        selector.register(self._listener, selectors.EVENT_READ, self._on_readable)

    def close(self) -> None:
        self._selector.unregister(self._listener)
        self._listener.close()
        for connection in list(self._open):
            self._drop(connection)
        os.unlink(self.path)

    def hear_out(self, rank: int, incarnation: int) -> None:
        """The process of a rank has ended: pass on what it said last, since the word of its end
        comes another way. And what it would have told this agent, had it found it."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self._on_connect()
        for connection in list(self._open):
            while self._on_data(connection):
                pass
        if (rank, incarnation) not in self._heard:
            for message in self._left(rank, incarnation):
                self._on_message(rank, incarnation, message)

    def _left(self, rank: int, incarnation: int) -> list[Message]:
        try:
            with open(messages.left(self.path, rank), "rb") as file:
                head, *said = map(json.loads, file)
        except OSError:
            return []
        return said if head["incarnation"] == incarnation else []

    def forget(self, rank: int) -> None:
        """The rank's process is another one from now on."""
        self._connections.pop(rank, None)
        self.repeated.pop(str(rank), None)

    def send(self, rank: int, message: Message) -> None:
        """Say something to the present process of a rank."""
        self.note(rank, message)
        connection = self._connections.get(rank)
        if connection is not None:  # else: it connects again, or its exit is coming
            self._write(connection, message)

    def note(self, rank: int, message: Message) -> None:
        """It will be said; the next agent repeats it should this one not come to it."""
        if message["op"] in _REPEATED:
            self.repeated.setdefault(str(rank), {})[message["op"]] = message

    def _write(self, connection: _Connection, message: Message) -> None:
        try:
            connection.sock.setblocking(True)
            connection.sock.sendall(json.dumps(message).encode() + b"\n")
            connection.sock.setblocking(False)
        except OSError:
            self._drop(connection)

    def _on_readable(self) -> None:
        with contextlib.suppress(BlockingIOError):  # heard out after the loop had seen it
            self._on_connect()

    def _on_connect(self) -> None:
        sock, _ = self._listener.accept()
        sock.setblocking(False)
        connection = _Connection(sock)
        self._open.add(connection)
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._on_data(connection))

    def _drop(self, connection: _Connection) -> None:
        if connection not in self._open:
            return
        self._selector.unregister(connection.sock)
        connection.sock.close()
        self._open.discard(connection)
        if self._connections.get(connection.rank) is connection:
            del self._connections[connection.rank]

    def _on_data(self, connection: _Connection) -> bool:
        """Whether there was something."""
        if connection not in self._open:
            return False  # dropped after the loop had seen that there is something to read
        try:
            data = connection.sock.recv(1 << 20)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._drop(connection)
            return False
        *lines, connection.buffer = (connection.buffer + data).split(b"\n")
        for line in lines:
            if connection not in self._open:
                return False
            self._on_line(connection, json.loads(line))
        return True

    def _on_line(self, connection: _Connection, message: dict[str, Any]) -> None:
        if message["op"] == "hello" and not self._greeted(connection, message):
            self._drop(connection)
        elif connection.rank >= 0:
            self._on_message(connection.rank, connection.incarnation, message)
            if message["op"] == "hello":
                for said in list(self.repeated.get(str(connection.rank), {}).values()):
                    self._write(connection, said)

    def _greeted(self, connection: _Connection, hello: dict[str, Any]) -> bool:
        if not hmac.compare_digest(str(hello.get("token", "")), self._token):
            say("somebody without the job's token tried the workers' channel", "warning",
                event="stranger")  # fmt: skip
            return False
        rank, incarnation = int(hello["rank"]), int(hello["incarnation"])
        if incarnation < self._incarnation_of(rank):
            # A dead worker's last connection, read late: it must not take the place of the one
            # that its replacement may already have, which would never be told anything again.
            return False
        connection.rank, connection.incarnation = rank, incarnation
        self._connections[rank] = connection
        self._heard.add((rank, incarnation))
        return True
