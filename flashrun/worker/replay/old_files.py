"""Where a replay finds what was under a path when the run began, by the registries of this node and
of the others."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from flashrun.worker.replay.api import Divergence
from flashrun.worker.replay.elsewhere import Elsewhere, changed_unseen, is_changed
from flashrun.worker.replay.operations import above
from flashrun.worker.replay.registry import FOLDER, LEFT, MOVED, Line, Registry, Stamp

if TYPE_CHECKING:
    from flashrun.worker.replay.session import Session

Really = Callable[[], AbstractContextManager[None]]


class OldFiles:
    """See the module.

    Args:
        registry: of this node.
        really: within it, calls of this thread are real.
        empty: where an empty folder may be made.
    """

    def __init__(self, session: Session, registry: Registry, really: Really, empty: Path) -> None:
        self._session = session
        self._registry = registry
        self._really = really
        self._empty = empty
        self.made_since = ""  # the last path that was looked for and was made since the run began
        self._elsewhere: Elsewhere | None = None
        if session.rt.others is not None:
            # On disk, as what is kept here; a loader worker that is forked now may need it later.
            folder = registry.root / f"elsewhere.{session.rt.rank}"
            self._elsewhere = Elsewhere(session.rt.others, folder, session.diverged)
            os.register_at_fork(before=self._before_fork, after_in_child=self._elsewhere.after_fork)

    def where(self, full: str) -> str | None:
        """Where the old content of a path is; None: there was nothing.

        Raises:
            Divergence: it is not known, or not kept.
        """
        self._registry.refresh()
        for folder in above(full):
            line = self.first(folder)
            if line is not None and line.kept is None:
                self.made_since = folder
                return None
            if line is not None and line.kept == MOVED:
                raise self._was_moved(folder)
        line = self.first(full)
        if line is not None:
            if line.kept is None:
                self.made_since = full
            return self._content(line)
        with self._asking():
            if self._elsewhere is None:
                there = self._real(full)
            else:
                there = self._elsewhere.real(full, self._session.began)
        if there is None:
            return self.where(full)
        return full if there else None

    def _real(self, full: str) -> bool | None:
        """As `Elsewhere.real`, on one node (whose clock of files is some ms behind at most)."""
        there = os.path.lexists(full)
        if there and is_changed(full, self._session.began):
            self._registry.refresh()
            if full in self._registry.lines:
                return None
            raise self._session.diverged(changed_unseen(full, "no worker"))
        return True  # or it is not there, which the real call says

    def kept(self, full: str, stamp: Stamp) -> str | None:
        """Where a content is that was there when the run began, if this is its stamp."""
        line = self.first(full)
        return self._content(line) if line is not None and line.was == stamp else None

    def first(self, full: str) -> Line | None:
        """What was changed first under a path since the run began."""
        own = self._registry.lines.get(full)
        if self._elsewhere is None:
            return own
        with self._asking():
            return self._elsewhere.first(full, own)

    def status(self, full: str, status: os.stat_result) -> os.stat_result:
        """What the file system said of a path, given what it says of what is kept of it: which of
        some files is the newest must come out the same."""
        line = self.first(full)
        if line is None or line.was is None or line.kept == full:
            return status
        was = line.was
        if stat.S_ISREG(status.st_mode) and status.st_size != was.size:
            return status  # of what a link led to
        if stat.S_ISDIR(status.st_mode):  # before the first of its members was changed
            seen = [member.folder for member in self._lines_in(full, line.node)]
            stamps = [s for s in seen if s is not None and s.inode == was.inode]
            was = min([was, *stamps], key=lambda stamp: stamp.changed)
        fields = list(status[:10])
        fields[stat.ST_INO] = was.inode
        more = {name: getattr(status, name) for name in dir(status) if name.startswith("st_")}
        for name, ns in (("st_mtime", was.modified), ("st_ctime", was.changed)):
            seconds = ns // 10**9
            fields[getattr(stat, name.upper())] = seconds
            more[name] = seconds + 1e-9 * (ns % 10**9)
            more[f"{name}_ns"] = ns
        return os.stat_result(fields, more)

    def _lines_in(self, full: str, node: int) -> list[Line]:
        if self._elsewhere is None or node < 0:
            return self._registry.within(full)
        return self._elsewhere.lines_in(full, node)

    def changed_in(self, full: str) -> set[str]:
        """Members of a folder that a worker of any node has changed."""
        self._registry.refresh()
        paths = {line.path for line in self._registry.within(full)}
        if self._elsewhere is not None:
            with self._asking():
                paths |= self._elsewhere.within(full)
        return paths

    def listed(self, full: str, names: Iterable[str]) -> None:
        """The script has been told that these are in a folder."""
        if self._elsewhere is not None:
            with self._asking():
                self._elsewhere.listed(full, names)

    def is_mine(self, full: str) -> bool:
        """Whether no other rank has written to a path."""
        self._registry.refresh()
        ranks = self._registry.ranks.get(full, set())
        elsewhere = self._elsewhere is not None and self._elsewhere.knows(full)
        return ranks == {self._session.rt.rank} and not elsewhere

    def settle(self) -> None:
        """The replay is at its end; see `Elsewhere.settle`."""
        if self._elsewhere is not None:
            with self._asking():
                self._elsewhere.settle()

    def _content(self, line: Line) -> str | None:
        kept = line.kept
        if kept is None or kept == line.path:
            return kept
        if kept.startswith(LEFT):
            raise self._session.diverged(
                f"the old content of {line.path} ({kept.removeprefix(LEFT)} bytes) was kept on the"
                " lost node only"
            )
        if kept == MOVED:
            raise self._was_moved(line.path)
        with self._asking():
            if kept == FOLDER:
                self._empty.mkdir(exist_ok=True)
                return str(self._empty)
            if self._elsewhere is None or line.node < 0:
                return kept
            return self._elsewhere.content(line)

    def _was_moved(self, folder: str) -> Divergence:
        return self._session.diverged(
            f"the folder {folder} was there when the run began, and was renamed since, with all in"
            " it: what it held then is not kept"
        )

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Calls of this thread are real; what fails ends the replay, also where the script catches
        it."""
        with self._really():
            try:
                yield
            except (Divergence, OSError) as error:
                if error is self._session.failure:
                    raise
                raise self._session.diverged(f"what other nodes have changed: {error}") from error

    def _before_fork(self) -> None:
        """A forked child (loader worker) can't be told whom to ask."""
        if self._session.replaying and self._elsewhere is not None:
            with self._asking():
                self._elsewhere.load()

