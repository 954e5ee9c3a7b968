"""Replaces attributes of modules and classes, and puts them back."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

_MISSING = object()


class _Function(staticmethod):  # type: ignore[type-arg]
    """A static method that can be referred to weakly, as TorchScript does with all it meets."""


class Patches:
    """Replacements made together and undone together, the last one first."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def set(self, owner: Any, name: str, value: Any) -> Any:
        """Set ``owner.name`` to `value`; return what was reached by that name before (or None)."""
        own = vars(owner).get(name, _MISSING)
        before = getattr(owner, name, None)
        setattr(owner, name, value)
        if own is _MISSING:
            self._undo.append(lambda: delattr(owner, name))
        else:
            self._undo.append(lambda: setattr(owner, name, own))
        return before

    def wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace ``owner.name`` by ``make(original)``; a name that `owner` lacks is skipped,
        since what exists differs between versions of Python and torch."""
        original = getattr(owner, name, None)
        if original is None:
            return
        replacement = make(original)
        for attribute in ("__name__", "__qualname__", "__doc__", "__module__"):
            value = getattr(original, attribute, None)
            if value is not None:
                try:
                    setattr(replacement, attribute, value)
                except (AttributeError, TypeError):  # e.g. a partial: cosmetics only
                    break
        if isinstance(original, types.FunctionType) and isinstance(replacement, types.FunctionType):
            # What torch.compile inlines is the original (torch/_dynamo/variables/functions.py).
            replacement._torchdynamo_inline = original  # type: ignore[attr-defined]
        if isinstance(original, types.BuiltinFunctionType) and isinstance(owner, types.ModuleType):
            # a built-in function that a class has as an attribute (``clock = time.time``) is not
            # bound to its instances; a static method behaves alike and may be called itself
            replacement = _Function(replacement)
            self._script(original, replacement)
        self.set(owner, name, replacement)

    def _script(self, original: Any, replacement: Any) -> None:
        """Let TorchScript compile a call of it to the operator, as it does the original's (torch
        2.13, ``torch/jit/_builtins.py``)."""
        builtins = sys.modules.get("torch.jit._builtins")
        if builtins is None:
            return
        operator = builtins._find_builtin(original)
        if operator is not None:
            table = builtins._get_builtin_table()
            table[id(replacement)] = operator
            self.later(lambda: table.pop(id(replacement), None))

    def later(self, undo: Callable[[], object]) -> None:
        """Have `undo` called by `undo`, for what was replaced in another way."""
        self._undo.append(undo)

    def undo(self) -> None:
        """Put everything back."""
        while self._undo:
            self._undo.pop()()
