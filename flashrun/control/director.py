"""What stands around the recovery machine wherever it runs, in the one agent or in the controller:
when a loss comes too early for it, where peers are reached, and clocks of several machines. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from flashrun.control import recovery
from flashrun.control.commands import Command, Log, RestartAll, Send
from flashrun.control.recovery import Limits, RecoveryMachine
from flashrun.messages import Message
from flashrun.rendezvous.endpoint import join_host_port
from flashrun.rendezvous.table import ranks_text

_PORTS = frozenset(["donors", "nodes"])  # in messages: rank -> port of its data server


class Director:
    """See the module.

    Args:
        hosts: of each rank's node, where its data server listens.
        bases: the first rank of each node, in order.
    """

    def __init__(
        self, hosts: Sequence[str], limits: Limits | None = None, bases: Sequence[int] = (0,)
    ) -> None:
        self._hosts = list(hosts)
        self.machine = RecoveryMachine(len(hosts), limits, bases)

    def dump(self, now: float) -> dict[str, Any]:
        """All of it as JSON; ``now`` is of the clock of all calls."""
        return {"now": now, "machine": self.machine.dump()}

    @classmethod
    def load(cls, dumped: Mapping[str, Any], hosts: Sequence[str], now: float) -> Director:
        """Go on where `dump` was called, perhaps on another machine with another clock: waits
        have as much time left as they had then."""
        director = cls(hosts)
        machine = RecoveryMachine.load(dumped["machine"])
        later = now - float(dumped["now"])
        machine.marks = {name: at + later for name, at in machine.marks.items()}
        if machine.deadline is not None:
            machine.deadline += later
        if machine.suspected is not None:
            machine.suspected += later
        director.machine = machine
        return director

    def exited(
        self, rank: int, incarnation: int, kind: str, cause: str, now: float
    ) -> list[Command]:
        """As the machine's."""
        machine = self.machine
        # (A replacement has yet to come to where its predecessor formed the groups.)
        unformed = [i for i, r in enumerate(machine.ranks) if not (r.formed or r.spawned)]
        stale = machine.ended or incarnation != machine.ranks[rank].incarnation
        if kind == recovery.FAULT and unformed and not stale:
            machine.ended = True
            reason = (
                f"rank {rank} was lost ({cause}) before"
                f" {'it' if unformed == [rank] else f'ranks {unformed}'} had formed a process group"
            )
            event = {"event": "restart-all", "reason": reason}
            return [Log(f"recovery: restart only: {reason}", event), RestartAll(reason)]
        return self._addressed(machine.exited(rank, incarnation, kind, cause, now))

    def message(
        self, rank: int, incarnation: int, message: Message, now: float
    ) -> list[Command]:
        """As the machine's."""
        return self._addressed(self.machine.message(rank, incarnation, message, now))

    def node_lost(
        self, ranks: range, where: str, why: str, now: float, no_spare: str = ""
    ) -> list[Command]:
        """A node does not live any more. Its ranks go on where another takes its place.

        Args:
            no_spare: why none can; "": one can.
        """
        machine = self.machine
        if machine.ended or all(machine.ranks[rank].gone for rank in ranks):
            return []
        lost = f"the node at {where} was lost with {ranks_text(ranks)} ({why})"
        unformed = [i for i, r in enumerate(machine.ranks) if not (r.formed or r.spawned)]
        reason = machine.restart_only
        if unformed:
            reason = f"ranks {unformed} had formed no process group yet"
        elif no_spare:
            reason = no_spare
        if reason is not None:
            return machine.restart(f"{lost}; {reason}")
        machine.suspected = None  # it is explained
        event = {"event": "node-lost", "ranks": list(ranks), "address": where, "reason": why}
        return [Log(f"recovery: {lost}; waiting for a spare to take its place", event)]

    def node_joined(self, ranks: range, where: str, now: float) -> list[Command]:
        """A spare has taken a lost node's place, and has what its ranks have left."""
        machine = self.machine
        if machine.ended:
            return []
        event = {"event": "node-replaced", "ranks": list(ranks), "address": where}
        line = f"recovery: the node at {where} takes {ranks_text(ranks)}"
        dead = {rank: "its node was lost" for rank in ranks if not machine.ranks[rank].gone}
        return [Log(line, event), *self._addressed(machine.lost(dead, now))]

    def unable(self, ranks: range, reason: str) -> list[Command]:
        """A spare has taken a lost node's place, but what its ranks have left is nowhere."""
        if self.machine.ended:
            return []
        return self.machine.restart(
            f"the host-read logs of {ranks_text(ranks)} were lost with their node: {reason}"
        )

    @property
    def quiet(self) -> bool:
        """Whether nothing is being recovered, nor given up."""
        return self.machine.phase == "live" and not self.machine.ended

    def reseat(self, hosts: Sequence[str]) -> None:
        """Some ranks are on another node now."""
        self._hosts = list(hosts)

    def missed(self) -> tuple[str, set[int]]:
        """The ranks from which a word is awaited, and the name of that wait; none while nothing
        is wrong. A suspicion may be of any rank."""
        machine = self.machine
        if machine.ended:
            return "", set()
        if machine.phase == "live":
            suspected = machine.suspected is not None
            return "suspected", set(range(len(machine.ranks))) if suspected else set()
        return f"{machine.generation}.{machine.phase}", set(machine.awaited())

    def tick(self, now: float) -> list[Command]:
        """As the machine's."""
        return self._addressed(self.machine.tick(now))

    def wake_at(self) -> float | None:
        """As the machine's."""
        return self.machine.wake_at()

    def _addressed(self, commands: list[Command]) -> list[Command]:
        """The machine names peers by their ports; workers are told whole addresses."""
        return [
            replace(command, message=self._with_hosts(command.message))
            if isinstance(command, Send)
            else command
            for command in commands
        ]

    def _with_hosts(self, message: Message) -> Message:
        whole = dict(message)
        for name in _PORTS.intersection(message):
            whole[name] = {
                rank: join_host_port(self._hosts[int(rank)], port)
                for rank, port in message[name].items()
            }
        return whole
