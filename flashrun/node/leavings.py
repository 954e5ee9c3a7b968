"""What the ranks of a node leave for their replacements, as far as it is new: to be copied to
another node, which has it should this one be lost.

What a copy holds must be what a worker could have left that died a moment ago: if something is in
it, everything that was written before is in it as well. So files are read in the opposite order of
their writing: the seal first (all of a sealed boundary is written, so all of it is found), what
names a place in the log before the log, and what the log relies on (states, old files) after it. A
rank's part is given in pieces, the last of which makes it whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flashrun.node.following import Log, Outputs, Patch, Slots, Whole, numbered
from flashrun.seals import Seal
from flashrun.worker import own_code, private
from flashrun.worker.checksum import checksum_of
from flashrun.worker.replay import randomness
from flashrun.worker.replay.registry import KEPT, LEFT, Line

LARGEST_KEPT = 16 << 20  # bytes of an old file that is copied
MOST_KEPT = 64 << 20  # bytes of all of them
_PIECE = 4 << 20  # bytes, about
REGISTRY = "view/registry"


@dataclass(frozen=True)
class Piece:
    """Attributes:
    rank: whose; -1: the node's.
    seal: with the last piece, which makes it whole; None: more follows.
    afresh: what was copied before does not count.
    """

    rank: int
    patches: Sequence[Patch] = field(repr=False)
    seal: Seal | None = None
    afresh: bool = False


class Leavings:
    """Those of one node, in a round of its job.

    Args:
        run_dir: private folder of the job on this node.
        ranks: of the node.
    """

    def __init__(self, run_dir: Path, ranks: Sequence[int]) -> None:
        self._ranks = [_Rank(run_dir, rank) for rank in ranks]
        self._registry = _Registry(run_dir)

    def more(self) -> Iterator[Piece]:
        """What is new. Old files come before the part of the rank that relies on them is whole."""
        last = []
        for rank in self._ranks:
            for piece in rank.more():
                if piece.seal is None:
                    yield piece
                else:
                    last.append(piece)
        for patches in _bundled(self._registry.more()):
            yield Piece(-1, patches)
        yield from last

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()


def _bundled(patches: Iterable[Patch]) -> Iterator[list[Patch]]:
    """As many at once as make about `_PIECE` bytes."""
    size, bundle = 0, []
    for patch in patches:
        size += len(patch.content)
        bundle.append(patch)
        if size > _PIECE:
            yield bundle
            size, bundle = 0, []
    if bundle:
        yield bundle


def _whole(number: int, content: bytes, checksum: int) -> bool:
    return checksum_of(memoryview(content)) == checksum


class _Rank:
    """What one rank leaves."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._run_dir = run_dir
        self._rank = rank
        self._folder = f"replay/rank{rank}"
        self._seal: Seal | None = None
        self._begin()

    def _begin(self) -> None:
        root, rank, folder = self._run_dir, self._rank, self._folder
        self._boundaries = numbered(root, f"{folder}/boundaries", randomness._BOUNDARY_SLOTS)
        self._pending = numbered(root, f"{folder}/pending", randomness._RING_SLOTS)
        self._own = [
            Slots(root, f"{name}.{rank}", private._SLOTS, private._HEADER, _whole)
            for name in ("private", "own", "hooks")
        ]
        self._outputs = Outputs(root, f"{folder}/outputs")
        self._log = Log(root, folder)
        self._operations = Log(root, f"{folder}/operations")
        self._looks = Log(root, f"{folder}/looks")
        self._states = Log(root, f"{folder}/states")
        self._code = Log(root, f"{folder}/{own_code.FOLDER}")
        self._small = [Whole(root, f"unchanged.{rank}"), Whole(root, f"{folder}/restart-only")]

    def more(self) -> Iterator[Piece]:
        seal = Seal.read(self._run_dir, self._rank)
        if seal is None:
            return
        afresh = self._seal is None or seal.incarnation != self._seal.incarnation
        if afresh:  # another process goes on from an earlier place of the log
            self.close()
            self._begin()
        first = [*self._boundaries.more(), *(patch for file in self._own for patch in file.more())]
        size, patches = 0, list(self._pending.shape()) if afresh else []
        for patch in self._reliable():
            size += len(patch.content)
            patches.append(patch)
            if size > _PIECE:
                yield Piece(self._rank, patches, afresh=afresh)
                size, patches, afresh = 0, [], False
        patches += first
        if patches or seal != self._seal:
            yield Piece(self._rank, patches, seal, afresh)
        self._seal = seal

    def _reliable(self) -> Iterator[Patch]:
        yield from self._log.more()
        yield from self._log.tails(self._pending)
        if self._log.unfound:
            yield from self._states.more()
        yield from self._outputs.more()
        yield from self._operations.more()
        yield from self._looks.more()
        yield from self._code.more()
        for file in self._small:
            yield from file.more()

    def close(self) -> None:
        files: list[Any] = [
            self._boundaries, self._pending, *self._own, self._outputs, self._log,
            self._operations, self._looks, self._states, self._code, *self._small,
        ]  # fmt: skip
        for file in files:
            file.close()


class _Registry:
    """Which files were changed, and their old contents, where these are not too large."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / REGISTRY
        self._read = 0
        self._size = 0  # of what was given
        self._room = MOST_KEPT

    def more(self) -> Iterator[Patch]:
        try:
            with open(self._path, "rb") as file:
                file.seek(self._read)
                raw = file.read()
        except FileNotFoundError:
            return
        raw = raw[: raw.rfind(b"\n") + 1]
        if not raw:
            return
        self._read += len(raw)
        lines = []
        for line in raw.splitlines():
            said = Line.parse(line)
            if said.content is not None:
                name = os.path.basename(said.content)
                content = self._content(said.content)
                if content is None:
                    name = f"{LEFT}{os.lstat(said.content).st_size}"
                else:
                    yield Patch(f"view/{KEPT}/{name}", len(content), 0, content)
                said = replace(said, kept=name)
            lines.append(said.pack())
        text = b"".join(lines)
        self._size += len(text)
        yield Patch(REGISTRY, self._size, self._size - len(text), text)

    def _content(self, kept: str) -> bytes | None:
        if os.path.islink(kept) or not os.path.isfile(kept):
            return None
        size = os.path.getsize(kept)
        if size > min(LARGEST_KEPT, self._room):
            return None
        self._room -= size
        return Path(kept).read_bytes()
