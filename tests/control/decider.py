"""The real `RecoveryMachine` as a function of values: (its dump, what it is fed) -> (its dump, what
it commands). Each answer is worked out once."""

from __future__ import annotations

import json
import marshal
from typing import Any

from flashrun.control.commands import (
    Command,
    Done,
    Fail,
    Kill,
    RestartAll,
    ScriptFailure,
    Send,
    Spawn,
)
from flashrun.control.recovery import CLEAN, FAULT, Limits, RecoveryMachine
from tests.control.workers import Word

LIMITS = Limits(hold=1.0, gather=1.0, rebuild=1.0, grace=0.5, missing=1.0)
LATE = {"what": "allreduce 0", "seconds": 1.0}
Effect = tuple[Any, ...]
Answer = tuple[int, tuple[Effect, ...]]


class Violation(AssertionError):
    """An invariant does not hold."""


def check(holds: bool, *what: object) -> None:
    if not holds:
        raise Violation(" ".join(map(str, what)))


class Decider:
    """See the module. States are known by a number; times are left out of them.

    Args:
        machine: the class to check.
    """

    def __init__(
        self, world_size: int, machine: type[RecoveryMachine], limits: Limits = LIMITS
    ) -> None:
        self._class = machine
        self._numbers: dict[bytes, int] = {}
        self._dumps: list[bytes] = []
        self._answers: dict[tuple[Any, ...], Answer] = {}
        self._facts: list[tuple[str, bool, bool]] = []
        self._size = world_size
        new = machine(world_size, limits)
        new.proved = True
        for rank, who in enumerate(new.ranks):
            who.port, who.formed = 1000 + rank, True
        self.start = self._number(new)

    def _number(self, machine: RecoveryMachine) -> int:
        dumped = machine.dump()
        dumped["marks"] = dict.fromkeys(dumped["marks"], 0.0)
        for name in ("deadline", "suspected"):
            dumped[name] = None if dumped[name] is None else 1.0
        for name in ("dead", "proofs", "peerless"):
            dumped[name] = dict(sorted(dumped[name].items()))
        key = marshal.dumps(dumped, 2)  # ten times as fast as JSON, which is what is really saved
        number = self._numbers.setdefault(key, len(self._dumps))
        if number == len(self._dumps):
            check(json.loads(json.dumps(dumped)) == dumped, "a dump that is not JSON")
            self._dumps.append(key)
            waits = machine.wake_at() is not None
            self._facts.append((machine.phase, waits, machine.suspected is not None))
            check(
                machine.ended or machine.phase == "live" or waits,
                f"a wait without an end in phase {machine.phase}",
            )
        return number

    def rebuilds(self, number: int) -> bool:
        return self._facts[number][0] == "rebuild"

    def waits(self, number: int) -> bool:
        """There is a time at which it does something by itself."""
        return self._facts[number][1]

    def suspects(self, number: int) -> bool:
        return self._facts[number][2]

    def load(self, number: int) -> RecoveryMachine:
        """As the next agent does."""
        return self._class.load(marshal.loads(self._dumps[number]))

    def exited(self, number: int, rank: int, incarnation: int, kind: str) -> Answer:
        key = (number, rank, incarnation, kind)
        if key not in self._answers:
            how = FAULT if kind == "fault" else CLEAN
            self._answers[key] = self._twice(
                number, lambda m: m.exited(rank, incarnation, how, "x", 0.0)
            )
        return self._answers[key]

    def heard(self, number: int, rank: int, incarnation: int, word: Word) -> Answer:
        """A worker's word; after a hello come the words that it says again."""
        key = (number, rank, incarnation, word)
        if key in self._answers:
            return self._answers[key]
        if word[0] == "hello" and word[2:]:
            number, effects = self.heard(number, rank, incarnation, word[:2])
            for standing in word[2:]:
                number, more = self.heard(number, rank, incarnation, standing)
                effects += more
            self._answers[key] = number, effects
        else:
            message = message_of(word, rank, self._size)
            self._answers[key] = self._twice(
                number, lambda m: m.message(rank, incarnation, message, 0.0)
            )
        return self._answers[key]

    def tick(self, number: int) -> Answer:
        """The time has come that `wake_at` tells."""
        if (number,) not in self._answers:
            machine = self.load(number)
            effects = _effects(machine, machine.tick(1.0))
            self._answers[number,] = (self._number(machine), effects)
        return self._answers[number,]

    def _twice(self, number: int, feed: Any) -> Answer:
        """Feed it, and see that the same once more changes nothing."""
        machine = self.load(number)
        effects = _effects(machine, feed(machine))
        after = self._number(machine)
        if after == number:
            return after, effects
        machine = self.load(after)
        again = _effects(machine, feed(machine))
        check(
            self._number(machine) == after and all(e[0] == "send" for e in again),
            "the same word twice is not the same word:", again,
        )  # fmt: skip
        return after, effects


def _effects(machine: RecoveryMachine, commands: list[Command]) -> tuple[Effect, ...]:
    effects: list[Effect] = []
    for c in commands:
        if isinstance(c, Send):
            word = _word(machine, c.message)
            if word is not None:
                effects.append(("send", c.rank, word))
        elif isinstance(c, Spawn):
            effects.append(("spawn", c.rank, c.incarnation, c.generation))
        elif isinstance(c, Kill):
            effects.append(("kill", c.rank, c.incarnation))
        elif isinstance(c, RestartAll):
            effects.append(("end", f"restart: {c.reason}"))
        elif isinstance(c, (Fail, ScriptFailure)):
            effects.append(("end", f"fail: {c.rank}"))
        elif isinstance(c, Done):
            effects.append(("end", "done"))
    return tuple(effects)


def _word(machine: RecoveryMachine, message: dict[str, Any]) -> Word | None:
    """What matters of a message to a worker."""
    op, generation = message["op"], message.get("generation")
    if op == "plan":
        return (op, generation, message["target"], message["compare"])
    if op == "rebuild":  # a donor is a process, not a rank
        donors = [(int(d), machine.ranks[int(d)].incarnation) for d in message["donors"]]
        return (op, generation, tuple(donors))
    if op == "exit":
        return (op,)
    return (op, generation) if op in ("abort", "go") else None


def message_of(word: Word, rank: int, world_size: int) -> dict[str, Any]:
    """The message of `flashrun.messages` that a worker's word stands for."""
    op = word[0]
    if op == "hello":
        return {"op": op, "port": 1000 + rank, "generation": word[1]}
    if op == "held":
        _, generation, at, state, finished = word
        group = {"ranks": list(range(world_size)), "base": at, "issued": at, "done": at,
                 "serves": [], "lost": -1}  # fmt: skip
        return {"op": op, "generation": generation, "boundary": at, "state": state,
                "finished": finished, "groups": {"0": group}, "check": {
                    "groups": {"0": at}, "site": "x", "buckets": [], "state": "y"}}  # fmt: skip
    if op == "digest":
        return {"op": op, "generation": word[1], "tensors": {"a": "1"}}
    if op == "finished":
        return {"op": op, "boundary": word[1]}
    message = {"op": op, "generation": word[1], "error": "x"}
    if op == "suspect" and len(word) > 2:
        message["late"] = {**LATE, "ranks": [r for r in range(world_size) if r != rank]}
    return message
