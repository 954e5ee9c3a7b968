"""First on the ``PYTHONPATH`` of a worker that is a fresh process: notes how its script failed, and
brings the worker runtime in.

Python's ``site`` imports it before the script. It takes itself off the path again, so that neither
the script nor its children see it, imports the ``sitecustomize`` that would have been found without
it, and, in the worker's own process, leaves what tells the script's failure at exit and, where
workers are replaced in place, waits for torch: as soon as the script has imported it, the runtime
is installed. Nothing of flashrun is imported before that; what a script that never imports torch
has of it is read at its failure. (`flashrun.node.plain` sets the variables.)
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

_HERE = os.path.dirname(os.path.abspath(__file__))


def _leave() -> None:
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _HERE]
    sys.path_importer_cache.pop(_HERE, None)
    rest = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    rest = [entry for entry in rest if entry != _HERE]
    if rest:
        os.environ["PYTHONPATH"] = os.pathsep.join(rest)
    else:
        os.environ.pop("PYTHONPATH", None)


def _chain() -> None:
    this = sys.modules.pop("sitecustomize")
    try:
        import sitecustomize  # noqa: F401  the user's, now that ours is off the path
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = this  # importlib wants to find it there


class _TorchIsThere(MetaPathFinder):
    """At the front of ``sys.meta_path``: calls back when torch has been imported."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then
        self._loader: Any = None

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.loader is not None:
            loader: Any = self
            self._loader, spec.loader = spec.loader, loader
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._then()


def _install() -> None:
    try:
        from flashrun.node.plain import install
    except ImportError as error:
        print(
            f"flashrun: warning: no recovery in place: {sys.executable} cannot import flashrun"
            f" ({error}); install flashrun there too",
            file=sys.stderr,
        )
        return
    install()


_exited: dict[str, str] = {}  # "at": where ``sys.exit`` was called last


def _note_exits() -> None:
    original = sys.exit

    def exit(status: Any = None, /) -> NoReturn:
        caller = sys._getframe(1)  # the interpreter keeps no traceback of this exception
        _exited.update(at=f"{caller.f_code.co_filename}:{caller.f_lineno}")
        sys.last_value = SystemExit(status)
        raise sys.last_value

    exit.__doc__ = original.__doc__
    sys.exit = exit


def _note_failure(record: str, worker: int) -> None:
    """At exit, which is not told how the script ended."""
    error = getattr(sys, "last_value", None)
    if error is None or os.getpid() != worker:  # a child that the script has forked
        return
    # By its path: this interpreter need not have flashrun.
    path = os.path.join(os.path.dirname(_HERE), "failure_note.py")
    spec = importlib.util.spec_from_file_location("_flashrun_failure_note", path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        place = _exited.get("at", "") if isinstance(error, SystemExit) else ""
        module.note_failure(record)(error, place)


def _main() -> None:
    worker = os.environ.pop("FLASHRUN_PLAIN_PID", "")
    record = os.environ.pop("FLASHRUN_RECORD", "")
    _leave()
    _chain()
    if worker != str(os.getpid()):
        return
    _note_exits()
    atexit.register(_note_failure, record, os.getpid())
    if "FLASHRUN_CHANNEL" in os.environ:
        sys.meta_path.insert(0, _TorchIsThere(_install))


_main()
