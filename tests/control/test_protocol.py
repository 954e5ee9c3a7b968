"""The protocol of recovery, explored: every order of events for three ranks (see `model`)."""

from __future__ import annotations

from typing import Any

import pytest

from flashrun.control.commands import Command, Send, Spawn
from flashrun.control.recovery import RecoveryMachine
from tests.control.explorer import Explored, explore
from tests.control.model import Faults, Model, Violation

NO_STATE = "restart: no survivor holds the state"


def explored(faults: Faults, **more: Any) -> Explored:
    return explore(Model(3, more.pop("boundaries", (1, 2)), faults, **more))


def test_two_faults() -> None:
    """Any two processes at any two moments; one and the decider."""
    result = explored(Faults(kills=2))
    assert result.ends.keys() == {"done", NO_STATE}
    assert result.worlds > 60_000
    assert explored(Faults(kills=1, deaths=1)).ends.keys() == {"done"}


@pytest.mark.slow
@pytest.mark.timeout(900)  # under a minute on a core of its own
def test_two_faults_and_the_death_of_the_decider() -> None:
    """Any two processes at any two moments, and the decider at any third."""
    result = explored(Faults(kills=2, deaths=1))
    assert result.ends.keys() == {"done", NO_STATE}
    assert result.worlds > 600_000


@pytest.mark.parametrize("faults", [
    Faults(kills=1),
    Faults(breaks=1, deaths=1),
    Faults(kills=1, slow=1),
    Faults(hangs=1, deaths=1),
    Faults(quits=2, deaths=1),
], ids=str)  # fmt: skip
def test_one_fault_is_always_recovered_in_place(faults: Faults) -> None:
    assert explored(faults).ends.keys() == {"done"}


def test_on_slow_wires() -> None:
    assert explored(Faults(kills=1), slow_wires=True).ends.keys() == {"done"}


def test_before_the_first_step() -> None:
    result = explored(Faults(kills=1, deaths=1), boundaries=(0, 1))
    assert result.ends.keys() == {"done"}


def test_who_has_ended_without_a_word_ends_recoveries() -> None:
    """os._exit(0): there is no process that could take part."""
    for faults in (Faults(quits=1, kills=1), Faults(quits=1, breaks=1)):
        reasons = explored(faults).ends.keys() - {"done"}
        assert reasons and all("ended" in reason for reason in reasons), reasons


@pytest.mark.slow
@pytest.mark.parametrize(("faults", "more"), [
    (Faults(kills=2, deaths=1), {"boundaries": (0, 2)}),
    (Faults(kills=2), {"slow_wires": True}),
    (Faults(breaks=1), {"slow_wires": True, "boundaries": (0, 2)}),
    (Faults(kills=1, deaths=1), {"slow_wires": True}),
    (Faults(kills=1, breaks=1, deaths=1), {}),
    (Faults(kills=1, breaks=1, slow=1), {}),
    (Faults(kills=1, hangs=1, deaths=1), {}),
    (Faults(kills=1, deaths=2), {}),
], ids=str)  # fmt: skip
@pytest.mark.timeout(3600)
def test_more_of_it(faults: Faults, more: dict[str, Any]) -> None:
    result = explored(faults, **more)
    allowed = {"done", NO_STATE}
    if faults.hangs:  # in a recovery: nobody but the deadline can tell
        allowed |= {end for end in result.ends if " did not come to " in end}
    assert "done" in result.ends and result.ends.keys() <= allowed, result.ends


# --- it can fail: machines with one mistake each


class GoesBeforeAllHaveBuilt(RecoveryMachine):
    def awaited(self) -> list[int]:
        awaited = super().awaited()
        return awaited[1:] if self.phase == "rebuild" else awaited


class ForgetsTheDeadline(RecoveryMachine):
    def _open(self, now: float) -> list[Command]:
        commands = super()._open(now)
        self.deadline = None
        return commands


class HearsOldGenerations(RecoveryMachine):
    def message(self, rank, incarnation, message, now):  # type: ignore[no-untyped-def]
        if message["op"] in ("built", "held", "failed"):
            message = {**message, "generation": self.generation}
        return super().message(rank, incarnation, message, now)


class HearsTheDead(RecoveryMachine):
    def message(self, rank, incarnation, message, now):  # type: ignore[no-untyped-def]
        return super().message(rank, self.ranks[rank].incarnation, message, now)


class SeesAnEndTwice(RecoveryMachine):
    def exited(self, rank, incarnation, kind, cause, now):  # type: ignore[no-untyped-def]
        return super().exited(rank, self.ranks[rank].incarnation, kind, cause, now)


class PlansWithoutEverybody(RecoveryMachine):
    def awaited(self) -> list[int]:
        awaited = super().awaited()
        return [] if self.phase == "hold" and len(awaited) == 1 else awaited


class TakesLaggardsForDonors(RecoveryMachine):
    def _tell_rebuild(self, rank: int) -> Send:
        everybody = {str(i): r.port for i, r in enumerate(self.ranks) if i != rank}
        return Send(rank, {**super()._tell_rebuild(rank).message, "donors": everybody})


class ForgetsItsTurn(RecoveryMachine):
    """Its next life would start the same process again."""

    def exited(self, rank, incarnation, kind, cause, now):  # type: ignore[no-untyped-def]
        commands = super().exited(rank, incarnation, kind, cause, now)
        return commands + [c for c in commands if isinstance(c, Spawn)]


class ReplacesWithTheSameNumber(RecoveryMachine):
    def exited(self, rank, incarnation, kind, cause, now):  # type: ignore[no-untyped-def]
        commands = super().exited(rank, incarnation, kind, cause, now)
        self.ranks[rank].incarnation = incarnation
        return commands


class AnswersNoHello(RecoveryMachine):
    def _hello(self, rank, message):  # type: ignore[no-untyped-def]
        super()._hello(rank, message)
        return []


class DoesNotRepeatTheRebuild(RecoveryMachine):
    """As it was: a decider that died right after it had saved cost the rebuild's deadline."""

    def _hello(self, rank, message):  # type: ignore[no-untyped-def]
        commands = super()._hello(rank, message)
        return [c for c in commands if isinstance(c, Send) and c.message["op"] != "rebuild"]


class IgnoresNewerGenerations(RecoveryMachine):
    """As it was: what a dead decider had opened and not saved was held in, and not heard again."""

    def message(self, rank, incarnation, message, now):  # type: ignore[no-untyped-def]
        if int(message.get("generation", 0)) > self.generation:
            return []
        return super().message(rank, incarnation, message, now)


class ForgetsWhoHasQuit(RecoveryMachine):
    """As it was: the others, which had ended before, were never told to go."""

    def _gone(self, rank: int) -> list[Command]:
        return [c for c in super()._gone(rank) if not isinstance(c, Send)]


@pytest.mark.parametrize(("machine", "faults", "said"), [
    (GoesBeforeAllHaveBuilt, Faults(kills=1), "has not built"),
    (ForgetsTheDeadline, Faults(kills=1), "a wait without an end"),
    (HearsOldGenerations, Faults(kills=2), ""),
    (HearsTheDead, Faults(kills=1), "of a dead process has an effect"),
    (SeesAnEndTwice, Faults(kills=1), "twice"),
    (PlansWithoutEverybody, Faults(kills=1), ""),
    (TakesLaggardsForDonors, Faults(kills=1), "which has not"),
    (ForgetsItsTurn, Faults(kills=1), "replaced while its process lives"),
    (ReplacesWithTheSameNumber, Faults(kills=1), ""),
    (AnswersNoHello, Faults(kills=1), "nothing but a deadline"),
    (DoesNotRepeatTheRebuild, Faults(kills=1, deaths=1), "nothing but a deadline"),
    (IgnoresNewerGenerations, Faults(kills=1, deaths=1), "nothing but a deadline"),
    (ForgetsWhoHasQuit, Faults(quits=1), "nothing but a deadline"),
])  # fmt: skip
def test_a_mistake_is_found(machine: type[RecoveryMachine], faults: Faults, said: str) -> None:
    with pytest.raises(Violation) as found:
        explored(faults, machine=machine)
    assert said in str(found.value).splitlines()[-1]
