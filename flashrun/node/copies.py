"""Copies of what another node's ranks leave: kept while it lives, handed to the spare that takes
its place.

They lie on disk (the page cache, mostly), in the folder of old files, not in the shared memory that
this node's own ranks write to.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flashrun import seals
from flashrun.node.copy_frames import BadFrame, Peer, check_path, is_known, pieces_of
from flashrun.node.following import Patch
from flashrun.node.leavings import REGISTRY, Piece
from flashrun.rendezvous.server import StoreInUse, StoreNotBound, open_listener
from flashrun.seals import Seal
from flashrun.worker.private import PER_RANK
from flashrun.worker.replay.registry import KEPT, Line

IDLE_S = 60.0  # without a frame, after which a sender counts as gone (it sends one every 10 s)
_FETCH_S = 30.0
_PORT = "port"  # file
_PART = 16 << 20  # bytes of a frame of a hand-over


class NoCopy(LookupError):
    """There is none, or not a whole one; the message says why."""


class _Copy:
    """Of what the ranks of one node leave, as far as one connection of it has sent that.

    It outlives the agent: the seal of each rank lies beside its files, and is taken away while
    these are not whole.

    Args:
        root: folder for it; what is there is taken up.

    Attributes:
        seals: of the ranks whose part is whole: up to where.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / "files"
        self.lock = threading.Lock()
        self._torn = root / "torn"  # while what belongs to no rank is written
        self._dropped = False
        self.folder.mkdir(parents=True, exist_ok=True)
        ranks = [int(path.suffix[1:]) for path in root.glob("sealed.*")]
        found = {} if self._torn.exists() else {rank: Seal.read(root, rank) for rank in ranks}
        self.seals = {rank: seal for rank, seal in found.items() if seal is not None}

    def take(self, piece: Piece) -> None:
        """Raises OSError: it was dropped."""
        with self.lock:
            if self._dropped:
                raise OSError("another copy has its place")
            if piece.rank < 0:
                whole, self.seals = self.seals, {}
                self._torn.touch()
                self._put_all(piece)
                self._torn.unlink()
                self.seals = whole
                return
            if self.seals.pop(piece.rank, None) is not None:
                self._mark(piece.rank, bytes(seals.SIZE))
            if piece.afresh:
                self._forget(piece.rank)
            self._put_all(piece)
            if piece.seal is not None:
                self._mark(piece.rank, piece.seal.pack())
                self.seals[piece.rank] = piece.seal

    def _mark(self, rank: int, raw: bytes) -> None:
        """In place: nothing but its content changes at each boundary."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        fd = os.open(seals.path(self.root, rank), flags, 0o600)
        try:
            os.pwrite(fd, raw, 0)
        finally:
            os.close(fd)

    def lacks(self, ranks: Sequence[int]) -> list[int]:
        """Those of which it has nothing whole."""
        return [r for r in ranks if r not in self.seals]

    def reaches(self, ranks: Sequence[int]) -> tuple[int, int]:
        """Up to where it has all of them, for comparison: boundary, incarnation; (-1, -1): it has
        not."""
        with self.lock:
            if self.lacks(ranks):
                return -1, -1
            found = [self.seals[rank] for rank in ranks]
        return min(s.boundary for s in found), min(s.incarnation for s in found)

    def drop(self) -> None:
        with self.lock:
            self._dropped = True
            self.seals.clear()
            shutil.rmtree(self.root, ignore_errors=True)

    def _forget(self, rank: int) -> None:
        shutil.rmtree(self.folder / f"replay/rank{rank}", ignore_errors=True)
        for name in PER_RANK:
            (self.folder / f"{name}.{rank}").unlink(missing_ok=True)

    def _put_all(self, piece: Piece) -> None:
        for patch in piece.patches:
            self._put(patch)

    def _put(self, patch: Patch) -> None:
        path = self.folder / patch.path
        path.parent.mkdir(parents=True, exist_ok=True)
        grows = patch.path == REGISTRY
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            size = os.fstat(fd).st_size
            if size != patch.size:
                if size and not grows:
                    os.ftruncate(fd, 0)
                os.ftruncate(fd, patch.size)
            os.pwrite(fd, patch.content, patch.offset)
        finally:
            os.close(fd)


class Keeper:
    """Takes copies in, and hands them out.

    Args:
        folder: for them.
        host: where to listen; numeric, ``::`` for all interfaces.
        token: the job's secret.
        fresh: what is there is of no use; otherwise it is taken up: the agent before this one has
            kept it, in the same round.
    """

    def __init__(self, folder: Path, host: str, token: str, fresh: bool = True) -> None:
        self._folder = folder
        self._token = token
        self._copies: dict[str, list[_Copy]] = {}  # node -> as they came
        self._number = 0
        self._lock = threading.Lock()
        self._peers: set[Peer] = set()
        if fresh:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            self._take_up()
        self._listener = self._listen(host)
        self.port = int(self._listener.getsockname()[1])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _PORT).write_text(str(self.port))
        self._thread = threading.Thread(target=self._accept, name="copies", daemon=True)
        self._thread.start()

    def _listen(self, host: str) -> socket.socket:
        """Where the one before did, if there was one: whoever streams to it finds this one at once,
        without a word from the control store."""
        try:
            return open_listener(host, int((self._folder / _PORT).read_text()))
        except (StoreInUse, StoreNotBound, FileNotFoundError, ValueError):
            return open_listener(host, 0)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        with self._lock:
            for peer in self._peers:
                peer.sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(
                target=self._serve, args=(Peer.on(sock, IDLE_S),), name="copy", daemon=True
            ).start()

    def _serve(self, peer: Peer) -> None:
        with self._lock:
            self._peers.add(peer)
        try:
            heard = peer.hear(0)
            if heard is None or not is_known(heard[0], self._token):
                return
            word = heard[0]
            if word["op"] == "keep":
                self._keep(peer, str(word["node"]))
            else:
                self._hand_over(peer, word["nodes"], word["ranks"])
        except (OSError, ValueError, KeyError, TypeError):
            return  # gone, or damaged: whoever sends connects again, and begins anew
        finally:
            with self._lock:
                self._peers.discard(peer)
            peer.close()

    def _keep(self, peer: Peer, node: str) -> None:
        if not node.isalnum():
            raise BadFrame(f"a node {node!r}")
        with self._lock:
            self._number += 1
            copy = _Copy(self._folder / f"{node}.{self._number}")
            # The one before stands until this one is whole: the node may be lost on the way.
            before = self._copies.setdefault(node, [])
            best = sorted(before, key=lambda c: len(c.seals))[-1:]
            useless = [c for c in before if c not in best]
            self._copies[node] = [*best, copy]
        while True:
            for old in useless:
                old.drop()
            heard = peer.hear()
            if heard is None:
                return
            for piece in pieces_of(*heard):
                copy.take(piece)
            useless = self._replaced_by(node, copy)

    def _replaced_by(self, node: str, copy: _Copy) -> list[_Copy]:
        """Those before it, if it has all that they have; nobody is given them any more."""
        with self._lock:
            known = self._copies[node]
            if copy not in known or known[0] is copy:
                return []
            before = known[: known.index(copy)]
            if any(copy.lacks(list(old.seals)) for old in before):
                return []
            self._copies[node] = known[known.index(copy) :]
            return before

    def _take_up(self) -> None:
        """Of one that is not whole, nothing is of use."""
        for root in sorted(self._folder.glob("*.*"), key=lambda path: int(path.suffix[1:])):
            copy = _Copy(root)
            self._number = int(root.suffix[1:])
            if copy.seals:
                self._copies.setdefault(root.stem, []).append(copy)
            else:
                copy.drop()

    def _hand_over(self, peer: Peer, nodes: list[str], ranks: list[int]) -> None:
        with self._lock:
            copies = [copy for node in nodes for copy in reversed(self._copies.get(node, []))]
        if not copies:
            peer.say({"error": "it has none of that node"})
            return
        # (Of a node that has come back, the one of its first time may be older than another's.)
        copy = max(copies, key=lambda c: c.reaches(ranks))
        with copy.lock:
            missing = copy.lacks(ranks)
            if missing:
                peer.say({"error": f"what it has of rank(s) {missing} is not whole"})
                return
            boundaries = {str(rank): copy.seals[rank].boundary for rank in ranks}
            files = [p for p in sorted(copy.folder.rglob("*")) if p.is_file()]
            peer.say({"boundaries": boundaries, "files": len(files)})
            for file in files:
                _send_file(peer, str(file.relative_to(copy.folder)), file)


def _extents(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """Where there is anything in a file with holes."""
    at = 0
    while at < size:
        try:
            at = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:
            return  # nothing but a hole is left
        end = os.lseek(fd, at, os.SEEK_HOLE)
        while at < end:
            part = min(end - at, _PART)
            yield at, part
            at += part


def _send_file(peer: Peer, name: str, path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        extents = list(_extents(file.fileno(), size))
        peer.say({"path": name, "size": size, "parts": [at for at, _ in extents]})
        for at, length in extents:
            peer.say({}, [os.pread(file.fileno(), length, at)])


# --- the spare's side -----------------------------------------------------------------------------


def fetch(
    address: tuple[str, int],
    token: str,
    nodes: Sequence[str],
    ranks: list[int],
    run_dir: Path,
    holder: str,
) -> None:
    """Take over what the ranks of a lost node have left: into this node's own folder.

    Args:
        address: of the keeper.
        nodes: that had these ranks, the last one first: whose copy is whole counts.
        holder: the keeper's node, for people.

    Raises:
        NoCopy: there is none, or it did not come.
    """
    try:
        peer = Peer.on(socket.create_connection(address, _FETCH_S), _FETCH_S)
        try:
            peer.say({"op": "fetch", "token": token, "nodes": list(nodes), "ranks": ranks})
            word, _ = _heard(peer)
            if "error" not in word:
                for _ in range(int(word["files"])):
                    _take_file(peer, run_dir)
        finally:
            peer.close()
    except (OSError, ValueError, KeyError) as error:
        raise NoCopy(f"the node at {holder} did not hand its copy over: {error}") from error
    if "error" in word:
        raise NoCopy(f"the node at {holder} says: {word['error']}")
    _adapt_registry(run_dir)
    for rank in ranks:
        said = {"boundary": word["boundaries"][str(rank)], "holder": holder}
        seals.copied(run_dir, rank).write_text(json.dumps(said))


def _heard(peer: Peer) -> tuple[dict[str, Any], memoryview]:
    heard = peer.hear()
    if heard is None:
        raise BadFrame("it ended too early")
    return heard


def _take_file(peer: Peer, run_dir: Path) -> None:
    word, _ = _heard(peer)
    check_path(word["path"])
    name = word["path"] if word["path"] != REGISTRY else f"{REGISTRY}.copied"
    path = run_dir / name
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        if word["size"]:
            os.posix_fallocate(fd, 0, int(word["size"]))
        for at in word["parts"]:
            os.pwrite(fd, _heard(peer)[1], int(at))
    finally:
        os.close(fd)


def _adapt_registry(run_dir: Path) -> None:
    """The old files of the lost node lie in this node's folder now; what this node has kept before
    stands."""
    copied = run_dir / f"{REGISTRY}.copied"
    if not copied.exists():
        return
    registry = run_dir / REGISTRY
    known = set()
    if registry.exists():
        known = {Line.parse(line).path for line in registry.read_bytes().splitlines()}
    with registry.open("ab") as file:
        for line in copied.read_bytes().splitlines():
            said = Line.parse(line)
            if said.path in known:
                continue
            if said.content is not None:
                kept = str(run_dir / "view" / KEPT / os.path.basename(said.content))
                said = replace(said, kept=kept)
            file.write(said.pack())
    copied.unlink()
