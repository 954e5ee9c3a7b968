"""Runs a script, module or path as ``__main__`` in a forked process, as ``python -u …`` would.

What CPython does is in Modules/main.c (``pymain_run_python``), Python/pythonrun.c
(``_PyRun_SimpleFileObject``) and Lib/runpy.py; this follows 3.10 to 3.14. Frames of flashrun below
the script's are left out of the traceback of an uncaught exception; everything after that
(``sys.excepthook``, exit codes, ``atexit``, joining threads) is left to the interpreter, since the
caller returns to the top of the process.
"""

from __future__ import annotations

import os
import runpy
import sys
import zipfile
from collections.abc import Callable
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from types import CodeType, ModuleType, TracebackType
from typing import Any

import flashrun
from flashrun.worker import own_code

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def fresh_main() -> ModuleType:
    """Put a new, empty ``__main__`` into ``sys.modules``, with what the interpreter gives one."""
    module = ModuleType("__main__")
    if sys.version_info < (3, 14):
        module.__dict__.update(__annotations__={})
    module.__dict__["__builtins__"] = sys.modules["builtins"]
    loader = sys.modules["__main__"].__loader__
    # A module run by -m or from a folder starts with the importer of built-in modules (3.10 to
    # 3.14, pylifecycle.c, add_main_module); runpy replaces it.
    module.__loader__ = getattr(sys.modules["builtins"], "__loader__", loader)
    sys.modules["__main__"] = module
    if "__mp_main__" in sys.modules:  # multiprocessing/__init__.py made it an alias
        sys.modules["__mp_main__"] = module
    return module


def absolute_as_python(path: str) -> str:
    """``path`` made absolute the way CPython does it for ``__file__``: joined, not normalised."""
    return os.path.join(os.getcwd(), path)


def safe_path() -> bool:
    """Whether ``sys.path[0]`` must not be prepended (PYTHONSAFEPATH, Python 3.11)."""
    return bool(getattr(sys.flags, "safe_path", False))


def _code_of(path: str) -> CodeType:
    data = own_code.source_of(path)
    if path.endswith(".pyc"):
        code = SourcelessFileLoader("__main__", path).get_code("__main__")
        assert code is not None
        return code
    return compile(data, path, "exec", dont_inherit=True)


def run_script(path: str, arguments: tuple[str, ...]) -> None:
    """``python -u path arguments…``: a file, or a folder or zip file with ``__main__.py``."""
    sys.argv = [path, *arguments]
    sys.orig_argv = [sys.executable, "-u", path, *arguments]
    main = fresh_main()
    if os.path.isdir(path) or zipfile.is_zipfile(path):
        sys.path.insert(0, absolute_as_python(path))
        run_module: Any = runpy._run_module_as_main  # type: ignore[attr-defined]
        run_module("__main__", False)
        return
    if not safe_path():
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    file = absolute_as_python(path)
    main.__file__ = file
    if sys.version_info < (3, 15):
        main.__dict__["__cached__"] = None
    kind = SourcelessFileLoader if path.endswith(".pyc") else SourceFileLoader
    main.__loader__ = kind("__main__", file)
    exec(_code_of(file), main.__dict__)


def run_module(name: str, arguments: tuple[str, ...]) -> None:
    """``python -u -m name arguments…``."""
    sys.argv = ["-m", *arguments]
    sys.orig_argv = [sys.executable, "-u", "-m", name, *arguments]
    fresh_main()
    if not safe_path():
        sys.path.insert(0, os.getcwd())
    run: Any = runpy._run_module_as_main  # type: ignore[attr-defined]
    run(name)


def run_path(path: str, arguments: tuple[str, ...]) -> None:
    """``--run-path``: torch's ``run_script_path`` under ``@record``, standard input closed.

    torchrun calls it in a multiprocessing child, whose standard input is /dev/null and whose
    ``sys.path`` is the launcher's.
    """
    from multiprocessing import util
    from typing import cast

    from torch.distributed.elastic.multiprocessing.errors import record
    from torch.distributed.run import run_script_path

    close_stdin = cast("Callable[[], None]", getattr(util, "_close_stdin"))  # noqa: B009
    close_stdin()
    own_code.check(path)
    fresh_main()
    if flashrun.STARTED_FROM is not None:
        sys.path.insert(0, flashrun.STARTED_FROM)
    record(run_script_path)(path, *arguments)


def _without_our_frames(traceback: TracebackType | None) -> TracebackType | None:
    while traceback is not None and traceback.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        traceback = traceback.tb_next
    return traceback


def run_to_the_end(
    body: Callable[[], None],
    on_failure: Callable[[BaseException], None] = lambda error: None,
    on_end: Callable[[BaseException | None], None] = lambda error: None,
) -> None:
    """Run ``body`` and let what it raises reach the interpreter as if there were no frames of ours.

    Args:
        body: runs the script.
        on_failure: told of the exception, SystemExit included, before the interpreter deals with
            it (to note it for the report).
        on_end: told of the end in any case, after that; None: without an exception.

    Raises:
        BaseException: whatever the script raised.
    """
    try:
        body()
    except SystemExit as error:
        on_failure(error)
        on_end(error)
        raise
    except BaseException as error:
        hook = sys.excepthook
        on_failure(error)
        on_end(error)

        def show(
            kind: type[BaseException], value: BaseException, traceback: TracebackType | None
        ) -> None:
            sys.excepthook = hook
            traceback = _without_our_frames(traceback)
            hook(kind, value.with_traceback(traceback), traceback)

        sys.excepthook = show
        raise
    on_end(None)
