"""Can a forked worker serve this job as a fresh interpreter would? Decided before the start.

Forking from the zygote is an optimisation, so every doubt is resolved towards a plain process.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from flashrun.job import Job
from flashrun.modules import find_module
from flashrun.node.torch_gate import APPLIED, is_load_time

# A larger script is not scanned: it is generated, and a fresh interpreter costs it little.
_SCAN_LIMIT_BYTES = 4 << 20


def variables_set_by(source: str) -> set[str]:
    """Load-time environment variables whose names stand as strings in Python ``source``.

    A script that sets such a variable before it imports torch names it, nearly always as a literal.
    A name that is only read costs nothing but the zygote's speed.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return set()  # the interpreter reports it, in either kind of worker
    constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return {value for value in constants if isinstance(value, str) and is_load_time(value)}


# Whoever uses one of these may load anything, under a name that stands nowhere.
_LOADERS = frozenset({"importlib", "runpy", "pkgutil", "__import__", "exec", "eval"})


def may_import_torch(source: str) -> bool:
    """Whether a script can come to import torch, by itself or through what it imports.

    It cannot if everything that it imports, wherever in its text, is of the standard library. The
    answer decides on speed alone: what is not loaded in the zygote is loaded in each worker.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return False  # it will not run
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name.split(".", 1)[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(node.module or "").split(".", 1)[0] if node.level == 0 else "."]
        elif isinstance(node, ast.Name) and node.id in _LOADERS:
            return True
        if any(name in _LOADERS or name not in sys.stdlib_module_names for name in names):
            return True
    return False


def worth_preloading(job: Job) -> bool:
    """Whether the zygote should import what torch scripts need before it forks the first worker."""
    if job.kind == "module":  # its packages, which run first, were to be looked into as well
        return True
    found = _source_of(job)
    return found is None or not found[0].endswith(".py") or may_import_torch(found[1])


def shadowed(folder: str, loaded: Iterable[str], standard: Iterable[str]) -> str | None:
    """A module in ``folder`` that a fresh interpreter would import instead of a loaded one.

    Args:
        folder: what becomes ``sys.path[0]``.
        loaded: top-level names that are in memory in the zygote.
        standard: names that a bare interpreter has loaded before it looks at ``sys.path[0]``.

    Returns:
        The name, or None.
    """
    try:
        entries = os.listdir(folder or ".")
    except OSError:
        return None
    names = {entry.split(".", 1)[0] for entry in entries if entry.endswith((".py", ".so"))}
    names |= {e for e in entries if os.path.isfile(os.path.join(folder, e, "__init__.py"))}
    hits = (names & set(loaded)) - set(standard)
    return min(hits) if hits else None


def _source_of(job: Job) -> tuple[str, str] | None:
    """(path, source) of what will be ``__main__``, if it is one readable Python file."""
    path: str | None = job.target
    if job.kind == "module":
        path = find_module(job.target)
    elif path is not None and os.path.isdir(path):
        path = os.path.join(path, "__main__.py")
    if path is None or not os.path.isfile(path) or os.path.getsize(path) > _SCAN_LIMIT_BYTES:
        return None
    try:
        return path, Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return path, ""  # a zip file, a .pyc: nothing to scan


def reason_for_plain(
    job: Job, loaded: Iterable[str], standard: Iterable[str], environ: Mapping[str, str]
) -> str | None:
    """Why this job's workers have to be fresh processes; None if the zygote can serve it.

    Args:
        job: what to run.
        loaded: top-level module names in the zygote's memory.
        standard: those that every interpreter has at its start.
        environ: the job's environment.
    """
    if job.kind == "program":
        return "--no-python: the program is not Python's to fork"
    if not job.settings.zygote:
        return "--no-zygote was given"
    if job.python != sys.executable:
        return f"PYTHON_EXEC names another interpreter ({job.python})"
    found = _source_of(job)
    if found is None:
        return f"{job.target} is not a single Python file"
    path, source = found
    names = sorted(variables_set_by(source) - APPLIED)
    if names:
        return f"{path} names {', '.join(names)}, read by torch's libraries while they load"
    if not environ.get("PYTHONSAFEPATH"):
        folder = os.getcwd() if job.kind == "module" else os.path.dirname(os.path.realpath(path))
        name = shadowed(folder, loaded, standard)
        if name is not None:
            return f"{folder} has a module {name}, which stands before the one that is loaded"
    return None
