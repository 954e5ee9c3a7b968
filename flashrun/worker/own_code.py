"""The script's own code: a replacement runs what the dead worker has run.

People edit their code while a job trains. So each worker keeps the source of its script and of what
that imports, in a log beside the host-read log, and a replacement compiles what is kept where the
file has another source by now. Python's own modules and installed packages are not kept.

Relied on in Python 3.10 to 3.14: each import of a source file calls ``SourceFileLoader.get_code``;
``linecache`` neither reads nor checks an entry without a time.
"""

from __future__ import annotations

import io
import linecache
import os
import sysconfig
import threading
from collections.abc import Callable, Iterable, Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

import flashrun
from flashrun import messages
from flashrun.worker.replay.journal import Position, Reader, Writer

FOLDER = "code"  # beside the host-read log
_SOURCE = 1  # kind of a record: path, newline, source
_INSTALLED = tuple(
    os.path.join(folder, "")
    for folder in {
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        os.path.dirname(os.path.abspath(flashrun.__file__)),
    }
)
_PACKAGES = ("/site-packages/", "/dist-packages/")  # of another installation, seen by this one


class CodeChanged(Exception):
    """A replacement would not run what the dead worker has run."""


def _is_own(path: str) -> bool:
    installed = path.startswith(_INSTALLED) or any(part in path for part in _PACKAGES)
    return path.endswith(".py") and not installed


class OwnCode:
    """See the module.

    Args:
        folder: of the log.
        fresh: no worker before this one has left anything.

    Attributes:
        on_failure: told why nothing more can be kept.
    """

    def __init__(self, folder: Path, fresh: bool) -> None:
        self.on_failure: Callable[[OSError], None] | None = None
        self._failure: OSError | None = None
        self._kept: dict[str, list[bytes]] = {}  # what the dead worker has run, the next one first
        self._seen: set[str] = set()
        self._lock = threading.Lock()
        self._pid = os.getpid()
        # Until torch is there: a script that never imports it has no descriptor of ours.
        self._early: list[tuple[str, bytes]] | None = []
        self._writer: Writer | None = None
        self._folder = folder
        self._end: Position | None = None
        try:
            if fresh:
                for old in folder.glob("log.*"):
                    old.unlink()  # of another round
            else:
                self._end = self._load(folder)
        except OSError as error:
            self._failure = error

    def _load(self, folder: Path) -> Position | None:
        try:
            reader = Reader(folder)
        except (FileNotFoundError, ValueError):
            return None  # it was killed before it had one
        while (record := reader.take()) is not None:
            path, _, source = record.payload.partition(b"\n")
            self._kept.setdefault(os.fsdecode(path), []).append(source)
        return reader.here

    def then(self, path: str) -> bytes | None:
        """The source that a file had when the dead worker ran it; None: that which it has."""
        if not _is_own(path):
            return None
        try:
            with io.open_code(path) as file:  # as an import does; `open` may be the replay's
                now = file.read()
        except OSError:
            now = b""  # the import finds out
        with self._lock:
            self._seen.add(path)
            kept = self._kept.get(path)
            if not kept:
                self._keep(path, now)
                return None
            source = kept.pop(0)
        if source == now:
            return None
        lines = io.TextIOWrapper(io.BytesIO(source), "utf-8", "replace").readlines()
        linecache.cache[path] = len(source), None, lines, path
        return source

    def _keep(self, path: str, source: bytes) -> None:
        if os.getpid() != self._pid:  # a child has no log
            return
        if self._early is not None:
            self._early.append((path, source))
            return
        if self._writer is None:
            return
        try:
            self._writer.append(_SOURCE, 0, os.fsencode(path) + b"\n" + source)
        except OSError as error:
            self._writer, self._failure = None, error
            if self.on_failure is not None:
                self.on_failure(error)

    def _open(self) -> None:
        """Begin the log, with what has been run so far."""
        with self._lock:
            early, self._early = self._early, None
            if early is None or self._failure is not None:
                return
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._writer = Writer(self._folder, self._end)
            except OSError as error:
                self._failure = error
            for path, source in early:
                self._keep(path, source)

    def settle(self, loaded: Iterable[Any]) -> None:
        """What has been imported past us is kept as well (the script of a worker that is a fresh
        process); where the dead worker had run another source, nothing can be done.

        Raises:
            OSError: what was to be kept could not be.
            CodeChanged
        """
        self._open()
        if self._failure is not None:
            raise self._failure
        for module in loaded:
            # (Not an attribute: a module that loads itself late may begin to.)
            path = getattr(module, "__dict__", {}).get("__file__")
            if isinstance(path, str) and path not in self._seen:
                self.must_be_as_then(path)

    def must_be_as_then(self, path: str) -> None:
        """Raises CodeChanged."""
        if self.then(path) is not None:
            raise CodeChanged(
                f"{path} was changed since the dead worker had run it, which flashrun can't make"
                " good with --no-zygote, --no-python and --run-path"
            )


own_code: OwnCode | None = None
"""This worker's; None: it is not replaced in place."""


def begin(environ: Mapping[str, str]) -> None:
    """In a worker, before its script runs."""
    global own_code
    if own_code is not None or messages.CHANNEL not in environ:
        return
    folder = Path(environ[messages.RUN_DIR], "replay", f"rank{environ['RANK']}", FOLDER)
    mine = own_code = OwnCode(folder, fresh=environ.get(messages.INCARNATION, "0") == "0")
    original = SourceFileLoader.get_code

    def get_code(self: SourceFileLoader, fullname: str) -> CodeType | None:
        source = mine.then(self.path)
        if source is not None:
            code: CodeType = self.source_to_code(source, self.path)
            return code
        return original(self, fullname)

    # Python leaves its own frames of an import out of a traceback, and so this one.
    name = SourceFileLoader.exec_module.__code__.co_filename
    get_code.__code__ = get_code.__code__.replace(co_filename=name)
    place: Any = SourceFileLoader
    place.get_code = get_code


def source_of(path: str) -> bytes:
    """The script's source."""
    source = own_code.then(path) if own_code is not None else None
    if source is None:
        with open(path, "rb") as file:
            source = file.read()
    return source


def check(path: str) -> None:
    """For a script that is not run from what `source_of` gives. Raises CodeChanged."""
    if own_code is not None:
        own_code.must_be_as_then(path)
