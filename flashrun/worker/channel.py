"""The worker's end of the control channel: JSON lines over the agent's Unix socket.

Level-triggered: the messages that tell where this worker stands are kept and sent again when the
agent has been restarted, so the two agree after any interruption. A lost connection does not
disturb the training.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from typing import Any

from flashrun.socket_path import address

RECONNECT = 0.05  # s between attempts while the agent is away


class Channel:
    """See the module.

    Args:
        path: of the agent's socket.
        hello: what to say first on each connection (token included).
        receive: called for each message, on the channel's thread.
    """

    def __init__(
        self,
        path: str,
        hello: Callable[[], dict[str, Any]],
        receive: Callable[[dict[str, Any]], None],
    ) -> None:
        self._path = path
        self._hello = hello
        self._receive = receive
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._standing: dict[str, dict[str, Any]] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flashrun-channel", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, message: dict[str, Any], standing: str | None = None) -> None:
        """Send; never blocks on an agent that is away.

        Args:
            standing: the message is this worker's present word on that subject, to be repeated
                after a reconnection. Others are lost with the connection.
        """
        with self._lock:
            if standing is not None:
                self._standing[standing] = message
            self._write(message)

    def withdraw(self, standing: str) -> None:
        with self._lock:
            self._standing.pop(standing, None)

    def _write(self, message: dict[str, Any]) -> None:
        if self._socket is None:
            return
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self._socket = None  # the reader sees it as well and connects again

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                with address(self._path) as short:
                    connection.connect(short)
            except OSError:
                connection.close()
                self._closed.wait(RECONNECT)
                continue
            with self._lock:
                self._socket = connection
                self._write(self._hello())
                for message in self._standing.values():
                    self._write(message)
            with connection, connection.makefile("rb") as file:
                try:
                    for line in file:
                        self._receive(json.loads(line))
                except OSError:
                    continue
                finally:
                    with self._lock:
                        self._socket = None

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            if self._socket is not None:
                self._socket.shutdown(socket.SHUT_RDWR)
