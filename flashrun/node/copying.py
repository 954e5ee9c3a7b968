"""Streams what this node's ranks leave to the next node of the ring, in a thread of its own: a step
waits for nothing of it. Whoever takes over in the ring gets all of it anew."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashrun import seals
from flashrun.node.copy_frames import Peer, send_pieces
from flashrun.node.leavings import Leavings

PING_S = 10.0
_PATIENCE_S = 10.0  # for a peer that takes nothing
_CONNECT_S = 5.0
_FIRST_AGAIN_S, _AGAIN_S = 0.05, 0.5  # between two attempts
_TELL_AFTER_S = 3.0


@dataclass(frozen=True)
class Holder:
    """The node that is to hold the copies, and where it takes them."""

    node: str
    host: str
    port: int


class CopyStream:
    """See the module.

    Args:
        run_dir: private folder of the job on this node.
        node: this one's id.
        ranks: its.
        token: the job's secret.
        find: who holds the copies; None: not known (yet). Called in the thread; may raise OSError.
        say: takes a line for people.
        fresh: the workers of this round have not been started.
    """

    def __init__(
        self,
        run_dir: Path,
        node: str,
        ranks: Sequence[int],
        token: str,
        find: Callable[[], Holder | None],
        say: Callable[[str], None],
        fresh: bool,
    ) -> None:
        self._run_dir = run_dir
        self._node = node
        self._ranks = ranks
        self._token = token
        self._find = find
        self._say = say
        self._failed = False
        self._pause = _FIRST_AGAIN_S
        self._failing_since: float | None = None
        self._closed = threading.Event()
        self._moved = False
        if fresh:
            for rank in ranks:
                seals.path(run_dir, rank).unlink(missing_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkfifo(seals.bell(run_dir), 0o600)
        self._bell = seals.open_bell(run_dir)
        self._thread = threading.Thread(target=self._run, name="copying", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def move(self) -> None:
        """The ring has changed."""
        self._moved = True
        seals.ring(self._bell)

    def close(self) -> None:
        self._closed.set()
        seals.ring(self._bell)
        self._thread.join(1.0)
        if not self._thread.is_alive():  # else: it waits for a peer, and ends with the process
            os.close(self._bell)

    # --- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._moved = False
                holder = self._find()
                if holder is not None:
                    self._stream(holder)
            except OSError as error:
                self._tell(error)
            if not self._moved:
                self._closed.wait(self._pause)
                self._pause = min(2 * self._pause, _AGAIN_S)

    def _tell(self, error: OSError) -> None:
        """Say it once, if it lasts: at a job's end one node goes a moment before the other."""
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = now
        lasts = now - self._failing_since >= _TELL_AFTER_S
        if lasts and not (self._failed or self._closed.is_set() or self._moved):
            self._failed = True
            self._say(
                "what this node's ranks leave is not copied to the next node at present, so the"
                f" loss of this node would restart all: {error}"
            )

    def _stream(self, holder: Holder) -> None:
        """Until the ring changes. Raises OSError."""
        sock = socket.create_connection((holder.host, holder.port), _CONNECT_S)
        peer = Peer.on(sock, _PATIENCE_S)
        leavings = Leavings(self._run_dir, self._ranks)
        try:
            peer.say({"op": "keep", "token": self._token, "node": self._node})
            said = time.monotonic()
            while not (self._closed.is_set() or self._moved):
                for piece in leavings.more():
                    send_pieces(peer, [piece])
                    said = time.monotonic()
                    if self._failed:
                        self._failed = False
                        self._say("what this node's ranks leave is copied to the next node again")
                if time.monotonic() - said > PING_S:
                    send_pieces(peer, [])
                    said = time.monotonic()
                self._wait(sock)
                self._failing_since, self._pause = None, _FIRST_AGAIN_S
        finally:
            leavings.close()
            peer.close()

    def _wait(self, sock: socket.socket) -> None:
        """Until a rank has sealed a boundary. Raises OSError when the holder has ended."""
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        poll.register(sock, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(PING_S * 1e3)}
        if sock.fileno() in ready:
            raise ConnectionResetError("the node that holds the copies has closed the connection")
        if self._bell in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._bell, 1 << 16)
