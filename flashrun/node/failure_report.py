"""What a person is told of a failed job: torch's ChildFailedError report, and the last lines of the
standard error of the rank that failed first.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import (
    ChildFailedError,
    ProcessFailure,
    get_error_handler,
)

# As torch.distributed.elastic.multiprocessing.errors has them.
_NOT_AVAILABLE = "<N/A>"
_NO_TRACEBACK = "To enable traceback see"

Failure = dict[str, Any]


def describe_failure(
    *,
    rank: int,
    local_rank: int,
    pid: int,
    exitcode: int,
    error_file: str,
    host: str,
    facts: Mapping[str, Any],
    tail: Sequence[str],
) -> Failure:
    """One worker's failure as JSON, to be shown on any node.

    Args:
        error_file: the worker's error file; need not exist.
        facts: what the worker noted itself (see worker_process), {} if nothing.
        tail: the last lines of its standard error.
    """
    known = ProcessFailure(local_rank, pid, exitcode, error_file)
    digest = str(facts.get("digest", ""))
    return {
        "rank": rank,
        "local_rank": local_rank,
        "pid": pid,
        "exitcode": exitcode,
        "error_file": known.error_file,
        "error_file_data": known.error_file_data,
        "message": known.message,
        "timestamp": known.timestamp,
        "seen": time.time(),
        "host": host,
        "formed_group": bool(facts.get("formed_group", not digest)),
        "error_digest": digest,
        "tail": list(tail),
    }


def first_failure(failures: Sequence[Failure]) -> Failure:
    """The root cause: the earliest by the error file's time (whole seconds), then as seen."""
    return min(failures, key=lambda f: (f["timestamp"], f["seen"]))


@contextmanager
def _fqdn_is(known: str) -> Iterator[None]:
    # ChildFailedError._format_failure (torch 2.13, errors/__init__.py) asks the resolver for this
    # machine's name for each failure: seconds with a bad resolver, and wrong for another node's.
    original = socket.getfqdn

    def this_name(name: str = "") -> str:
        return name or known

    socket.getfqdn = this_name
    try:
        yield
    finally:
        socket.getfqdn = original


class JobFailedError(ChildFailedError):
    """ChildFailedError over the failures of all nodes, each with its own host."""

    def __init__(self, name: str, failures: Sequence[Failure]) -> None:
        self._hosts = {f["rank"]: f["host"] for f in failures}
        self._root = first_failure(failures)["rank"]
        super().__init__(name, {f["rank"]: _process_failure(f) for f in failures})

    def get_first_failure(self) -> tuple[int, ProcessFailure]:
        return self._root, self.failures[self._root]

    def _format_failure(self, idx: int, rank: int, failure: ProcessFailure) -> tuple[str, int]:
        with _fqdn_is(self._hosts[rank]):
            return super()._format_failure(idx, rank, failure)


def _process_failure(failure: Failure) -> ProcessFailure:
    known = ProcessFailure(failure["local_rank"], failure["pid"], failure["exitcode"], "")
    known.error_file = failure["error_file"]
    known.error_file_data = failure["error_file_data"]
    known.message = failure["message"]
    known.timestamp = failure["timestamp"]
    return known


def report(name: str, failures: Sequence[Failure]) -> str:
    """The text for the terminal.

    Args:
        name: the entry point's name (title of the report).
        failures: at least one.
    """
    root = first_failure(failures)
    shown = bool(root["tail"]) and not isinstance(root["message"], dict)
    if shown and root["message"].startswith(_NO_TRACEBACK):
        below = {**root, "message": "see the last lines of its standard error, below"}
        failures = [below if failure is root else failure for failure in failures]
    text = str(JobFailedError(name, failures))
    if shown:
        lines = "\n".join(f"  {line}" for line in root["tail"])
        text += f"\nLast lines of standard error of rank {root['rank']} (failed first):\n{lines}\n"
    return text


def hand_up(failures: Sequence[Failure]) -> None:
    """Copy the first failure's error file to the launcher's own TORCHELASTIC_ERROR_FILE, if any.

    As ``@record`` on torchrun's main does for a launcher that is itself a worker of something.
    """
    root = first_failure(failures)
    handler = get_error_handler()
    if root["error_file"] != _NOT_AVAILABLE and handler._get_error_file_path():
        handler.dump_error_file(root["error_file"], root["exitcode"])
