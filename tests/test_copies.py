"""Copies of what ranks leave: whenever the node is lost, a copy is what a worker could have left
that died a little earlier, up to the boundary that it names."""

from __future__ import annotations

import json
import os
import random
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flashrun import messages, seals
from flashrun.node import leavings
from flashrun.node.copies import Keeper, NoCopy, _Copy, fetch
from flashrun.node.copy_frames import Peer
from flashrun.node.copy_ring import CopyRing
from flashrun.node.copying import CopyStream, Holder
from flashrun.node.following import Patch
from flashrun.node.leavings import Piece
from flashrun.rendezvous.table import RankTable, Seat, assign_ranks
from flashrun.seals import Seal
from flashrun.worker.own_code import FOLDER, OwnCode
from flashrun.worker.private import Private
from flashrun.worker.replay import kinds
from flashrun.worker.replay.api import Divergence
from flashrun.worker.replay.journal import Position, Reader, Tail, Writer
from flashrun.worker.replay.randomness import SlotFile
from flashrun.worker.replay.recent import Recent
from flashrun.worker.replay.registry import LEFT, Line
from flashrun.worker.sealing import Copied, Sealing
from tests import helpers

TOKEN = "a token"
_COUNT = struct.Struct("<Q")


class Rank:
    """Writes as a worker does (flashrun.worker.runtime.at_boundary), as fast as it can."""

    def __init__(self, run_dir: Path, seed: int) -> None:
        self.run_dir = run_dir
        self.folder = run_dir / "replay" / "rank0"
        (self.folder / "operations").mkdir(parents=True, exist_ok=True)
        self.draw = random.Random(seed)
        self.records: list[tuple[int, bytes]] = []
        self.at: dict[int, Position] = {}  # of boundaries, in the log
        self.length: dict[int, int] = {}
        self.boundary = 0
        self.open: list[tuple[Tail, int]] = []
        self.number = 0
        self.begin(0)

    def begin(self, incarnation: int, at: int = 0) -> None:
        fresh = not incarnation
        place = None if fresh else self.at[at]
        self.writer = Writer(self.folder, place)
        self.boundaries = SlotFile(self.folder / "boundaries", 16384, 8, fresh)
        self.pending = SlotFile(self.folder / "pending", 4096, 1024, fresh)
        self.outputs = Recent(self.folder, fresh)
        self.private = Private(self.run_dir, 0, fresh)
        environ = {messages.ADDRESS: "127.0.0.1", messages.RUN_DIR: str(self.run_dir)}
        self.sealing = Sealing(environ, 0, incarnation)
        if not fresh:
            del self.records[self.length[at] :]
            self.boundaries.drop_after(at)
            self.boundary, self.open = at, []

    def append(self, kind: int, payload: bytes) -> None:
        self.writer.append(kind, 7, payload)
        self.records.append((kind, payload))

    def step(self) -> None:
        b = self.boundary = self.boundary + 1
        for _ in range(self.draw.randrange(4)):
            self.append(kinds.ITEM, self.draw.randbytes(self.draw.choice([3, 50, 200])))
        if self.draw.random() < 0.02:
            self.append(kinds.CARRY, self.draw.randbytes(150_000))
        self.number += 1
        self.pending.put(self.number, state_of(self.number))
        payload = bytes(9) + _COUNT.pack(self.number)
        self.open.append((self.writer.append_open(kinds.DRAWS_OPEN, 0, payload), self.number))
        self.records.append((kinds.DRAWS_OPEN, payload))
        if len(self.open) > 5:
            tail, number = self.open.pop(0)
            tail.fill(number)
        self.outputs.keep(b, torch.full((b % 50,), float(b)))
        self.private.write(b, value_of(b, 1))  # not the last one
        self.private.write(b, value_of(b, 2))
        self.append(kinds.BOUNDARY, _COUNT.pack(b))
        self.append(kinds.CARRY, b"carried")
        self.boundaries.put(b, state_of(b))
        self.at[b], self.length[b] = self.writer.position(), len(self.records)
        self.sealing.seal(b)

    def run(self) -> None:
        for _ in range(1000):
            self.step()


def state_of(number: int) -> bytes:
    return random.Random(number).randbytes(2500)


def value_of(boundary: int, turn: int) -> bytes:
    return _COUNT.pack(boundary * 10 + turn) * 100


def check(copy: Path, rank: Rank) -> int:
    """The copy of a rank is one that it could have left; its boundary."""
    copied = Copied.find(copy, 0)
    assert copied is not None
    end = copied.boundary
    folder = copy / "replay" / "rank0"
    boundaries = SlotFile(folder / "boundaries", 16384, 8, create=False)
    pending = SlotFile(folder / "pending", 4096, 1024, create=False)
    reader, found = Reader(folder), []
    while (record := reader.take()) is not None:
        found.append((record.kind, record.payload))
        if record.kind == kinds.DRAWS_OPEN:
            number = _COUNT.unpack_from(record.payload, 9)[0]
            if record.tail is None:
                assert pending.get(number) == state_of(number), f"draw {number} of {len(found)}"
            else:
                assert record.tail == number
    assert found == rank.records[: len(found)]
    logged = [_COUNT.unpack(payload)[0] for kind, payload in found if kind == kinds.BOUNDARY]
    newest = boundaries.numbers()[-1]
    assert end <= newest <= logged[-1]
    assert boundaries.get(newest) == state_of(newest)
    for b in range(max(1, end - 1), end + 1):
        content = Private(copy, 0, fresh=False).read(b)
        assert content is None or content == value_of(b, 2), "the last value of a boundary"
        # (Four fit in. While it is copied, the rank goes on, and by then so would the survivors.)
        assert content is not None or rank.boundary >= b + 3, "written, and not overwritten yet"
        kept = Recent(folder, create=False).get(b)
        assert kept is not None and kept[0].tolist() == [float(b)] * (b % 50)
    Writer(folder, reader.here).append(kinds.ITEM, 7, b"it can go on")
    return end


class Two:
    """A node that streams and one that keeps."""

    def __init__(self, root: Path) -> None:
        self.run_dir = root / "here"
        (self.run_dir / "view").mkdir(parents=True)
        self.keeper = Keeper(root / "there", "127.0.0.1", TOKEN)
        self.lines: list[str] = []
        self.find = lambda: Holder("def", "127.0.0.1", self.keeper.port)
        self.stream = CopyStream(
            self.run_dir, "abc", [0], TOKEN, lambda: self.find(), self.lines.append, True,
        )  # fmt: skip
        self.stream.start()
        self.streams = True
        self.root = root
        self.number = 0

    def fetch(self) -> Path:
        self.number += 1
        copy = self.root / f"copy{self.number}"
        copy.mkdir()
        fetch(("127.0.0.1", self.keeper.port), TOKEN, ["abc"], [0], copy, "there")
        return copy

    def await_boundary(self, rank: Rank, boundary: int) -> Path:
        """A copy that is at least there."""
        found: list[Path] = []

        def there() -> bool:
            try:
                copy = self.fetch()
            except NoCopy:
                return False
            copied = Copied.find(copy, 0)
            found[:] = [copy]
            return copied is not None and copied.boundary >= boundary

        helpers.wait_until(there, f"a copy of boundary {boundary}", 60)
        return found[0]

    def lose(self) -> None:
        """The node that streams."""
        if self.streams:
            self.streams = False
            self.stream.close()

    def restart_keeper(self) -> None:
        """As the next agent of that node does; the other one may be lost by then."""
        port = self.keeper.port
        self.keeper.close()
        self.keeper = Keeper(self.root / "there", "127.0.0.1", TOKEN, fresh=False)
        assert self.keeper.port == port

    def close(self) -> None:
        self.lose()
        self.keeper.close()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    pair = Two(tmp_path)
    yield pair
    pair.close()


@pytest.mark.parametrize("seed", [1, *(pytest.param(s, marks=pytest.mark.slow) for s in (2, 3))])
def test_a_copy_taken_at_any_moment_could_have_been_left(two: Two, seed: int) -> None:
    rank = Rank(two.run_dir, seed)
    thread = threading.Thread(target=rank.run)
    thread.start()
    try:
        end = 0
        while thread.is_alive() and end < 1000:
            end = check(two.await_boundary(rank, end + 1), rank)
    finally:
        thread.join()
    assert check(two.await_boundary(rank, rank.boundary), rank) == rank.boundary


def test_the_code_that_a_rank_runs_goes_along(two: Two) -> None:
    rank = Rank(two.run_dir, 3)
    mine = two.root / "mine.py"
    mine.write_text("first")
    code = OwnCode(rank.folder / FOLDER, fresh=True)
    code.then(str(mine))
    code.settle([])  # torch is there
    rank.step()
    copy = two.await_boundary(rank, 1)
    mine.write_text("second")
    there = OwnCode(copy / "replay" / "rank0" / FOLDER, fresh=False)
    assert there.then(str(mine)) == b"first"


def test_the_log_of_a_replacement_goes_on_from_an_earlier_place(two: Two) -> None:
    rank = Rank(two.run_dir, 3)
    for _ in range(30):
        rank.step()
    two.await_boundary(rank, 30)
    rank.begin(1, at=29)  # it had died in interval 30, and the others were at 29
    rank.draw = random.Random(4)
    for _ in range(5):
        rank.step()
    assert check(two.await_boundary(rank, 34), rank) == 34


def test_a_holder_that_is_gone_is_told_and_comes_back_with_all_of_it(two: Two) -> None:
    rank = Rank(two.run_dir, 5)
    rank.step()
    two.await_boundary(rank, 1)
    two.keeper.close()
    helpers.wait_until(lambda: bool(two.lines), "a line", 30)
    assert "is not copied to the next node at present" in two.lines[0]
    rank.step()
    two.keeper = Keeper(two.root / "elsewhere", "127.0.0.1", TOKEN)
    assert check(two.await_boundary(rank, 2), rank) == 2
    assert "copied to the next node again" in two.lines[-1]


def test_the_next_agent_has_the_copies_of_the_one_before(two: Two) -> None:
    rank = Rank(two.run_dir, 8)
    for _ in range(5):
        rank.step()
    two.await_boundary(rank, 5)
    two.lose()
    two.restart_keeper()
    assert check(two.fetch(), rank) == 5


def test_who_streams_finds_the_next_agent_where_the_one_before_was(two: Two) -> None:
    port = two.keeper.port
    two.find = lambda: Holder("def", "127.0.0.1", port)
    rank = Rank(two.run_dir, 12)
    rank.step()
    two.await_boundary(rank, 1)
    two.restart_keeper()
    rank.step()
    assert check(two.await_boundary(rank, 2), rank) == 2


@pytest.mark.parametrize("whose", [0, -1], ids=["a rank's", "the node's"])
def test_what_was_not_whole_is_no_copy_for_the_next_agent(two: Two, whose: int) -> None:
    rank = Rank(two.run_dir, 9)
    rank.step()
    two.await_boundary(rank, 1)
    two.lose()
    (root,) = (two.root / "there").glob("abc.*")
    copy = _Copy(root)
    evil = Patch("../" * 30 + "proc/nowhere/x", 1, 0, b"x")  # stands for the end of the process
    with pytest.raises(OSError, match="nowhere"):
        copy.take(Piece(whose, [evil], Seal(0, 2)))
    two.restart_keeper()
    with pytest.raises(NoCopy, match="it has none of that node"):
        two.fetch()


def test_a_copy_stands_until_the_next_one_is_whole(two: Two) -> None:
    """The holder's agent was restarted, so all comes anew, or the node has its place again and has
    yet to fetch that very copy."""
    rank = Rank(two.run_dir, 10)
    for _ in range(3):
        rank.step()
    two.await_boundary(rank, 3)
    two.lose()
    word = {"rank": 0, "seal": None, "afresh": True, "patches": [["x", 3, 0, 3]]}
    with socket.create_connection(("127.0.0.1", two.keeper.port)) as sock:
        peer = Peer.on(sock, 30)
        peer.say({"op": "keep", "token": TOKEN, "node": "abc"})
        peer.say({"pieces": [word]}, [b"abc"])
        there = two.root / "there"
        helpers.wait_until(lambda: bool(list(there.glob("*/files/x"))), "a part", 30)
        assert check(two.fetch(), rank) == 3
        peer.say({"pieces": [{**word, "seal": [0, 4], "afresh": False}]}, [b"abc"])
        helpers.wait_until(lambda: len(list(there.glob("abc.*"))) == 1, "the old one gone", 30)
        copied = Copied.find(two.fetch(), 0)
        assert copied is not None and copied.boundary == 4


def test_the_newest_of_several_copies_is_handed_over(two: Two) -> None:
    """Of a node that has had the place twice there is one of its first time."""
    rank = Rank(two.run_dir, 11)
    rank.step()
    two.await_boundary(rank, 1)
    with socket.create_connection(("127.0.0.1", two.keeper.port)) as sock:
        peer = Peer.on(sock, 30)
        peer.say({"op": "keep", "token": TOKEN, "node": "other"})
        word = {"rank": 0, "seal": [1, 7], "afresh": True, "patches": [["x", 3, 0, 3]]}
        peer.say({"pieces": [word]}, [b"abc"])
        helpers.wait_until(lambda: len(list(two.root.glob("there/*/sealed.0"))) == 2, "both", 30)
        copy = two.root / "copy"
        copy.mkdir()
        nodes = ["abc", "other", "none"]
        fetch(("127.0.0.1", two.keeper.port), TOKEN, nodes, [0], copy, "there")
    assert (copy / "x").read_bytes() == b"abc"


def test_the_next_agent_streams_before_the_control_store_has_answered(tmp_path: Path) -> None:
    (tmp_path / "view").mkdir()
    seats = [Seat(node, 1, "r", "127.0.0.1") for node in ("a", "b", "c")]
    table = RankTable(0, 0, 0, "j", 3, "127.0.0.1", 1, True, assign_ranks(seats), "token")
    port = helpers.free_port()
    known: dict[str, int] = {}

    def agent(fresh: bool) -> CopyRing:
        return CopyRing(table, "a", "127.0.0.1", tmp_path, known.get, fresh)

    holders = []
    for fresh, found in [(True, True), (False, False), (True, False)]:
        known = {"b": port} if found else {}
        ring = agent(fresh)
        ring.start()
        holders.append(ring._holder())
        ring.close()
    assert holders == [Holder("b", "127.0.0.1", port), Holder("b", "127.0.0.1", port), None]


def test_old_files_go_along_where_they_are_small(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leavings, "LARGEST_KEPT", 1000)
    kept = two.run_dir / "view" / "kept"
    kept.mkdir()
    (kept / "1").write_bytes(b"x" * 1000)
    (kept / "2").write_bytes(b"x" * 1001)
    lines = [Line("/new", None), Line("/folder", "/folder"), Line("/small", str(kept / "1")),
             Line("/large", str(kept / "2"))]  # fmt: skip
    text = b"".join(line.pack() for line in lines)
    (two.run_dir / "view" / "registry").write_bytes(text + b'["/half", n')
    rank = Rank(two.run_dir, 6)
    rank.step()
    copy = two.await_boundary(rank, 1)
    found = {}
    for line in (copy / "view" / "registry").read_bytes().splitlines():
        said = Line.parse(line)
        found[said.path] = said.kept
    assert list(found) == ["/new", "/folder", "/small", "/large"]
    assert found["/new"] is None and found["/folder"] == "/folder"
    assert Path(found["/small"]).read_bytes() == b"x" * 1000
    assert str(copy) in found["/small"]
    assert found["/large"] == f"{LEFT}1001"


def test_old_files_go_along_up_to_what_is_copied_at_most(two: Two) -> None:
    """In frames that the other side takes, one after the other, however many there are at once."""
    kept = two.run_dir / "view" / "kept"
    kept.mkdir()
    lines = []
    for number in range(5):  # the first four fill it to the last byte
        with (kept / str(number)).open("wb") as file:
            file.truncate(leavings.LARGEST_KEPT)
        lines.append(Line(f"/{number}", str(kept / str(number))))
    text = b"".join(line.pack() for line in lines)
    (two.run_dir / "view" / "registry").write_bytes(text)
    rank = Rank(two.run_dir, 8)
    rank.step()
    pieces = leavings.Leavings(two.run_dir, [0]).more()
    most = max(sum(len(patch.content) for patch in piece.patches) for piece in pieces)
    assert most == leavings.LARGEST_KEPT, "what is in memory at a time"
    copy = two.await_boundary(rank, 1)
    sizes = [path.stat().st_size for path in sorted((copy / "view" / "kept").iterdir())]
    assert sizes == [leavings.LARGEST_KEPT] * 4
    assert sum(sizes) == leavings.MOST_KEPT
    last = Line.parse((copy / "view" / "registry").read_bytes().splitlines()[-1])
    assert last.kept == f"{LEFT}{leavings.LARGEST_KEPT}"


def test_who_has_no_token_gets_nothing(two: Two) -> None:
    rank = Rank(two.run_dir, 7)
    rank.step()
    two.await_boundary(rank, 1)
    with pytest.raises(NoCopy, match="did not hand its copy over"):
        fetch(("127.0.0.1", two.keeper.port), "wrong", ["abc"], [0], two.root, "there")
    with pytest.raises(NoCopy, match="it has none of that node"):
        fetch(("127.0.0.1", two.keeper.port), TOKEN, ["xyz"], [0], two.root, "there")
    with pytest.raises(NoCopy, match=r"rank\(s\) \[1\] is not whole"):
        fetch(("127.0.0.1", two.keeper.port), TOKEN, ["new", "abc"], [0, 1], two.root, "there")


def send(two: Two, word: dict[str, object], content: bytes, check: bytes | None = None) -> bytes:
    """Say something as a sender with the token; what comes back (nothing: it was dropped)."""
    with socket.create_connection(("127.0.0.1", two.keeper.port)) as sock:
        peer = Peer.on(sock, 30)
        peer.say({"op": "keep", "token": TOKEN, "node": "evil"})
        if check is None:
            peer.say(word, [content])
        else:
            line = json.dumps({**word, "bytes": len(content)}).encode() + b"\n"
            sock.sendall(line + content + check)
        return sock.recv(1)


@pytest.mark.parametrize(
    "path", ["../outside", "/outside", "a/../../outside", "./x"], ids=["up", "root", "deep", "dot"]
)
def test_no_file_is_written_elsewhere(two: Two, path: str) -> None:
    piece = {"rank": 0, "seal": [0, 5], "afresh": True, "patches": [[path, 3, 0, 3]]}
    assert send(two, {"pieces": [piece]}, b"abc") == b""
    assert not (two.root / "outside").exists() and not Path("/outside").exists()


def test_damaged_frames_change_nothing(two: Two) -> None:
    piece = {"rank": 0, "seal": [0, 5], "afresh": True, "patches": [["x", 3, 0, 3]]}
    assert send(two, {"pieces": [piece]}, b"abc", bytes(8)) == b""
    with pytest.raises(NoCopy, match="not whole"):
        fetch(("127.0.0.1", two.keeper.port), TOKEN, ["evil"], [0], two.root, "there")


def test_where_a_copy_ends(tmp_path: Path) -> None:
    seals.copied(tmp_path, 3).write_text(json.dumps({"boundary": 10, "holder": "10.0.0.2"}))
    copied = Copied.find(tmp_path, 3)
    assert copied is not None
    for target in (9, 10, 11):
        copied.reaches(target, newest=12)
    with pytest.raises(Divergence, match="ends at boundary 10, and the survivors are at 12"):
        copied.reaches(12, newest=12)
    with pytest.raises(Divergence, match="ends at boundary 9"):
        copied.reaches(11, newest=9)
    with pytest.raises(Divergence, match="before the second step"):
        copied.reaches(1, newest=1)
    assert copied.has(10) and not copied.has(11)
    copied.end()
    assert Copied.find(tmp_path, 3) is None


def test_a_seal_that_is_being_written_is_none(tmp_path: Path) -> None:
    assert Seal.read(tmp_path, 0) is None
    seals.path(tmp_path, 0).write_bytes(bytes(seals.SIZE))
    assert Seal.read(tmp_path, 0) is None
    whole = Seal(1, 300).pack()
    seals.path(tmp_path, 0).write_bytes(whole)
    assert Seal.read(tmp_path, 0) == Seal(1, 300)
    seals.path(tmp_path, 0).write_bytes(Seal(1, 299).pack()[:8] + whole[8:-1] + b"x")
    assert Seal.read(tmp_path, 0) is None


def test_ringing_never_waits(tmp_path: Path) -> None:
    os.mkfifo(seals.bell(tmp_path))
    environ = {messages.ADDRESS: "127.0.0.1", messages.RUN_DIR: str(tmp_path)}
    sealing = Sealing(environ, 0, 0)
    for b in range(70_000):  # more than a pipe holds, and nobody reads
        sealing.seal(b)
    assert Seal.read(tmp_path, 0) == Seal(0, 69_999)
