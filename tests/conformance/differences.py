"""The intended differences between torchrun and flashrun: one list, each with its reason.

A difference is named by the key of what was observed (see harness.py), the rows where it may
occur, and, where that says more, a rule that both values must satisfy.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Difference:
    """One intended difference.

    Attributes:
        key: regular expression for the whole key.
        reason: why flashrun differs, and where that was decided.
        rows: regular expression for the whole name of the row.
        holds: what must be true of torchrun's and flashrun's value (None where absent).
    """

    key: str
    reason: str
    rows: str = ".*"
    holds: Callable[[Any, Any], bool] = lambda torchrun, flashrun: True

    def covers(self, row: str, key: str, torchrun: Any, flashrun: Any) -> bool:
        return bool(
            re.fullmatch(self.rows, row)
            and re.fullmatch(self.key, key)
            and self.holds(torchrun, flashrun)
        )


_RANK = r"rank\w+\.attempt\d+"

@dataclass(frozen=True)
class Filtered:
    """What is taken out of the output of both before it is compared.

    Attributes:
        lines: regular expression for whole lines; "" if it is a block.
        block: for text of several lines.
        reason: why it is not compared.
    """

    reason: str
    lines: str = ""
    block: str = ""


FILTERED = [
    Filtered("the launcher's own words: torchrun's log",
             lines=r"[VDIWEF]\d{4} \d\d:\d\d:\d\d\.\d+ \d+ \S+:\d+\] ?.*"),
    Filtered("the launcher's own words: flashrun's", lines=r"\[?flashrun\b.*"),
    Filtered("what torch's C++ side says of a connection that went away, with its stack",
             lines=r"\[[VDIWEF]\d{4} .*|frame #\d+: .*|Exception raised from .*"
             r"|<omitting python frames>.*"),
    Filtered("events; they are compared by themselves, without their times",
             lines=r'\{"name": "torchelastic.*'),
    Filtered("the traceback of torchrun itself when a job has failed; flashrun shows the report",
             block=r"^Traceback \(most recent call last\):\n"
             r"(?:(?:  .*|During .*|Traceback .*)?\n)*?"
             r"torch\.distributed\.elastic\.multiprocessing\.(?:errors\.ChildFailedError|"
             r"api\.SignalException): ?.*\n"),
    Filtered("the last lines of the rank that failed first, without @record (issue 2)",
             block=r"^Last lines of standard error of rank \d+ .*:\n(?:  .*\n|\n)*"),
]  # fmt: skip

# Nor is compared, since it is not the same in two runs of one launcher either: the order in which
# lines of several ranks (or of both streams) come, process ids, free ports, random names, and the
# report's times.

DIFFERENCES = [
    Difference(
        rf"{_RANK}\.env\.PYTHONHASHSEED",
        "one hash seed for the whole job, so that a replacement's sets have the order of the dead "
        "process's (DESIGN.md, section 3)",
        holds=lambda torchrun, flashrun: torchrun is None and flashrun.isdigit(),
    ),
    Difference(
        rf"{_RANK}\.env\.FLASHRUN_\w+",
        "how the worker runtime finds its agent and how leftovers are recognised",
        holds=lambda torchrun, flashrun: torchrun is None,
    ),
    Difference(
        "tmp",
        "temporary folders are removed on success (issue 2); torchinductor_USER is torch's own "
        "cache for all runs of a user, made by torch._dynamo in the zygote",
        holds=lambda torchrun, flashrun: set(flashrun) <= {"torchinductor"},
    ),
    Difference(
        "tmp",
        "torch's own cache for all runs of a user, made by torch._dynamo in the zygote",
        holds=lambda torchrun, flashrun: set(flashrun) - {"torchinductor"} <= set(torchrun),
    ),
    Difference(
        rf"{_RANK}\.modules",
        "a worker forked from the zygote has in memory what torch had imported; torch itself must "
        "stay out of sight (DESIGN.md, section 3)",
        holds=lambda torchrun, flashrun: ("torch" in flashrun) == ("torch" in torchrun),
    ),
    Difference(
        rf"{_RANK}\.interpreter\.atexit",
        "the exit handlers of those modules (multiprocessing, logging, concurrent.futures)",
        holds=lambda torchrun, flashrun: flashrun > torchrun,
    ),
    Difference(
        rf"{_RANK}\.interpreter\.gc",
        "the zygote's objects are frozen, so that their memory stays shared; thresholds are equal",
        holds=lambda torchrun, flashrun: torchrun[:2] == flashrun[:2],
    ),
    Difference(
        rf"{_RANK}\.meta_path",
        "one finder hides torch until the script imports it, or waits for that in a fresh process",
        holds=lambda torchrun, flashrun: (
            [f for f in flashrun if f not in ("TorchGate", "_TorchIsThere")] == torchrun
        ),
    ),
    Difference(
        r"report\.root\.\d+\.host",
        "no name look-ups: the host's own name in place of the resolver's answer (issue 2)",
        holds=lambda torchrun, flashrun: torchrun is not None and flashrun == socket.gethostname(),
    ),
    Difference(
        "status|stdout|stderr|rank.*|report.*",
        "options after the script are the script's; torchrun calls these ambiguous (issue 2)",
        rows="args_ambiguous_after_script",
    ),
    Difference(
        rf"{_RANK}\.(signals\.SIGHUP|status\.SigIgn)",
        "SIGHUP ignored at start (nohup) stays ignored (issue 2)",
        rows="nohup",
    ),
    Difference(
        rf"{_RANK}\.(argv|orig_argv)",
        "a first -- after the script is the script's; torchrun eats it (issue 2)",
        rows="args_double_dash_first",
        holds=lambda torchrun, flashrun: [w for w in flashrun if w != "--"] == torchrun,
    ),
    Difference(
        rf"{_RANK}|status|stdout|stderr|report.*",
        "a script that fails alike on every rank before it ever formed a group is not restarted: "
        "one attempt, the error shown (issue 2)",
        rows="fails_then_succeeds",
        holds=lambda torchrun, flashrun: torchrun != [1] and flashrun != [0],
    ),
    Difference(
        rf"{_RANK}\.env\.MASTER_(ADDR|PORT)",
        "workers use the store at the endpoint; torchrun opens a second one on a free port under a "
        "name that has to be looked up. One store, no look-ups; a restart has keys of its own",
        rows="c10d_.*|nnodes_elastic_one_node|gloo_c10d_two_agents",
        holds=lambda torchrun, flashrun: flashrun in ("127.0.0.1", "localhost", "<PORT>"),
    ),
    Difference(
        "status",
        "a job has one result; torchrun's agents each give that of their own workers (issue 2: one "
        "node finishes while another fails)",
        rows="static_two_agents_one_fails",
        holds=lambda torchrun, flashrun: (torchrun, flashrun) == ([0, 1], [1, 1]),
    ),
    Difference(
        rf"{_RANK}\.fds\.2",
        "standard error that is neither a terminal nor shared with standard output is passed on "
        "through a file: its last lines are shown without @record, whoever wrote them (issue 2)",
        holds=lambda torchrun, flashrun: "pipe w " in torchrun and "/stderr." in flashrun,
    ),
    Difference(
        rf"{_RANK}\.(fds\.\d+|streams\.stdin\.name)",
        "torchrun's child inherits descriptors of its parent and of multiprocessing's tracker, and "
        "standard input comes after them",
        rows="run_path.*",
    ),
    Difference(
        rf"{_RANK}\.status\.Threads",
        "a thread of torch's that torchrun's child starts as it imports the launcher again",
        rows="run_path.*",
        holds=lambda torchrun, flashrun: int(torchrun) > int(flashrun),
    ),
    Difference(
        rf"{_RANK}\.orig_argv",
        "the child of torchrun is multiprocessing's, not the launcher again",
        rows="run_path.*",
        holds=lambda torchrun, flashrun: "--multiprocessing-fork" in torchrun,
    ),
    Difference(
        rf"{_RANK}\.(session|group)_leader",
        "every worker has a session of its own, as torchrun gives it to all but these: Ctrl-C "
        "reaches it through flashrun only, which knows the shutdown timeout",
        rows="run_path.*",
        holds=lambda torchrun, flashrun: flashrun and not torchrun,
    ),
    Difference(
        rf"{_RANK}\.(streams\.std(out|err)\.(buffer|line_buffering|write_through))",
        "every worker is unbuffered, as torchrun has it for all but these: the last lines of a "
        "killed one are not lost",
        rows="run_path.*",
    ),
    Difference(
        "stderr",
        "the traceback is on standard error too, as for every other script; torchrun has it in the "
        "report only",
        rows="run_path_raises",
        holds=lambda torchrun, flashrun: set(torchrun) <= set(flashrun),
    ),
    Difference(
        r"report\.root\.\d+\.traceback",
        "where the last lines of standard error follow the report, it does not say how to get a "
        "traceback",
        holds=lambda torchrun, flashrun: "To enable traceback see" in str(torchrun)
        and flashrun == "see the last lines of its standard error, below",
    ),
    Difference(
        r"report\.others(\..*)?",
        "ranks that the launcher stopped itself are not listed as failures (issue 2)",
        holds=lambda torchrun, flashrun: not flashrun,
    ),
]


def explanation(row: str, key: str, values: tuple[Any, Any]) -> Difference | None:
    """The intended difference that covers this one: the first in the list."""
    return next((d for d in DIFFERENCES if d.covers(row, key, *values)), None)
