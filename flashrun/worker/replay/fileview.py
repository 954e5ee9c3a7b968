"""The files as they were when the run began, for a replay; and its writes into a scratch place.

Live, the first time any worker of the job on this node overwrites, replaces, renames or deletes a
path, one line goes to a registry that all share (`registry`): the path did not exist, or where its
old content is kept (a hard link if the name is only taken away, a copy if the content is about to
change).

In catch-up a path is looked up in this order: what is logged of this look (`seen`), what the replay
itself wrote or deleted, the registries of this node and of the others (`old_files`), the real file
system. Writes, deletions and renames only change the second.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import get_ident
from typing import TYPE_CHECKING, Any

from flashrun.errors import writing_remedy
from flashrun.worker.replay import elsewhere, open_files
from flashrun.worker.replay.api import Divergence
from flashrun.worker.replay.looks import CONTENT, Looks
from flashrun.worker.replay.old_files import OldFiles
from flashrun.worker.replay.open_files import OpenFiles
from flashrun.worker.replay.operations import Operations, above
from flashrun.worker.replay.registry import ALSO, KEPT, Line, Registry, Stamp
from flashrun.worker.replay.seen import Seen, missing

if TYPE_CHECKING:
    from flashrun.worker.replay.session import Session

# Caches are no part of what a script computes, and compilers in other processes read them.
_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME", "HF_HOME")


def _left_alone() -> tuple[str, ...]:
    """Beginnings of paths that the view is not about."""
    try:
        temporary = os.path.realpath(tempfile.gettempdir())
    except OSError:
        temporary = "/tmp"  # nothing can be written there, nor anywhere else
    home = os.path.realpath(os.path.expanduser("~"))
    caches = [os.path.realpath(os.environ[name]) for name in _CACHES if os.environ.get(name)]
    return (
        "/proc/",
        "/sys/",
        *(f"{temporary}/{start}" for start in ("pymp-", "torchinductor_", "torch_")),
        *(f"{folder}/" for folder in (*caches, f"{home}/.cache", f"{home}/.triton")),
    )


_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Real:
    """The functions of os and io before they were replaced."""

    def __init__(self) -> None:
        self.open = io.open
        for name in ("stat", "lstat", "listdir", "scandir", "unlink", "rename", "replace",
                     "mkdir", "rmdir", "link", "readlink", "access"):
            setattr(self, "os_" + name, getattr(os, name))
        self.os_open = os.open

    def __getattr__(self, name: str) -> Any:  # for the type checker: set in __init__
        raise AttributeError(name)


class FileView:
    """See the module. The replaced functions are in `filepatches`."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.real = Real()
        self.root = Path(session.rt.run_dir) / "view"
        self.scratch = session.folder / "scratch"
        self.active = False
        self.replaying = session.replaying
        self._busy: set[int] = set()  # threads inside of this class: their calls are real
        # The second is a link to elsewhere.
        places = (session.rt.run_dir, self.root)
        self._own = tuple(os.path.join(os.path.realpath(place), "") for place in places)
        self.left_alone = _left_alone()
        self._folders: dict[str, str] = {}
        self._registry = Registry(self.root)
        self._touched: set[str] = set()  # by this process
        self._old: OldFiles  # in a replay
        self._overlay: dict[str, str | None] = {}  # path -> scratch file or folder, None: deleted
        self._appended: set[str] = set()
        self._open = OpenFiles()
        self._number = 0
        self.operations = Operations(session)
        self._looks = Looks(session, self._busy)
        self.seen = Seen(self, self._looks)

    def made_since(self) -> str:
        """See `Replay.made_since`."""
        return self._old.made_since if self.replaying else ""

    def install(self) -> None:
        from flashrun.worker.replay import filepatches

        with self.really():
            try:
                self.root.mkdir(parents=True, exist_ok=True)
                (self.root / KEPT).mkdir(exist_ok=True)
                if self.replaying:
                    shutil.rmtree(self.scratch, ignore_errors=True)
                    self.scratch.mkdir()
                    self._old = OldFiles(
                        self.session, self._registry, self.really, self.scratch / "empty"
                    )
                else:
                    self.operations.record()
                self.seen.begin()
            except (OSError, ValueError) as error:
                if self.replaying:
                    raise Divergence(f"what the dead worker saw of files: {error}") from error
                self.session.give_up(f"no place to keep old files: {error}", f"check {self.root}")
                return
        self.active = True
        filepatches.install(self)

    # --- paths

    def path(self, path: Any) -> str | None:
        """The absolute path if this class cares about it."""
        if not self.active or get_ident() in self._busy or isinstance(path, int):
            return None
        try:
            name = os.fsdecode(os.fspath(path))
        except TypeError:
            return None
        full = os.path.abspath(name)
        folder, base = os.path.split(full)
        resolved = self._folders.get(folder)
        if resolved is None:
            with self.really():
                resolved = os.path.realpath(folder)
            if os.path.isabs(resolved):
                self._folders[folder] = resolved
        full = os.path.join(resolved, base) if base else resolved
        if full.startswith(self._own):
            return None
        if full.startswith(self.left_alone):
            return None
        if full.startswith("/dev/") and not full.startswith("/dev/shm/"):
            return None
        return full

    # --- live

    def touch(self, path: Any, in_place: bool, moves: bool = False) -> bool:
        """A worker is about to change `path`: keep the old view of it if this is the first time.

        Args:
            in_place: the content changes (copy); False: only the name goes (hard link).
            moves: it gets another name, if it is a folder with all in it.

        Returns:
            Whether it is.
        """
        first = False
        full = self.path(path)
        session = self.session
        if full is None:
            return False
        self.seen.mine(full, below=moves)
        self.operations.mine(full)
        if full in self._touched or not (session.on or session.forked):
            return False
        rank = session.rt.rank
        with self.really():
            try:
                with self._registry.locked() as add:
                    if full not in self._registry:
                        if session.on and session.uncertain == session.boundary:
                            self._not_before_a_loss(full)
                        add(self._registry.keep(full, rank, in_place, moves))
                        first = True
                    elif rank not in self._registry.ranks[full]:
                        add(Line(full, ALSO, rank=rank))
                self._touched.add(full)
            except OSError as error:
                session.give_up(
                    f"the old content of {full} can't be kept aside: {error}",
                    f"{writing_remedy(error, self.root)}, or let the job write elsewhere than it"
                    " reads",
                )
        return first

    def missed(self, path: Any) -> None:
        """The script has looked for something that is not there."""
        if self.seen.answers and not self.replaying:
            self.operations.missed(self.path(path))

    def is_there(self, full: str) -> bool:
        """Live: whether there is anything of that name."""
        with self.really():
            return os.path.lexists(full)

    def is_mine(self, full: str) -> bool:
        """Live: whether no other rank of this node has written to a path."""
        if full not in self._touched:
            return False
        with self.really():
            self._registry.refresh()
        return self._registry.ranks.get(full) == {self.session.rt.rank}

    def _not_before_a_loss(self, full: str) -> None:
        """The dead worker may have changed this, too, right before its node was lost, and the
        replay have seen that: what was registered last may not have been copied."""
        self.session.refuse(
            f"the script changes {full} for the first time in the step in which its node was lost:"
            " whether the replay has seen it before or after that is not known"
        )

    def answer(self, request: Mapping[str, Any]) -> tuple[dict[str, Any], Iterable[memoryview]]:
        """See `Replay.answer`."""
        with self.really():
            return elsewhere.answer(self.root, request)

    @contextmanager
    def really(self) -> Iterator[None]:
        """What this thread does in it is no act of the script's."""
        thread = get_ident()
        was_busy = thread in self._busy
        self._busy.add(thread)
        try:
            yield
        finally:
            if not was_busy:
                self._busy.discard(thread)

    def is_busy(self) -> bool:
        """Whether this thread is within `really`."""
        return get_ident() in self._busy

    # --- replay

    def look(self, full: str) -> str | None:
        """Where the content of `full` is in the old view; None: it does not exist."""
        if full in self._overlay:
            return self._overlay[full]
        if any(folder in self._overlay for folder in above(full)):
            return None  # a folder made (or removed) by the replay has only its own members
        if full.startswith(self.left_alone):
            return full  # a temporary file of the replay's, that is about to be renamed
        return self._old.where(full)

    def read_path(self, path: Any) -> Any:
        """The path to really read from.

        Raises:
            FileNotFoundError: not there in the old view.
        """
        full = self.path(path) if self.replaying else None
        if full is None:
            return path
        where = self.look(full)
        if where is None:
            self._must_be_explained(full)
            raise missing(path)
        return path if where == full else where

    def _must_be_explained(self, full: str) -> None:
        """That nothing was there is logged, so something was; unless the replay took it away."""
        if self.seen.exact and full not in self._overlay:
            raise self.session.diverged(
                f"the script looks at {full}, which was made since it began, and what the dead"
                " worker saw there is not in its log"
            )

    def unchanged(self, full: str) -> bool:
        """Whether what is there is what was there when the run began, or the replay's own."""
        if any(path in self._overlay for path in (full, *above(full))):
            return True
        return self._old.where(full) == full

    def is_changed(self, full: str) -> bool:
        """Whether a worker has registered a change of it, and it is not the replay's own."""
        return full not in self._overlay and self._old.first(full) is not None

    def kept(self, full: str, stamp: Stamp) -> str | None:
        """Where a content with this stamp may be kept; or, in a replay, what it has written."""
        return self._overlay.get(full) or self._old.kept(full, stamp)

    def status(self, path: Any, status: os.stat_result) -> os.stat_result:
        """What the script is told of a path, given what the file system says of `read_path`."""
        full = self.path(path)
        if full is None or any(p in self._overlay for p in (full, *above(full))):
            return status
        return self._old.status(full, status)

    def write_path(
        self, path: Any, keep_content: bool, append: bool = False, content: Any = None
    ) -> Any:
        """The path to really write to (live: the same, after `touch`).

        Args:
            content: in a replay, where it was found to be (a path as that of `Seen.read`).
        """
        if not self.replaying:
            self._writes(path, append)
            return path
        full = self.path(path)
        if full is None:
            return path
        self._changes(full)
        where = self.look(full)
        if not self.seen.exact and not self.exists(os.path.dirname(full)):
            raise missing(path)
        (self._appended.add if append else self._appended.discard)(full)
        if where is not None and where.startswith(str(self.scratch)):
            return where
        if content is not None:
            where = full if content is path else str(content)
        new = self._new_scratch(full)
        if keep_content and where is not None and self.real_exists(where):
            with self.really():
                shutil.copy2(where, new)
        self._overlay[full] = new
        return new

    def readable(self, path: Any) -> Any:
        """The path to really ask for permissions; None: its file is not there any more."""
        full = str(self.path(path))
        where = self.look(full) if self.replaying else full
        with self.really():
            return where if where is not None and os.path.exists(where) else None

    def _writes(self, path: Any, append: bool = False) -> None:
        """Live: a path is about to be written."""
        full = self.path(path)
        if full is None:
            return
        self.operations.writes(full, self.is_there(full))
        if self.touch(path, in_place=True) and append:
            self.operations.appends(full)

    def real_exists(self, path: str) -> bool:
        try:
            self.real.os_stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def exists(self, full: str) -> bool:
        where = self.look(full)
        return where is not None and self.real_exists(where)

    def _new_scratch(self, full: str) -> str:
        self._number += 1
        return str(self.scratch / f"{self._number}-{os.path.basename(full)[-100:]}")

    def _changes(self, full: str, below: bool = False) -> None:
        """The replay changes a path. Past the end of the dead worker's log nothing says whether it
        had done so."""
        self.seen.mine(full, below)
        if self.session.past is not None and get_ident() == self.session.main:
            raise Divergence(
                f"the dead worker's log ends before its script changed {full}: whether it had done "
                "so is not known"
            )

    def remove(self, path: Any, full: str) -> None:
        self._changes(full)
        if not self.seen.exact and not self.exists(full):
            raise missing(path)
        self._overlay[full] = None

    def make_folder(self, path: Any, full: str) -> None:
        self._changes(full)
        if not self.seen.exact:
            if self.exists(full):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(path))
            if not self.exists(os.path.dirname(full)):
                raise missing(path)
        new = self._new_scratch(full)
        self.real.os_mkdir(new)
        self._overlay[full] = new

    def rename(self, source: Any, full: str, target: str) -> None:
        found = self.seen.found(CONTENT, source, at=full)
        where = self.look(full) if found is None else self.seen.content(found)
        self._changes(full, below=True)
        self._changes(target, below=True)
        if where is None or not self.real_exists(where):
            self._must_be_explained(full)
            raise missing(source)
        if stat.S_ISDIR(self.real.os_stat(where).st_mode):
            members = self.members(full)
            new = self._new_scratch(target)
            self.real.os_mkdir(new)
            self._overlay[target] = new
            for name in members:
                self.rename(source, os.path.join(full, name), os.path.join(target, name))
        else:
            self._overlay[target] = where
        self._overlay[full] = None

    def members(self, full: str) -> list[str]:
        """The names in a folder, in the old view."""
        where = self.look(full)
        if where is None:
            raise missing(full)
        names: dict[str, None] = {}
        if full not in self._overlay:
            names = dict.fromkeys(self.real.os_listdir(where))
            for path in self._old.changed_in(full):
                base = os.path.basename(path)
                line = self._old.first(path)
                if line is not None and line.kept is None:
                    names.pop(base, None)
                elif line is not None:
                    names[base] = None
        for path, content in self._overlay.items():
            folder, base = os.path.split(path)
            if folder == full and content is None:
                names.pop(base, None)
            elif folder == full:
                names[base] = None
        return list(names)

    def changed_folder(self, full: str) -> bool:
        """The view of this folder may differ from the real one."""
        if full in self._overlay or self.look(full) != full or self._old.changed_in(full):
            return True
        return any(os.path.dirname(path) == full for path in self._overlay)

    def listed(self, full: str | None, names: Iterable[str]) -> None:
        """The script has been told that these are in a folder."""
        if full is not None and self.replaying:
            self._old.listed(full, names)

    def opened(self, file: Any, path: Any, scratch: str) -> None:
        """Remember a file, or a descriptor, that the replay holds open for writing."""
        full = self.path(path)
        if full is not None:
            self._open.add(file, full, scratch)

    def wrote(self, path: Any) -> bool:
        """Whether the content of `path` is, or may be, the replay's own."""
        full = self.path(path)
        return full is None or self._overlay.get(full) is not None

    # --- the end of a replay

    def end_replay(self) -> None:
        """Lead open files to the real ones, as far as they were written at this boundary."""
        self._old.settle()
        with self.really():
            done = self._open.lead_all(self._old.is_mine)
            for full in self._appended - done:
                where = self._overlay.get(full)
                if where is not None and os.path.isfile(full) and self._old.is_mine(full):
                    open_files.cut(full, where)
            self.operations.take_over()
            self._looks.take_over()
            for full in self.operations.appended:
                if full not in self._overlay and self._old.is_mine(full) and os.path.isfile(full):
                    open_files.as_before(self._registry.lines[full])
        self.replaying = False
        with self.really():
            shutil.rmtree(self.scratch, ignore_errors=True)
        self._overlay.clear()

    def abort(self) -> None:
        """Stop viewing, leave everything as it is."""
        self.replaying = False
        self.active = False
