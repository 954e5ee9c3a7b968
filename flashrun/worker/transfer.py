"""Moves tensors between workers: raw bytes over TCP, described by JSON, checked.

One request per connection. The client sends a line ``{"token": ..., "request": ...}``; the server
answers a line with a header, then the bytes, then a line with their checksum. Nothing is unpickled.
On one node sockets are on the loopback, on several on the job's interface; the token of the job
lets nobody else in.
"""

from __future__ import annotations

import hmac
import itertools
import json
import socket
import threading
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO, cast

from flashrun.worker.checksum import BLOCK, Checksum

LOOPBACK = "127.0.0.1"
_LONGEST_LINE = 1 << 28

Provider = Callable[[dict[str, Any]], tuple[dict[str, Any], Iterable[memoryview]]]


class TransferError(RuntimeError):
    """A peer refused, went away, or sent what its checksum does not fit."""


class Refused(TransferError):
    """The peer does not have what it was asked for; it would say the same again."""


class Server:
    """Answers peers, each connection in a thread of its own.

    Args:
        token: the job's secret.
        provider: from a request to header and bytes; raises LookupError for what can't be had.
        host: where to listen; numeric, ``::`` for all interfaces.
    """

    def __init__(self, token: str, provider: Provider, host: str = "") -> None:
        self._token = token
        self._provider = provider
        self._listener = _listen(host or LOOPBACK)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="flashrun-data", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(
                target=self._serve, args=(connection,), name="flashrun-send", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(60)
            try:
                with connection.makefile("rb") as file:
                    asked = _line(file)
                given = str(asked.get("token", ""))
                if not hmac.compare_digest(given.encode(), self._token.encode()):
                    return
                try:
                    header, parts = self._provider(asked["request"])
                except LookupError as error:
                    header, parts = {"error": str(error)}, ()
                connection.sendall(json.dumps(header).encode() + b"\n")
                checksum = Checksum()
                for part in parts:
                    for at in range(0, len(part), BLOCK):
                        block = part[at : at + BLOCK]
                        checksum.add(block)
                        connection.sendall(block)
                connection.sendall(json.dumps({"checksum": checksum.value}).encode() + b"\n")
            except (OSError, ValueError):
                return  # the peer went away or talks nonsense; it sees an end of the stream

    def close(self) -> None:
        self._listener.close()


def _listen(host: str) -> socket.socket:
    everywhere = host == "::"
    if everywhere and not socket.has_dualstack_ipv6():
        host = "0.0.0.0"
    return socket.create_server(
        (host, 0),
        family=socket.AF_INET6 if ":" in host else socket.AF_INET,
        backlog=64,
        dualstack_ipv6=everywhere and ":" in host,
    )


def _line(file: BinaryIO) -> dict[str, Any]:
    line = file.readline(_LONGEST_LINE)
    if not line.endswith(b"\n"):
        raise TransferError("the peer ended in the middle of a message")
    value = json.loads(line)
    if not isinstance(value, dict):
        raise TransferError("the peer sent something that is not an object")
    return value


class Fetch:
    """One request to one peer at ``host:port``.

    Raises:
        TransferError: refused, broken, or nothing for `deadline` seconds.
    """

    def __init__(
        self, address: str, token: str, request: dict[str, Any], deadline: float
    ) -> None:
        host, _, port = address.rpartition(":")
        try:
            self._socket = socket.create_connection((host.strip("[]"), int(port)), deadline)
            self._socket.sendall(
                json.dumps({"token": token, "request": request}).encode() + b"\n"
            )
            self._file = cast("BinaryIO", self._socket.makefile("rb", buffering=1 << 20))
            self.header = _line(self._file)
        except (OSError, ValueError) as error:
            raise TransferError(f"asking the peer at {address}: {error}") from error
        if "error" in self.header:
            self.close()
            raise Refused(str(self.header["error"]))

    def into(self, parts: Iterable[memoryview]) -> int:
        """Read the bytes into `parts` and check them; returns how many there were."""
        checksum = Checksum()
        total = 0
        try:
            for part in parts:
                for at in range(0, len(part), BLOCK):
                    block = part[at : at + BLOCK]
                    total += self._fill(block, total)
                    checksum.add(block)
            said = _line(self._file).get("checksum")
        except (OSError, ValueError) as error:
            raise TransferError(f"after {total} bytes: {error}") from error
        finally:
            self.close()
        if said != checksum.value:
            raise TransferError(
                f"checksum {checksum.value} of {total} bytes is not the sender's: {said}"
            )
        return total

    def _fill(self, block: memoryview, before: int) -> int:
        """Read until `block` is full; returns its length."""
        done = 0
        while done < len(block):
            count = self._file.readinto(block[done:])  # type: ignore[attr-defined]
            if not count:
                raise TransferError(f"the peer ended after {before + done} bytes")
            done += count
        return done

    def close(self) -> None:
        self._file.close()
        self._socket.close()


def cut(parts: Iterable[memoryview], low: int, high: int) -> Iterable[memoryview]:
    """Bytes [low, high) of the concatenation of `parts`."""
    at = 0
    for part in parts:
        start, end = max(low - at, 0), min(high - at, len(part))
        if start < end:
            yield part[start:end]
        at += len(part)
        if at >= high:
            return


def shares(total: int, number: int) -> list[tuple[int, int]]:
    """[0, total) in `number` ranges of about the same size."""
    edges = [total * i // number for i in range(number + 1)]
    return list(itertools.pairwise(edges))
