"""Nodes that share a file system: each lists the files that its own workers have changed."""

from __future__ import annotations

import os
import pickle
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashrun.messages import Message
from flashrun.worker.others import Others
from flashrun.worker.replay import elsewhere
from flashrun.worker.replay.api import Divergence
from flashrun.worker.replay.elsewhere import Elsewhere
from flashrun.worker.replay.old_files import OldFiles
from flashrun.worker.replay.registry import Registry
from flashrun.worker.transfer import Server
from tests import helpers
from tests.replay.test_replay import catch_up, check, place, record, reference

__all__ = ["place"]  # the fixture


def test_what_another_node_has_changed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the list is on another node (here: it is moved there), old contents included."""
    wanted = reference("resumed", place)
    record("resumed", place, 12, 700)
    other = place / "other" / "view"
    other.mkdir(parents=True)
    (place / "run" / "view" / "registry").rename(other / "registry")
    monkeypatch.setenv("REPLAY_OTHER", str(other.parent))
    result = catch_up("resumed", place, 12)
    assert result.returncode == 0, result.stdout + result.stderr
    check(place, wanted)


@pytest.mark.parametrize(
    ("several", "who"), [(False, "no worker has"), (True, "no worker of any node has")], ids=str
)
def test_what_nobody_has_told_is_a_divergence(
    place: Path, monkeypatch: pytest.MonkeyPatch, several: bool, who: str
) -> None:
    """As what a subprocess, or a library in C, has written."""
    (place / "ref").mkdir()
    (place / "ref" / "reference.dump").write_bytes(pickle.dumps({}))
    record("resumed", place, 12, 700)
    (place / "run" / "view" / "registry").unlink()
    if several:
        monkeypatch.setenv("REPLAY_OTHER", str(place))
    result = catch_up("resumed", place, 12)
    assert f"was changed after the script had begun, and {who} told so" in result.stdout


class Node:
    """Another node, on the same file system; its worker registers, then changes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "kept").mkdir(parents=True)
        self.registry = Registry(root)

    def touch(self, path: Path, in_place: bool = True, moves: bool = False) -> None:
        with self.registry.locked() as add:
            add(self.registry.keep(str(path), 5, in_place, moves))

    def numbers(self) -> list[int]:
        return [4]

    def name(self, number: int) -> str:
        return f"node {number}"

    def ask(self, requests: Mapping[int, Message]) -> dict[int, Message]:
        return {n: elsewhere.answer(self.root, request)[0] for n, request in requests.items()}

    def copy(self, number: int, request: Message, path: str) -> Message:
        header, parts = elsewhere.answer(self.root, request)
        Path(path).write_bytes(b"".join(parts))
        return header


NEVER = 1 << 62  # ns; nothing is newer


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "other")


@pytest.fixture
def view(tmp_path: Path, node: Node) -> Elsewhere:
    return Elsewhere(node, tmp_path / "fetched", Divergence)


def test_old_contents_come_from_there(tmp_path: Path, node: Node, view: Elsewhere) -> None:
    files = [tmp_path / name for name in ("file", "link", "gone", "new")]
    file, link, gone, new = files
    file.write_text("old")
    gone.write_bytes(b"x" * (9 << 20))
    os.utime(gone, ns=(5, 7))
    link.symlink_to("file")
    for path in (link, gone):
        node.touch(path, in_place=False)
        path.unlink()
    for path in (file, new):
        node.touch(path)
        path.write_text("new")
    told = {path: view.first(str(path), None) for path in files}
    line = told[new]
    assert line is not None and line.kept is None
    found = {p: view.content(line) for p, line in told.items() if line is not None and line.kept}
    assert Path(found[file]).read_text() == "old"
    assert os.readlink(found[link]) == "file"
    assert Path(found[gone]).read_bytes() == b"x" * (9 << 20)
    assert os.stat(found[gone]).st_mtime_ns == 7
    assert view.within(str(tmp_path)) == {str(path) for path in files}


def test_what_comes_while_the_replay_looks(tmp_path: Path, node: Node, view: Elsewhere) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    old, new, other = folder / "old", folder / "new", folder / "other"
    old.write_text("old")
    assert view.real(str(old), NEVER) is True
    assert view.real(str(new), NEVER) is False
    view.listed(str(folder), ["old"])
    view.settle()
    for path in (new, other):  # which the replay has not found, and the folder did not have
        node.touch(path)
        path.write_text("new")
    node.touch(old, in_place=False)
    with pytest.raises(Divergence, match=r"changed .*/old for the first time"):
        view.settle()  # it may have been read after it had changed


@pytest.mark.parametrize("what", ["overwritten", "removed", "moved", "moved-here"])
def test_what_would_be_seen_otherwise(
    tmp_path: Path, node: Node, view: Elsewhere, what: str
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    file, other = folder / "file", tmp_path / "other-folder"
    file.write_text("old")
    view.load()
    if what != "removed":
        path = other / "file" if what == "moved-here" else file
        assert view.real(str(path), NEVER) is (what != "moved-here")
    if what == "moved-here":
        node.touch(folder, moves=True)
        view.settle()
        node.touch(other, in_place=False)
        folder.rename(other)
        view.settle()  # it was not there before
        return
    if what == "moved":
        node.touch(folder, moves=True)
        folder.rename(other)
    elif what == "removed":
        node.touch(file, in_place=False)
        file.unlink()
        view.listed(str(folder), os.listdir(folder))
    else:
        node.touch(file)
        file.write_text("new")
    with pytest.raises(Divergence, match=r"a worker of node 4 changed .* while the replay looked"):
        view.settle()


def test_a_changed_file_is_asked_for_again(tmp_path: Path, node: Node, view: Elsewhere) -> None:
    path, mine = tmp_path / "file", tmp_path / "mine"
    view.load()
    node.touch(path)
    path.write_text("new")
    assert view.real(str(path), 0) is None
    line = view.first(str(path), None)
    assert line is not None and line.kept is None
    mine.write_text("by nobody")
    with pytest.raises(Divergence, match="no worker of any node has told so"):
        view.real(str(mine), 0)


def test_a_spare_takes_the_nodes_place(tmp_path: Path, node: Node, view: Elsewhere) -> None:
    """What it has of the old contents counts; of what was registered last it may have none."""
    paths = [tmp_path / name for name in ("copied", "late", "new")]
    for path in paths[:2]:
        path.write_text("old")
    for path in paths:
        node.touch(path)
        path.write_text("new")
    view.load()
    lines = node.registry.lines
    node.root = tmp_path / "spare"
    (node.root / "kept").mkdir(parents=True)
    copied = lines[str(paths[0])]
    (node.root / "registry").write_bytes(copied.pack())
    view.settle()
    kept = []
    for path in paths:
        line = view.first(str(path), None)
        assert line is not None
        kept.append(line.kept)
    assert kept == [copied.kept, "left:3", None]


def test_folders(tmp_path: Path, node: Node) -> None:
    """On this node and on another one: what is in a folder that is gone, or was not there."""
    names = "removed", "moved", "made"
    removed, moved, made = (tmp_path / name for name in names)
    paths = [tmp_path / "removed" / "file", tmp_path / "removed"]
    for folder in (removed, moved):
        folder.mkdir()
        (folder / "file").write_text("old")
    before = [os.stat(path) for path in paths]
    node.touch(removed / "file", in_place=False)
    (removed / "file").unlink()
    node.touch(removed, in_place=False)
    removed.rmdir()
    node.touch(moved, moves=True)
    moved.rename(tmp_path / "elsewhere")
    node.touch(made, in_place=False)
    made.mkdir()
    (made / "by-a-library").write_text("new")
    here = Registry(tmp_path / "here")
    (tmp_path / "here").mkdir()
    for registry, others in ((node.registry, None), (here, node)):
        runtime = SimpleNamespace(others=others, rank=3)
        session: Any = SimpleNamespace(
            rt=runtime, diverged=Divergence, failure=None, began=NEVER, replaying=True
        )
        old = OldFiles(session, registry, nullcontext, tmp_path / "empty")
        where = old.where(str(removed))
        assert where is not None and os.listdir(where) == []
        for path, was in zip(paths, before, strict=True):
            told = old.status(str(path), os.stat(str(old.where(str(path)))))
            for name in ("st_ino", "st_mode", "st_mtime", "st_mtime_ns", "st_ctime", "st_ctime_ns"):
                assert getattr(told, name) == getattr(was, name), (path, name)
            assert (told[stat.ST_MTIME], told[stat.ST_CTIME]) == (was[8], was[9])
        assert old.changed_in(str(removed)) == {str(removed / "file")}
        assert Path(str(old.where(str(removed / "file")))).read_text() == "old"
        assert old.where(str(made)) is None and old.where(str(made / "by-a-library")) is None
        assert {os.path.basename(path) for path in old.changed_in(str(tmp_path))} == {*names}
        for path in (moved, moved / "file"):
            with pytest.raises(Divergence, match="renamed since, with all in it"):
                old.where(str(path))
        old.settle()


# --- over the network


@pytest.fixture
def served() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def serve(answer: Callable[[Message], tuple[Message, Iterable[memoryview]]]) -> Server:
        servers.append(Server("token", answer))
        return servers[-1]

    yield serve
    for server in servers:
        server.close()


def test_somebody_else_of_a_node_is_asked(served: Callable[..., Server], tmp_path: Path) -> None:
    asked: list[Message] = []
    others = Others(range(2, 4), "token", 60)

    def busy(request: Message) -> tuple[Message, Iterable[memoryview]]:
        asked.append(request)
        here = f"127.0.0.1:{second.port}"
        others.told({"0": here, "2": "nobody:1", "5": here})  # rank 4 was lost, and here is 5
        raise ConnectionError

    def answer(request: Message) -> tuple[Message, Iterable[memoryview]]:
        if request.get("what") == "no":
            raise LookupError("not here")
        content = b"y" * (9 << 20)
        return {"size": len(content), **request}, [memoryview(content)] if "file" in request else ()

    first, second = served(busy), served(answer)
    thread = threading.Thread(target=others.told, args=(
        {"0": f"127.0.0.1:{second.port}", "2": "nobody:1", "4": f"127.0.0.1:{first.port}"},
    ))  # fmt: skip
    thread.start()
    assert others.numbers() == [0, 2]
    thread.join()
    found = others.ask({0: {"what": "a"}, 2: {"what": "b"}})
    assert {n: said["what"] for n, said in found.items()} == {0: "a", 2: "b"}
    assert asked == [{"what": "b"}]
    said = others.copy(2, {"file": "z"}, str(tmp_path / "file"))
    assert (tmp_path / "file").read_bytes() == b"y" * said["size"]
    assert others.name(2) == "the node of rank 5 (127.0.0.1)"
    with pytest.raises(Divergence, match=r"the node of rank 5 .*: not here"):
        others.ask({2: {"what": "no"}})


def test_waits_end() -> None:
    others = Others(range(2), "token", 0.01)
    with pytest.raises(Divergence, match="for the addresses of the other nodes' workers"):
        others.numbers()
    others.told({"0": "127.0.0.1:1", "2": f"127.0.0.1:{helpers.free_port()}"})
    with pytest.raises(Divergence, match=r"for an answer of rank 2 at 127.0.0.1:.*is that node"):
        others.ask({1: {}})
