"""What is made of the failures of a job's workers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flashrun.control.records import Failure


def merge_failures(first: Sequence[Failure], more: Sequence[Failure]) -> tuple[Failure, ...]:
    """All failures, each rank once (the first report of it), by time."""
    by_rank: dict[Any, Failure] = {}
    for failure in [*first, *more]:
        by_rank.setdefault(failure.get("rank"), failure)
    return tuple(sorted(by_rank.values(), key=lambda f: (f.get("timestamp", 0), f.get("rank", 0))))


def is_futile(failures: Sequence[Failure], world_size: int) -> bool:
    """Whether a restart can't help: every rank failed by itself, with the same error, before it
    formed a process group. A death by signal is not the script's error (out of memory, operator),
    and without a digest nothing is known."""
    if len({f.get("rank") for f in failures}) < world_size:
        return False
    digests = {str(f.get("error_digest", "")) for f in failures}
    return (
        len(digests) == 1
        and "" not in digests
        and all(not f.get("formed_group", True) for f in failures)
        and all(int(f.get("exitcode", -1)) > 0 for f in failures)
    )
