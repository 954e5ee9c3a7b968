"""In a job of several nodes: what the workers of the others have changed first since the run began,
for a replay that sees files as they were then; and the answers to such questions.

A replay asks all nodes when it looks at a file for the first time, and once more at its end, when
the survivors are held: what was registered in between must not be about what it has seen. Old
contents are sent when they are looked at. Whether a path leads to the same file on two nodes, and
who was first, is told by `sharing`; where it can't be told, the replay ends.
"""

from __future__ import annotations

import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from flashrun.messages import Message
from flashrun.worker.replay import sharing
from flashrun.worker.replay.registry import ALSO, FOLDER, LEFT, MOVED, NAME, Line
from flashrun.worker.replay.sharing import Facts

if TYPE_CHECKING:
    from flashrun.worker.replay.api import Divergence, OtherNodes

WHAT = "files"  # of requests
_TRIES = 10  # where somebody may be changing a file right now
_PAUSE_S = 0.1
_PIECE = 4 << 20  # bytes

Diverged = Callable[[str], "Divergence"]


class _Node:
    """What one node has registered.

    Attributes:
        which: identity of its registry; a spare in its place has another one.
        end: how much of it was read, in bytes.
        same: folder -> whether it is this node's as well, and by how much times in it may differ.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self.which = ""
        self.end = 0
        self.lines: dict[str, Line] = {}
        self.same: dict[str, tuple[bool, int]] = {}

    def take(self, said: Message) -> list[Line]:
        """Gives the lines that are new."""
        told = [Line.of(line, self._number) for line in said["lines"]]
        lines = [line for line in told if line.kept != ALSO]
        if said["which"] != self.which:
            before, self.lines, self.which = self.lines, {}, said["which"]
            self.same.clear()
            for line in before.values():  # a copy may lack what was registered last
                if line.content is not None:
                    size = line.was.size if line.was is not None else 0
                    line = replace(line, kept=f"{LEFT}{size}")
                self.lines[line.path] = line
        new = [line for line in lines if line.path not in self.lines]
        self.lines.update({line.path: line for line in lines})
        self.end = int(said["end"])
        return new


def is_changed(path: str, began: int) -> bool:
    """Whether a file was changed after ``began`` (ns of the epoch), by the times that it has.

    (A file server's clock may be behind by less than what a script takes to its first checkpoint.
    What workers have registered is known without it.)
    """
    try:
        status = os.stat(path)
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_ctime_ns > began


def changed_unseen(path: str, who: str) -> str:
    """Why a replay that looks at such a file ends; ``who`` would have registered it."""
    return (
        f"{path} was changed after the script had begun, and {who} has told so (a subprocess, or a"
        " library that writes in C?), so what the dead worker saw there is not known"
    )


class Elsewhere:
    """See the module.

    Args:
        others: the way to them.
        folder: for old contents that they send; emptied.
        diverged: makes the error that ends the replay.
    """

    def __init__(self, others: OtherNodes, folder: Path, diverged: Diverged) -> None:
        self._others = others
        self._folder = folder
        self._diverged = diverged
        self._lock = threading.RLock()
        self._nodes: dict[int, _Node] | None = None
        self._members: dict[str, set[str]] = {}  # folder -> paths in it
        self._known: set[str] = set()
        self._firsts: dict[str, tuple[int, Line | None]] = {}
        self._contents: dict[str, str] = {}
        self._seen: dict[str, bool] = {}  # path -> whether it was there, by the file system alone
        self._listed: dict[str, frozenset[str]] = {}
        self._pause = threading.Event().wait
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

    def after_fork(self) -> None:
        """In the child: a thread that is not here may have held it."""
        self._lock = threading.RLock()

    def load(self) -> dict[int, _Node]:
        """What the nodes have, asked for once."""
        with self._lock:
            if self._nodes is None:
                self._nodes = {number: _Node(number) for number in self._others.numbers()}
                self._ask()
            return self._nodes

    def _ask(self) -> list[Line]:
        """What is new since the last time."""
        nodes = self._nodes or {}
        answers = self._others.ask({
            number: {"what": WHAT, "ask": "changed", "which": node.which, "from": node.end}
            for number, node in nodes.items()
        })  # fmt: skip
        if any(said["which"] != nodes[n].which for n, said in answers.items()):
            self._firsts.clear()
        new = [line for n, said in answers.items() for line in nodes[n].take(said)]
        for line in new:
            self._known.add(line.path)
            self._members.setdefault(os.path.dirname(line.path), set()).add(line.path)
        return new

    # --- what was there when the run began

    def within(self, folder: str) -> set[str]:
        """The members of a folder that other nodes have changed."""
        self.load()
        return self._members.get(folder, set())

    def knows(self, path: str) -> bool:
        """Whether a worker of another node has changed it, there."""
        self.load()
        return path in self._known

    def lines_in(self, folder: str, number: int) -> list[Line]:
        """What a node has registered of the members of a folder."""
        lines = self.load()[number].lines
        return [lines[path] for path in self.within(folder) if path in lines]

    def first(self, path: str, own: Line | None) -> Line | None:
        """What was changed first under a path on all nodes that see the same file there; `own` is
        this node's. None: nobody has changed it.

        Raises:
            Divergence: that can't be told.
        """
        with self._lock:
            nodes = self.load()
            if path not in self._known:
                return own
            found = {n: node.lines[path] for n, node in nodes.items() if path in node.lines}
            count = len(found) + (own is not None)
            known = self._firsts.get(path)
            if known is None or known[0] != count:
                known = self._firsts[path] = count, self._first(path, own, found)
            return known[1]

    def _first(self, path: str, own: Line | None, found: Mapping[int, Line]) -> Line | None:
        lines = [*found.values()] if own is None else [own, *found.values()]
        if all(line.kept is None for line in lines) and (
            own is not None or not os.path.lexists(path)
        ):
            return lines[0]  # nothing was there, whoever sees what
        shared = [] if own is None else [own]
        most = 0
        for number, line in found.items():
            same, apart = self._same(number, path)
            if same:
                shared.append(line)
                most = max(most, apart)
        if not shared:
            return None
        first = sharing.first_of(shared, most)
        if first is None:
            raise self._diverged(
                f"workers of several nodes have changed {path} since the run began, and who did so"
                " first can't be told by the times of the file system"
            )
        return first

    def _same(self, number: int, path: str) -> tuple[bool, int]:
        """Whether a path is the same file here and there; and see `_Node.same`."""
        node, folder = self.load()[number], os.path.dirname(path)
        if folder in node.same:
            return node.same[folder]
        request = {"what": WHAT, "ask": "facts", "path": path}
        for attempt in range(_TRIES):
            if attempt:
                self._pause(_PAUSE_S)
            theirs = Facts.of(self._others.ask({number: request})[number]["facts"])
            mine = sharing.look(path)
            same = sharing.same_file(path, mine, theirs, node.lines.get)
            if same is None:
                continue
            answer = same, sharing.clocks_apart(mine, theirs)
            if not (mine.is_mount(path) or theirs.is_mount(path)):
                node.same[folder] = answer
            return answer
        kinds = sorted({facts.spots[0].kind for facts in (mine, theirs) if facts.spots})
        raise self._diverged(
            f"a worker of {self._others.name(number)} has changed {path} since the run began, and"
            f" whether that is the file which this node has there can't be told ({', '.join(kinds)}"
            "); use a file system that is the nodes' own (a local disk), or that all see alike"
            " (NFS)"
        )

    def content(self, line: Line) -> str:
        """Where the old content of another node's line is: a file of this node.

        Raises:
            Divergence: it is not there any more.
        """
        with self._lock:
            place = self._contents.get(line.path)
            if place is None:
                place = str(self._folder / f"{len(self._contents)}")
                request = {"what": WHAT, "ask": "content", "path": line.path}
                said = self._others.copy(line.node, request, place)
                if "link" in said:
                    os.unlink(place)
                    os.symlink(said["link"], place)
                else:
                    os.utime(place, ns=(said["modified"], said["modified"]))
                    os.chmod(place, said["mode"])
                self._contents[line.path] = place
            return place

    # --- what nobody had changed

    def real(self, path: str, began: int) -> bool | None:
        """Nobody is known to have changed `path`, so it is as the file system has it: whether it is
        there. None: somebody has registered it by now.

        Args:
            began: when the script did, ns of the epoch.

        Raises:
            Divergence: it was changed, and no worker has registered that.
        """
        with self._lock:
            self.load()
            there = os.path.lexists(path)
            if there and is_changed(path, began):
                if self._is_known_now(path):
                    return None
                raise self._diverged(changed_unseen(path, "no worker of any node"))
            return self._seen.setdefault(path, there)

    def _is_known_now(self, path: str) -> bool:
        if path not in self._known:
            self._check(self._ask())
            return path in self._known
        return False  # on other nodes, where it is another file

    def listed(self, folder: str, names: Iterable[str]) -> None:
        """The replay has been told that these are in a folder."""
        with self._lock:
            self.load()
            self._listed.setdefault(folder, frozenset(names))

    def _check(self, new: Iterable[Line]) -> None:
        """Raises Divergence where they are about what the replay has seen otherwise."""
        for line in new:
            if self._contradicts(line) and self._same(line.node, line.path)[0]:
                raise self._diverged(
                    f"a worker of {self._others.name(line.node)} changed {line.path} for the first"
                    " time while the replay looked at it"
                )

    def _contradicts(self, line: Line) -> bool:
        path = line.path
        if line.kept == path or self._firsts.get(path, (0, None))[1] is not None:
            return False  # a folder stays one; or it was another node's to say what was there
        for seen, there in self._seen.items():
            if seen == path and (there or line.kept is not None):
                return True
            if seen.startswith(path + "/") and (there or line.kept in (FOLDER, MOVED)):
                return True
        folder, name = os.path.split(path)
        names = self._listed.get(folder)
        return names is not None and (name in names) != (line.kept is not None)

    def settle(self) -> None:
        """The replay is at its end, and the survivors are held: was what it saw what it had to see?

        Raises:
            Divergence: somebody has changed it meanwhile.
        """
        with self._lock:
            if self._nodes is not None:
                self._check(self._ask())


# --- for the others


def answer(root: Path, request: Mapping[str, Any]) -> tuple[Message, Iterable[memoryview]]:
    """Tell a replacement of another node what it asks.

    Args:
        root: folder of this node's registry.

    Raises:
        LookupError: it can't be had.
    """
    if request["ask"] == "facts":
        return {"facts": sharing.look(str(request["path"])).to_json()}, ()
    if request["ask"] == "changed":
        return _changed(root / NAME, str(request["which"]), int(request["from"])), ()
    return _content(root / NAME, str(request["path"]))


def _changed(path: Path, known: str, begin: int) -> Message:
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            which = f"{sharing.kernel()} {status.st_dev} {status.st_ino}"
            begin = begin if which == known else 0
            file.seek(begin)
            raw = file.read()
    except FileNotFoundError:
        return {"which": "", "end": 0, "lines": []}
    raw = raw[: raw.rfind(b"\n") + 1]
    lines = [Line.parse(line).to_json() for line in raw.splitlines()]
    return {"which": which, "end": begin + len(raw), "lines": lines}


def _content(registry: Path, path: str) -> tuple[Message, Iterable[memoryview]]:
    with registry.open("rb") as file:
        lines = (Line.parse(raw) for raw in file if raw.endswith(b"\n"))
        line = next((line for line in lines if line.path == path), None)
    place = line.content if line is not None else None
    if place is None:
        raise LookupError(f"no old content of {path} is kept here")
    try:
        if os.path.islink(place):
            return {"link": os.readlink(place), "size": 0}, ()
        kept = open(place, "rb")  # noqa: SIM115  # closed by what sends it
    except OSError as error:
        raise LookupError(f"the old content of {path} can't be read: {error}") from error
    status = os.fstat(kept.fileno())
    header = {
        "size": status.st_size,
        "modified": status.st_mtime_ns,
        "mode": stat.S_IMODE(status.st_mode),
    }
    return header, _pieces(kept, status.st_size)


def _pieces(file: IO[bytes], size: int) -> Iterator[memoryview]:
    """Ends early where the file does; the receiver notices."""
    with file:
        while size:
            piece = file.read(min(size, _PIECE))
            if not piece:
                return
            size -= len(piece)
            yield memoryview(piece)
