"""flashrun's own settings: one table drives the flags, the environment, the file and the help.

Precedence: flag, then ``FLASHRUN_<NAME>``, then the YAML file of ``--config``, then the default. A
name or a value that is not known is refused with the place where it was given.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from flashrun.errors import UsageError

PREFIX = "FLASHRUN_"

# Variables with the prefix that are not settings: set by flashrun for its own processes.
INTERNAL_VARIABLES = frozenset(
    {
        "FLASHRUN_CONFIG", "FLASHRUN_JOB_TAG", "FLASHRUN_EXEC_PID", "FLASHRUN_RUN_DIR",
        "FLASHRUN_TOKEN", "FLASHRUN_CHANNEL", "FLASHRUN_INCARNATION", "FLASHRUN_GENERATION",
        "FLASHRUN_ARGS_FD", "FLASHRUN_ADDRESS", "FLASHRUN_ADDRESS_GIVEN", "FLASHRUN_TABLE",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """flashrun's own settings; the defaults are those of the command line.

    Attributes:
        recovery: what happens when a worker is lost.
        spares: nodes beyond --nnodes that wait to replace a lost one.
        spare_timeout: seconds to wait for a spare before all workers are restarted without one.
        grow: what a node is that comes while the job runs on fewer than --nnodes allows.
        max_retries: replacements of one rank without progress in between.
        cordon_after: faults of a node within cordon_window after which it gets no ranks while
            there are others; 0: never.
        cordon_window: seconds.
        heartbeat_interval: seconds between two heartbeats of a node.
        detection_timeout: seconds without a heartbeat after which a node counts as lost.
        log_level: what flashrun itself says.
        zygote: fork workers from a process that has imported torch.
        recovery_timeout: seconds that a recovery in place waits for survivors to come to their next
            collective, and again for replacements to catch up, before all are restarted.
        retain: how many bytes of collectives' inputs a worker keeps for their repetition.
        events: file for one JSON line per event; "" for none.
    """

    recovery: str = "auto"
    spares: int = 0
    spare_timeout: float = 30.0
    grow: str = "spare"
    max_retries: int = 3
    cordon_after: int = 3
    cordon_window: float = 3600.0
    heartbeat_interval: float = 5.0
    detection_timeout: float = 15.0
    log_level: str = "info"
    zygote: bool = True
    recovery_timeout: float = 1800.0  # as long as torch's default timeout of a gloo collective
    retain: str = "on"
    events: str = ""


Reader = Callable[[Any], Any]


def _choice(*allowed: str) -> Reader:
    def read(value: Any) -> str:
        if value is False and "off" in allowed:
            return "off"  # YAML's reading of an unquoted off
        if value not in allowed:
            raise ValueError(f"one of {', '.join(allowed)}")
        return str(value)

    return read


def _whole(value: Any) -> int:
    try:
        number = int(value) if not isinstance(value, (bool, float)) else -1
    except (TypeError, ValueError):
        number = -1
    if number < 0:
        raise ValueError("a whole number, 0 or more")
    return number


def _seconds(value: Any) -> float:
    try:
        number = float(value) if not isinstance(value, bool) else -1.0
    except (TypeError, ValueError):
        number = -1.0
    if not 0 < number < float("inf"):  # also refuses nan
        raise ValueError("a number of seconds greater than 0")
    return number


def _seconds_or_none(value: Any) -> float:
    try:
        return 0.0 if not isinstance(value, bool) and float(value) == 0 else _seconds(value)
    except (TypeError, ValueError):
        raise ValueError("a number of seconds, 0 for none") from None


def _path(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("the path of a file")
    return value


def _retain(value: Any) -> str:
    text = {True: "on", False: "off"}.get(value, str(value)) if isinstance(value, bool) else value
    if text in ("on", "off") or str(text).isdigit():
        return str(text)
    raise ValueError("on, off, or a number of bytes")


def _switch(value: Any) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True,
             "0": False, "false": False, "no": False, "off": False}  # fmt: skip
    known = words.get(str(value).strip().lower())
    if known is None:
        raise ValueError("one of 1, true, yes, on, 0, false, no, off")
    return known


@dataclass(frozen=True)
class Option:
    """One setting.

    Attributes:
        name: of the field of :class:`Settings`; dashes in flags and in the file, upper case with
            the prefix in the environment.
        read: from a flag's, variable's or file's value; raises ValueError saying what is right.
        metavar: for --help.
        help: for --help.
    """

    name: str
    read: Reader
    metavar: str
    help: str

    @property
    def key(self) -> str:
        return self.name.replace("_", "-")

    @property
    def flag(self) -> str:
        return f"--{self.key}"

    @property
    def variable(self) -> str:
        return f"{PREFIX}{self.name.upper()}"

    @property
    def is_switch(self) -> bool:
        return self.read is _switch


OPTIONS = (
    Option(
        "recovery",
        _choice("auto", "in-place", "restart", "off"),
        "{auto,in-place,restart,off}",
        "what happens when a worker is lost: replace it and keep the others where that can be had"
        " (in-place; auto: but not on GPUs, where it has not been tried yet); restart all of them"
        " as --max-restarts says; or the same with nothing of flashrun in the workers",
    ),
    Option("spares", _whole, "K", "nodes beyond --nnodes that wait to replace a lost one"),
    Option(
        "spare_timeout",
        _seconds_or_none,
        "SECONDS",
        "how long workers that are held wait for a spare to take a lost node's place, before all"
        " are restarted on the nodes that are there (0: not at all)",
    ),
    Option(
        "grow",
        _choice("spare", "restart"),
        "{spare,restart}",
        "what a node is that comes while the job runs on fewer nodes than --nnodes=MIN:MAX allows:"
        " a spare; or a reason to restart all workers as more, as under torchrun",
    ),
    Option("max_retries", _whole, "N", "replacements of one rank without progress in between"),
    Option(
        "cordon_after", _whole, "N",
        "faults of a node (workers killed by a signal or a device error, the node lost) within"
        " --cordon-window after which it gets no ranks as long as there are others; 0: never",
    ),
    Option("cordon_window", _seconds, "SECONDS", "see --cordon-after"),
    Option("heartbeat_interval", _seconds, "SECONDS", "time between two heartbeats of a node"),
    Option(
        "detection_timeout",
        _seconds,
        "SECONDS",
        "time without a heartbeat after which a node counts as lost",
    ),
    Option(
        "log_level",
        _choice("debug", "info", "warning", "error"),
        "{debug,info,warning,error}",
        "what flashrun itself says",
    ),
    Option(
        "events", _path, "FILE", "append one JSON line for each fault, decision and restart to FILE"
    ),
    Option(
        "recovery_timeout",
        _seconds,
        "SECONDS",
        "how long a recovery in place waits for survivors to come to their next collective, and"
        " again for replacements to catch up, before all workers are restarted",
    ),
    Option(
        "retain",
        _retain,
        "{on,off,BYTES}",
        "keep the inputs of in-place collectives until all ranks have completed them, so that an"
        " interrupted one can be issued again",
    ),
    Option(
        "zygote",
        _switch,
        "",
        "fork workers from a process that has imported torch (--no-zygote: fresh processes)",
    ),
)

_BY_KEY = {option.key: option for option in OPTIONS}
assert {option.name for option in OPTIONS} == {field.name for field in fields(Settings)}


COMMANDS = ("status", "nodes", "cordon", "uncordon", "exec")
"""What the first word may be instead of a script."""


def nearest(word: str, known: list[str]) -> str:
    """``"; did you mean 'x'?"`` or a list of what there is."""
    # "--nprocs" begins as "--nproc-per-node" does, though its letters are nearer to "--nnodes"
    begin = word.rstrip("s").replace("_", "-")
    close = [name for name in known if len(begin) > 4 and name.startswith(begin)][:1]
    close = close or difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"did you mean '{close[0]}'?" if close else f"known: {', '.join(sorted(known))}"


def _read(option: Option, value: Any, where: str) -> Any:
    try:
        return option.read(value)
    except ValueError as error:
        raise UsageError(f"{where}: {value!r} is not valid; give {error}") from None


def _from_file(path: str, where: str) -> dict[str, Any]:
    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(f"{where}: cannot read {path!r}: {why}; give a YAML file") from None
    except yaml.YAMLError as error:
        line = " ".join(str(error).split())
        raise UsageError(f"{where}: {path} is not YAML: {line}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise UsageError(
            f"{where}: {path} holds a {type(data).__name__}; give lines of the form 'spares: 1'"
        )
    values = {}
    for raw, value in data.items():
        key = str(raw).replace("_", "-")
        if key not in _BY_KEY:
            hint = nearest(key, list(_BY_KEY))
            if _is_torchs(key):
                hint = f"give torchrun's flags as --{key} or PET_{key.upper().replace('-', '_')}"
            raise UsageError(f"{path}: unknown setting '{raw}'; {hint}")
        option = _BY_KEY[key]
        values[option.name] = _read(option, value, f"{path}, '{raw}'")
    return values


def _is_torchs(key: str) -> bool:
    try:
        from torch.distributed.run import get_args_parser
    except (ImportError, OSError):  # said when all is well but that
        return False
    return key in {action.dest.replace("_", "-") for action in get_args_parser()._actions}


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    by_variable = {option.variable: option for option in OPTIONS}
    values = {}
    for variable, value in environ.items():
        if not variable.startswith(PREFIX) or variable in INTERNAL_VARIABLES:
            continue
        if variable not in by_variable:
            hint = nearest(variable, list(by_variable))
            raise UsageError(f"environment: unknown variable {variable}; {hint}")
        option = by_variable[variable]
        values[option.name] = _read(option, value, f"environment, {variable}")
    return values


def load_settings(flags: Mapping[str, Any], environ: Mapping[str, str]) -> Settings:
    """Bring together all sources.

    Args:
        flags: field name (and ``config``) -> value as given on the command line; None or absent:
            not given.
        environ: the environment.

    Raises:
        UsageError: what is wrong, where it was given, what would be right.
    """
    settings = Settings()
    path, where = flags.get("config"), "--config"
    if path == "":
        raise UsageError("--config: no file named; give the path of a YAML file")
    if path is None:
        path, where = environ.get("FLASHRUN_CONFIG"), "environment, FLASHRUN_CONFIG"
    if path:
        settings = replace(settings, **_from_file(path, where))
    settings = replace(settings, **_from_environment(environ))
    given = {o.name: flags[o.name] for o in OPTIONS if flags.get(o.name) is not None}
    settings = replace(
        settings, **{name: _read(_BY_KEY[name.replace("_", "-")], value,
                                 f"--{name.replace('_', '-')}") for name, value in given.items()}
    )  # fmt: skip
    if settings.detection_timeout < settings.heartbeat_interval:
        raise UsageError(
            f"detection timeout ({settings.detection_timeout:g} s) is shorter than the heartbeat"
            f" interval ({settings.heartbeat_interval:g} s), so every node would count as lost;"
            " give --detection-timeout of at least two intervals"
        )
    return settings
