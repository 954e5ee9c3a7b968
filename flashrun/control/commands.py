"""Commands of the recovery machine, and as JSON for the way from the controller to the agents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from flashrun.messages import Message


@dataclass(frozen=True)
class Send:
    rank: int
    message: Message


@dataclass(frozen=True)
class Spawn:
    rank: int
    incarnation: int
    generation: int


@dataclass(frozen=True)
class Kill:
    rank: int
    incarnation: int
    cause: str = ""  # found hung; "": it is of no use any more


@dataclass(frozen=True)
class Reseat:
    """Other nodes have taken places in the round; ``table`` is that of :class:`RankTable`."""

    table: dict[str, Any]


@dataclass(frozen=True)
class RestartAll:
    """Tier 3: all workers in fresh processes."""

    reason: str


@dataclass(frozen=True)
class ScriptFailure:
    """The script failed by itself: torchrun's rules."""

    rank: int


@dataclass(frozen=True)
class Fail:
    """The rank's replacements keep failing."""

    rank: int
    reason: str


@dataclass(frozen=True)
class Excuse:
    """The rank's end was no failure, whatever its status."""

    rank: int


@dataclass(frozen=True)
class Done:
    """Every rank has ended well."""


@dataclass(frozen=True)
class Log:
    """Attributes:
    about: ranks whose nodes say it, too; the first node says everything.
    """

    line: str
    event: dict[str, Any] = field(default_factory=dict)
    about: list[int] = field(default_factory=list)


Command = Reseat | Send | Spawn | Kill | RestartAll | ScriptFailure | Fail | Excuse | Done | Log

_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (Spawn, Kill, Reseat, RestartAll, ScriptFailure, Fail, Excuse, Done, Log)
}


def _fields(command: Any) -> dict[str, Any]:
    return {f.name: getattr(command, f.name) for f in fields(command)}


def to_json(commands: Sequence[Command]) -> list[dict[str, Any]]:
    """In order; a message that goes to several ranks in a row is there once."""
    items: list[dict[str, Any]] = []
    for command in commands:
        if not isinstance(command, Send):
            items.append({"do": type(command).__name__, **_fields(command)})
        elif items and items[-1].get("message") == command.message:
            items[-1]["ranks"].append(command.rank)
        else:
            items.append({"do": "Send", "ranks": [command.rank], "message": command.message})
    return items


def from_json(items: Sequence[dict[str, Any]]) -> list[Command]:
    """What :func:`to_json` was given."""
    commands: list[Command] = []
    for item in items:
        if item["do"] == "Send":
            commands += [Send(rank, item["message"]) for rank in item["ranks"]]
        else:
            values = {name: value for name, value in item.items() if name != "do"}
            commands.append(_KINDS[item["do"]](**values))
    return commands


def concern(command: Command, ranks: range) -> bool:
    """Whether the node of ``ranks`` has something to do for it. What ends the recovery in place
    concerns every node; a line for people is written by the first one and those it is about."""
    if isinstance(command, (Send, Spawn, Kill, Excuse)):
        return command.rank in ranks
    if isinstance(command, Log):
        return ranks.start == 0 or any(rank in ranks for rank in command.about)
    return True
