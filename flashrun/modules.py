"""Where a module is, found without running any code of the user's."""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder


def find_module(name: str) -> str | None:
    """The file that ``python -m name`` would run; None if it cannot be told beforehand.

    ``importlib.util.find_spec`` imports the parents of a dotted name, which the launcher must not
    do: its workers are forks of it.

    Raises:
        ModuleNotFoundError: there is no such module; the message says what was looked for.
    """
    parts = name.split(".")
    sys.path.insert(0, os.getcwd())
    try:
        spec = _top_level(parts[0])
    finally:
        del sys.path[0]
    if spec is None:
        raise ModuleNotFoundError(f"there is no module '{parts[0]}'")
    for index, part in enumerate(parts[1:], start=2):
        spec = _inside(spec, part, ".".join(parts[:index]))
        if spec is None:
            return None
    if spec.submodule_search_locations is not None:
        inner = _inside(spec, "__main__", f"{name}.__main__")
        return None if inner is None else inner.origin
    return spec.origin


def _top_level(name: str) -> ModuleSpec | None:
    """Asks the finders and not sys.modules, where the launcher's own imports would hide a module of
    the same name in the current folder."""
    if not name:
        return None
    for finder in sys.meta_path:
        spec = finder.find_spec(name, None)
        if spec is not None:
            return spec
    return None


def _inside(spec: ModuleSpec, part: str, name: str) -> ModuleSpec | None:
    """The spec of a package's part; None if the package makes its path only when it is imported."""
    places = spec.submodule_search_locations
    if places is None:
        raise ModuleNotFoundError(f"'{spec.name}' is not a package, so there is no '{name}'")
    found = PathFinder.find_spec(name, list(places))
    if found is not None:
        return found
    if spec.origin is not None and spec.origin.endswith("__init__.py"):
        with open(spec.origin, encoding="utf-8", errors="replace") as file:
            if "__path__" in file.read():
                return None
    if part == "__main__":
        raise ModuleNotFoundError(
            f"'{spec.name}' is a package without __main__, so it cannot be run"
        )
    raise ModuleNotFoundError(f"there is no module '{name}'")
