"""The worker's end of the control channel: JSON lines over the agent's Unix socket.

Level-triggered: the messages that tell where this worker stands are kept and sent again when the
agent has been restarted, so the two agree after any interruption. They lie in a file as well: a
worker that dies before it has found the next agent has said them all the same. A lost connection
does not disturb the training.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable
from os import replace  # by name: the replay puts its door into the module
from typing import Any

from flashrun.socket_path import address

RECONNECT = 0.05  # s between attempts while the agent is away


class Channel:
    """See the module.

    Args:
        path: of the agent's socket.
        hello: what to say first on each connection (token included).
        receive: called for each message, on the channel's thread.
        left: file that holds what stands; see `messages.left`.
        incarnation: of this process of the rank.
    """

    def __init__(
        self,
        path: str,
        hello: Callable[[], dict[str, Any]],
        receive: Callable[[dict[str, Any]], None],
        left: str,
        incarnation: int,
    ) -> None:
        self._path = path
        self._hello = hello
        self._receive = receive
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._left = left
        self._incarnation = incarnation
        self._standing: dict[str, bytes] = {}
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
        line = json.dumps(message).encode() + b"\n"
        with self._lock:
            if standing is not None:
                self._standing[standing] = line
                self._leave()
            self._write(line)

    def withdraw(self, *standing: str) -> None:
        with self._lock:
            before = len(self._standing)
            for subject in standing:
                self._standing.pop(subject, None)
            if len(self._standing) < before:
                self._leave()

    def _leave(self) -> None:
        """Nobody needs it but where the agent and this worker die at once: no room is no reason to
        disturb the training."""
        head = json.dumps({"incarnation": self._incarnation}).encode() + b"\n"
        with contextlib.suppress(OSError):
            fd = os.open(self._left + ".new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC,
                         0o600)  # fmt: skip
            try:
                content = b"".join([head, *self._standing.values()])
                if os.write(fd, content) == len(content):
                    replace(self._left + ".new", self._left)
            finally:
                os.close(fd)

    def _write(self, line: bytes) -> None:
        if self._socket is None:
            return
        try:
            self._socket.sendall(line)
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
                self._write(json.dumps(self._hello()).encode() + b"\n")
                for line in self._standing.values():
                    self._write(line)
            with connection, connection.makefile("rb") as file:
                try:
                    for said in file:
                        self._receive(json.loads(said))
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
