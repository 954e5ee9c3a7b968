"""How copies of what ranks leave go from node to node: a line of JSON with the job's token first,
then frames, each a line of JSON, the bytes that it describes, and their checksum. Nothing is
unpickled."""

from __future__ import annotations

import hmac
import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from flashrun.node.following import Patch
from flashrun.node.leavings import LARGEST_KEPT, Piece
from flashrun.seals import Seal
from flashrun.worker.checksum import checksum_of

_LONGEST_LINE = 8 << 20
_MOST = 4 * LARGEST_KEPT  # bytes of one frame


class BadFrame(ValueError):
    """The peer talks nonsense, or what it sent was damaged on the way."""


@dataclass(frozen=True)
class Peer:
    """One end of a connection."""

    sock: socket.socket
    file: BinaryIO

    @classmethod
    def on(cls, sock: socket.socket, patience_s: float) -> Peer:
        """Each call ends after ``patience_s`` without a byte."""
        sock.settimeout(patience_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return cls(sock, cast("BinaryIO", sock.makefile("rb", buffering=1 << 18)))

    def say(self, word: dict[str, Any], content: Sequence[bytes] = ()) -> None:
        """Raises OSError."""
        joined = b"".join(content)
        line = json.dumps({**word, "bytes": len(joined)}).encode() + b"\n"
        self.sock.sendall(line + joined + checksum_of(memoryview(joined)).to_bytes(8, "little"))

    def hear(self, most: int = _MOST) -> tuple[dict[str, Any], memoryview] | None:
        """None: the peer has ended.

        Raises:
            BadFrame, OSError: see there.
        """
        line = self.file.readline(_LONGEST_LINE)
        if not line:
            return None
        if not line.endswith(b"\n"):
            raise BadFrame("a line without an end")
        word = json.loads(line)
        size = int(word["bytes"])
        if not 0 <= size <= most:
            raise BadFrame(f"a frame of {size} bytes")
        content = self.file.read(size)
        check = self.file.read(8)
        view = memoryview(content)
        if len(content) != size or int.from_bytes(check, "little") != checksum_of(view):
            raise BadFrame("a frame whose checksum is wrong")
        return word, view

    def close(self) -> None:
        self.file.close()
        self.sock.close()


def is_known(word: dict[str, Any], token: str) -> bool:
    """Whether the peer has the job's token."""
    return hmac.compare_digest(str(word.get("token", "")).encode(), token.encode())


def send_pieces(peer: Peer, pieces: Sequence[Piece]) -> None:
    """Raises OSError."""
    said = [
        {
            "rank": piece.rank,
            "seal": None if piece.seal is None else [piece.seal.incarnation, piece.seal.boundary],
            "afresh": piece.afresh,
            "patches": [[p.path, p.size, p.offset, len(p.content)] for p in piece.patches],
        }
        for piece in pieces
    ]
    peer.say({"pieces": said}, [p.content for piece in pieces for p in piece.patches])


def pieces_of(word: dict[str, Any], content: memoryview) -> list[Piece]:
    """What `send_pieces` was given.

    Raises:
        BadFrame: see there.
    """
    at = 0
    pieces = []
    for said in word["pieces"]:
        patches = []
        for path, size, offset, length in said["patches"]:
            check_path(path)
            if not 0 <= offset <= offset + length <= size or at + length > len(content):
                raise BadFrame(f"a piece of {path} that does not fit")
            patches.append(Patch(path, size, offset, bytes(content[at : at + length])))
            at += length
        seal = None if said["seal"] is None else Seal(*said["seal"])
        pieces.append(Piece(int(said["rank"]), patches, seal, bool(said["afresh"])))
    return pieces


def check_path(path: str) -> None:
    """Raises BadFrame for one that leads elsewhere."""
    if os.path.isabs(path) or os.path.normpath(path) != path or path.startswith(".."):
        raise BadFrame(f"a path {path!r}")
