"""What a worker notes of its own failure for the agent, beside torch's error file.

A fresh process loads this file by its path, at its end (`plain_site/sitecustomize.py`). It imports
only what an interpreter has in memory when it is up: a module that lies beside the script may have
the name of any other.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

_PRIME = 2**127 - 1


def note_failure(path: str) -> Callable[..., None]:
    """What writes the facts of the script's own failure for the agent.

    ``digest`` is equal on two ranks that failed in the same way; ``formed_group`` tells whether a
    process group existed, that is, whether the environment can be to blame. To be called with the
    exception, and with the place where it was raised if it does not know.
    """

    def note(error: BaseException, place: str = "") -> None:
        if not path or (isinstance(error, SystemExit) and error.code in (None, 0)):
            return
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        if trace is not None and not place:
            place = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        text = f"{type(error).__name__}: {error}"
        c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
        formed = False
        if c10d is not None:
            formed = bool(c10d._world.pg_map) or c10d._world.group_count > 0
        facts = {
            "error": text[:2000],
            "digest": _digest(f"{text}\n{place}"),
            "formed_group": formed,
            "exception": not isinstance(error, SystemExit),
        }
        temporary = f"{path}.new"
        with open(temporary, "w", encoding="utf-8", errors="backslashreplace") as record:
            record.write(repr(facts))
        os.replace(temporary, path)

    return note


def _digest(text: str) -> str:
    return f"{int.from_bytes(text.encode(errors='replace'), 'big') % _PRIME:032x}"
