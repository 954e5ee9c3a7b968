"""Whether there is a torch that can be used; imports nothing else that needs one."""

from __future__ import annotations

import re
import sys

from flashrun.errors import UsageError

_OLDEST = (2, 13)
_WANTED = ".".join(map(str, _OLDEST))


def check_torch() -> None:
    """Import torch.

    Raises:
        UsageError: it is not there, cannot be loaded or is too old.
    """
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a library of its that is not there
        text = " ".join(str(error).split())
        raise UsageError(
            f"{sys.executable} cannot import torch ({text}); give it one:"
            f" pip install 'torch>={_WANTED}'"
        ) from None
    check_version(getattr(torch, "__version__", "of no version"))


def check_version(version: str) -> None:
    """``version`` is torch.__version__, e.g. ``2.13.0+cpu``."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or (int(match[1]), int(match[2])) < _OLDEST:
        raise UsageError(
            f"torch {version} is too old; flashrun needs {_WANTED} or newer:"
            f" pip install 'torch>={_WANTED}'"
        )
