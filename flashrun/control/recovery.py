"""The recovery machine: what has to happen when a worker is lost (DESIGN.md, section 4).

Pure: it is fed what was seen (exits, workers' messages, the time) and answers with commands. It
knows no process, socket or torch, and `dump`/`load` carry it over the death of the agent.

One recovery is one generation in four phases: *hold* (all survivors stand still and say where),
*gather* (replacements and laggards come to the target boundary), *rebuild* (communicators and
state), *live*. Any further fault in any phase opens the next generation and starts again from the
holds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flashrun.control.commands import (
    Command,
    Done,
    Excuse,
    Fail,
    Kill,
    Log,
    RestartAll,
    ScriptFailure,
    Send,
    Spawn,
)
from flashrun.control.held import (
    Rank,
    donors_of,
    first_again,
    gone,
    hopeless,
    let_go,
    mismatch,
    numbers,
    out_of_step,
    survives,
    told,
)
from flashrun.control.replicas import (
    SPLITS,
    alike_in,
    by_line,
    compare,
    kept_of,
    named,
    promise,
)
from flashrun.messages import STEP_SPLITS, Message

SLOWEST = 50e6  # bytes/s of state that a peer sends at least


@dataclass(frozen=True)
class Limits:
    """Settings of the machine; times in seconds.

    Attributes:
        max_retries: how often in a row a rank is replaced without progress.
        hold: how long survivors may take until they need a collective.
        gather: how long a replacement may take to catch up.
        rebuild: how long communicators may take; the state has more time as it is larger.
        grace: how long to wait for the exit that explains a suspicion.
        missing: how much longer than its group's timeout a rank may stay away from a collective;
            at most as long again.
        flaps: generations in a row without a dead rank and without progress.
    """

    max_retries: int = 3
    hold: float = 1800.0
    gather: float = 1800.0
    rebuild: float = 60.0
    grace: float = 0.5
    missing: float = 10.0
    flaps: int = 5


FAULT, SCRIPT, CLEAN = "fault", "script", "clean"


def _losses(dead: Mapping[int, str]) -> str:
    """What is lost together (a node's ranks) is one line."""
    parts = []
    for cause in dict.fromkeys(dead.values()):
        ranks = [str(rank) for rank, its in dead.items() if its == cause]
        parts.append(f"rank{'s'[: len(ranks) - 1]} {', '.join(ranks)} lost ({cause})")
    return f"recovery: {'; '.join(parts)}; replacing {'it' if len(dead) == 1 else 'them'} in place"


class RecoveryMachine:
    """See the module.

    Args:
        bases: the first rank of each node, in order.
    """

    def __init__(
        self, world_size: int, limits: Limits | None = None, bases: Sequence[int] = (0,)
    ) -> None:
        self.limits = limits or Limits()
        self.bases = list(bases)
        self.others: dict[str, int] = {}  # who was told of to replacements, see `_tell_others`
        self.ranks = [Rank() for _ in range(world_size)]
        self.generation = 0
        self.phase = "live"
        self.target = -1
        self.dead: dict[str, str] = {}  # rank -> cause, of this recovery
        self.deadline: float | None = None
        self.suspected: float | None = None  # when to act on a suspicion
        self.flaps = 0
        self.late: dict[str, Any] = {}  # the operation that took longer than its group's timeout
        self.lates = 0  # such without progress, although all were there
        self.last_target = -1
        self.restart_only: str | None = None
        self.peerless: dict[str, str] = {}  # rank -> what only it has
        self.proved = False
        self.splits = False  # a rank waits for others in the middle of its optimizer's step
        self.alike: dict[str, str] = {}  # lines of ranks that have the same state
        self.alone: list[int] = []  # ranks that were told to have a state of their own
        self.private: list[str] = []  # buffers that differ between ranks
        self.size = 0  # bytes of one rank's state
        self.shared: list[str] = []  # what scripts keep in places of their own, equal everywhere
        self.unshared: list[str] = []  # what was seen to differ
        self.capped = False  # a rank has said that a cap leaves out inputs of collectives
        self.limited = False  # a rank has said that it keeps no more of what an interval gave
        self.proofs: dict[str, dict[str, Message]] = {}  # boundary -> rank -> message
        self.marks: dict[str, float] = {}
        self.plan: Message = {}
        self.building: Message = {}  # the word to rebuild, but for the donors
        self.ended = False
        self.exiting = False  # every script has ended, and every worker was told to go

    # --- carrying it over

    def dump(self) -> dict[str, Any]:
        """All of it as JSON types; to be written out at once, since nothing is copied."""
        plain = dict(vars(self))
        plain["limits"] = dict(vars(self.limits))
        plain["ranks"] = [dict(vars(r)) for r in self.ranks]
        return plain

    @classmethod
    def load(cls, dumped: Mapping[str, Any]) -> RecoveryMachine:
        machine = cls(len(dumped["ranks"]), Limits(**dumped["limits"]))
        for name, value in dumped.items():
            if name not in ("limits", "ranks"):
                setattr(machine, name, value)
        machine.ranks = [Rank(**r) for r in dumped["ranks"]]
        return machine

    # --- what was seen

    def exited(
        self, rank: int, incarnation: int, kind: str, cause: str, now: float
    ) -> list[Command]:
        """A worker's process has ended.

        Args:
            kind: `FAULT` (signal, out of memory, communication error, found hung), `SCRIPT` (its
                own exception or status), `CLEAN` (status 0).
            cause: for people, e.g. ``SIGKILL``.
        """
        who = self.ranks[rank]
        if self.ended or incarnation != who.incarnation or who.gone:
            return []
        if kind == FAULT and self.exiting and who.finished:
            # Its script had ended, and so had everybody's: nothing is left to be done again.
            line = f"recovery: rank {rank} was lost ({cause}) after every script had ended"
            log = Log(line, {"event": "worker-lost", "rank": rank, "cause": cause}, [rank])
            return [log, Excuse(rank), *self._gone(rank)]
        if kind == CLEAN:
            return self._gone(rank)
        if kind == SCRIPT:
            self.ended = True
            return [ScriptFailure(rank)]
        return self._fault({rank: cause}, now)

    def _gone(self, rank: int) -> list[Command]:
        """A rank has ended well."""
        self.ranks[rank].gone = True
        if all(r.gone for r in self.ranks):
            self.ended = True
            return [Done()]
        if self.phase != "live":
            return self.restart(f"rank {rank} ended in the middle of a recovery")
        return [] if self.exiting else self._maybe_exit()

    def message(
        self, rank: int, incarnation: int, message: Message, now: float
    ) -> list[Command]:
        """A worker said something."""
        who = self.ranks[rank]
        if self.ended or incarnation != who.incarnation or who.gone:
            return []
        op = message["op"]
        if op == "hello":
            return self._hello(rank, message)
        if op == "formed":
            who.formed = True
        elif op == "finished":
            who.finished = True
            judged = [c for b in list(self.proofs) if b in self.proofs for c in self._judge(b)]
            return judged + self._maybe_exit()
        elif op == "diverged":
            return self.restart(told(rank, who.spawned, str(message["reason"])))
        elif op == "replicas":
            return self._proof(rank, message)
        elif op == "event":
            return self._event(rank, message["event"])
        if self.exiting:
            return []
        generation = int(message.get("generation", -1))
        if op == "held" and generation > self.generation:
            # The agent before this one opened it, and ended before it had left its state.
            self.generation = generation - 1
            return self._open(now) + self.message(rank, incarnation, message, now)
        if generation != self.generation:
            return []
        if op == "suspect" and self.phase == "live":
            self.late = message.get("late") or self.late
            if self.suspected is None:
                self.suspected = now + self.limits.grace
        elif op == "failed":
            return self._flap(f"rank {rank}: {message['error']}", now)
        elif op == "held" and self.phase in ("hold", "gather"):
            if self.phase == "gather" and int(message["boundary"]) < self.target:
                return []  # a laggard's from before the plan, said again on a new connection
            who.held = message
            who.state = bool(message["state"])
            return self._advance(now)
        elif op == "digest" and self.phase == "gather":
            who.digest = {"tensors": message["tensors"]}
            return self._advance(now)
        elif op == "built" and self.phase == "rebuild":
            who.built = True
            who.state = True
            return self._advance(now)
        elif op == "live":
            who.spawned = False
        return []

    def tick(self, now: float) -> list[Command]:
        """Time has passed."""
        if self.ended:
            return []
        if self.suspected is not None and now >= self.suspected:
            return self._flap(self._failed(), now)
        if self.deadline is not None and now >= self.deadline:
            if self.phase == "hold" and self.late:
                return self._end_missing(now)
            late = ", ".join(str(i) for i in self.awaited())
            if self.phase == "rebuild":
                return self._flap(f"rank(s) {late} did not rebuild in time", now)
            if self.phase == "hold":
                seconds, verb = self.limits.hold, "come to its next collective"
            else:
                seconds, verb = self.limits.gather, f"come to boundary {self.target}"
            return self.restart(
                f"rank(s) {late} did not {verb} within {seconds:g} s; if that can take longer, give"
                " a longer --recovery-timeout"
            )
        return []

    def wake_at(self) -> float | None:
        """When `tick` has something to do; None: not before something else happens."""
        times = [t for t in (self.suspected, self.deadline) if t is not None]
        return min(times, default=None)

    # --- a collective that took longer than the group's own timeout

    def _failed(self) -> str:
        if not self.late:
            return "a collective failed although nobody has died"
        what, seconds = self.late["what"], self.late["seconds"]
        return f"{what} took longer than {seconds:g} s, its group's timeout"

    def _end_missing(self, now: float) -> list[Command]:
        """Where torch would raise in all who wait, the members that did not come, and still need
        no collective, are found hung."""
        missing = [rank for rank in self.awaited() if rank in self.late["ranks"]]
        cause = f"did not come to {self.late['what']} within {self.late['seconds']:g} s"
        self.late = {}
        self.deadline = now + self.limits.hold
        return [Kill(rank, self.ranks[rank].incarnation, cause) for rank in missing]

    def _mixed_up(self) -> str | None:
        """Every rank is there, and yet it took too long, for the second time at this boundary."""
        late, reason, self.late = self.late, self._failed(), {}
        if not late or self.dead:
            return None
        self.lates += 1
        if self.lates == 1:
            return None
        return (
            f"{reason}, twice, although all ranks wait in a collective: do they call the same ones"
            " in the same order?"
        )

    # --- faults

    def lost(self, dead: dict[int, str], now: float) -> list[Command]:
        """These ranks have no process any more (rank -> cause); others can be started now."""
        return [] if self.ended or not dead else self._fault(dead, now)

    def _fault(self, dead: dict[int, str], now: float) -> list[Command]:
        commands: list[Command] = []
        for rank, cause in dead.items():
            who = self.ranks[rank]
            who.failures += 1
            if who.spawned and who.failures > self.limits.max_retries:
                return self._give_up(rank, cause)
        reason = hopeless(self.ranks, dead, self.restart_only, self.peerless)
        line = _losses(dead) if reason is None else ""
        for rank, cause in dead.items():
            event = {"event": "worker-lost", "rank": rank, "cause": cause}
            commands.append(Log("" if commands else line, event, list(dead)))
        if reason is not None:
            return commands + self.restart(reason)
        for rank, cause in dead.items():
            who = self.ranks[rank]
            self.dead[str(rank)] = cause
            self.ranks[rank] = Rank(
                incarnation=who.incarnation + 1,
                state=False,
                failures=who.failures,
                failed_at=who.failed_at,
                spawned=True,
            )
        opened = self._open(now)  # first: a replacement is born into the new generation
        for rank in dead:
            commands.append(Spawn(rank, self.ranks[rank].incarnation, self.generation))
        return commands + self._tell_others() + opened

    def _flap(self, reason: str, now: float) -> list[Command]:
        self.flaps += 1
        if self.flaps > self.limits.flaps:
            return self.restart(f"{self.flaps} attempts in a row failed; last: {reason}")
        if any(r.gone for r in self.ranks):
            return self.restart(f"{gone(self.ranks)} ({reason})")
        log = Log(
            f"recovery: trying again ({reason})", {"event": "recovery-again", "reason": reason}
        )
        return [log] + self._open(now)

    def _open(self, now: float) -> list[Command]:
        if self.phase == "live":
            self.marks = {"fault": now}
        self.generation += 1
        self.phase = "hold"
        self.target = -1
        self.suspected = None
        self.deadline = now + self.limits.hold
        if self.late:
            self.deadline = now + min(self.limits.missing, float(self.late["seconds"]))
        commands: list[Command] = []
        dead = sorted(map(int, self.dead))
        for rank, who in enumerate(self.ranks):
            who.held = who.digest = None
            who.built = False
            if who.port:
                commands.append(Send(rank, self._abort(dead)))
        return commands

    def _abort(self, dead: list[int]) -> Message:
        return {"op": "abort", "generation": self.generation, "dead": dead}

    def _give_up(self, rank: int, cause: str) -> list[Command]:
        self.ended = True
        reason = (
            f"rank {rank} was replaced {self.limits.max_retries} times in a row without progress;"
            f" last cause: {cause}"
        )
        log = Log(f"recovery: {reason}", {"event": "gave-up", "rank": rank}, [rank])
        return [log, Fail(rank, reason)]

    def restart(self, reason: str) -> list[Command]:
        """Give up: all are restarted, and `reason` says why."""
        self.ended = True
        return [
            Log(
                f"recovery: cannot go on in place: {reason}",
                {"event": "restart-all", "reason": reason},
            ),
            RestartAll(reason),
        ]

    # --- phases

    def awaited(self) -> list[int]:
        """The ranks whose word the present phase waits for."""
        if self.phase == "hold":
            return [i for i, r in enumerate(self.ranks) if survives(r) and r.held is None]
        if self.phase == "gather":
            return [
                i
                for i, r in enumerate(self.ranks)
                if not self._there(r)
                or (self.plan["compare"] and r.state and r.digest is None)
            ]
        return [i for i, r in enumerate(self.ranks) if not r.built]

    def _there(self, who: Rank) -> bool:
        return who.held is not None and who.held["boundary"] == self.target

    def _advance(self, now: float) -> list[Command]:
        commands: list[Command] = []
        if self.phase == "hold" and not self.awaited():
            commands += self._plan(now)
        if self.phase == "gather" and not self.ended and not self.awaited():
            commands += self._rebuild(now)
        if self.phase == "rebuild" and not self.ended and not self.awaited():
            commands += self._go(now)
        return commands

    def _plan(self, now: float) -> list[Command]:
        """All survivors are held: where do we meet (rule 4)?"""
        holders = {i: r for i, r in enumerate(self.ranks) if r.state and r.held is not None}
        if not holders:
            return self.restart("no survivor holds the state")
        at = {i: int(r.held["boundary"]) for i, r in holders.items() if r.held is not None}
        self.target = target = max(at.values())
        self.marks["held"] = now
        behind = {i: b for i, b in at.items() if b < target}
        reason = out_of_step(self.ranks, target)
        if reason is not None:
            return self.restart(reason)
        if any(b < target - 1 for b in behind.values()):
            return self.restart(
                f"boundaries {at} are more than one apart: the ranks don't step together"
            )
        finished = [i for i in behind if holders[i].finished]
        if finished:
            return self.restart(f"rank(s) {finished} ended before boundary {target}")
        if target > 0 and not self.proved and self.dead:
            return self.restart("the replicas were not proved yet")
        commands: list[Command] = []
        for name, cause in self.dead.items():
            who = self.ranks[int(name)]
            if target > who.failed_at:
                who.failed_at, who.failures = target, 1
            elif who.failures > self.limits.max_retries:
                return self._give_up(int(name), cause)
        if target > self.last_target:
            self.last_target, self.flaps, self.lates = target, 0, 0
        reason = self._mixed_up()
        if reason is not None:
            return self.restart(reason)
        donors = {str(i): r.port for i, r in holders.items() if at[i] == target}
        for rank, who in enumerate(self.ranks):
            if who.spawned and who.target > target:
                # it may have run past where we meet now
                commands.append(Kill(rank, who.incarnation))
                who.incarnation += 1
                who.port, who.held, who.target = 0, None, -1
                commands.append(Spawn(rank, who.incarnation, self.generation))
        commands += self._tell_others()
        self.phase = "gather"
        self.deadline = now + self.limits.gather
        self.plan = {
            "op": "plan",
            "generation": self.generation,
            "target": target,
            "laggards": sorted(behind),
            "donors": donors,
        }
        kept = [
            set(r.held["kept"])
            for i, r in holders.items()
            if at[i] == target and r.held is not None and "kept" in r.held
        ]
        for rank in behind:
            self.ranks[rank].state = False
            self.ranks[rank].held = None
        # whether somebody takes state, and whether there are two to compare before
        self.plan["receives"] = receives = not all(r.state for r in self.ranks)
        # What was found equal once, and nobody keeps any more, the dead rank did not keep either.
        own = [name for name in self.shared if all(name in names for names in kept)]
        self.plan["own"] = own if receives else []
        self.plan["compare"] = receives and len(donors) > 1 and target > 0
        for rank, who in enumerate(self.ranks):
            if who.port:
                commands += self._tell_plan(rank)
        return commands

    def _tell_plan(self, rank: int) -> list[Command]:
        who = self.ranks[rank]
        if who.spawned:
            who.target = self.target
        return [Send(rank, dict(self.plan))]

    def _rebuild(self, now: float) -> list[Command]:
        """All are at the target: compare (rule 10), then build and send state."""
        self.marks["gathered"] = now
        held = [r.held for r in self.ranks if r.held is not None]
        taken = {name for word in held for name in word.get("taken", ())}
        self.plan["own"] = sorted(taken)  # what the others have, too, is not looked at
        reason = let_go(self.ranks) or mismatch(self.ranks, self.target, self.alike)
        reason = reason or self._compared()
        if reason:
            return self.restart(reason)
        first, reason = first_again(self.ranks)
        if reason:
            return self.restart(reason)
        self.phase = "rebuild"
        self.deadline = now + self.limits.rebuild + self.size / SLOWEST
        self.building = {
            "op": "rebuild",
            "generation": self.generation,
            "from": first,
            "private": self.private,
            "numbers": numbers(self.ranks),
        }
        return [self._tell_rebuild(i) for i in range(len(self.ranks))]

    def _tell_rebuild(self, rank: int) -> Send:
        donors = donors_of(self.ranks, rank, self.alike)
        return Send(rank, {**self.building, "donors": donors})

    def _go(self, now: float) -> list[Command]:
        self.marks["rebuilt"] = now
        self.phase = "live"
        self.deadline = None
        commands: list[Command] = [
            Send(i, {"op": "go", "generation": self.generation}) for i in range(len(self.ranks))
        ]
        commands += self._summary()
        self.dead = {}
        return commands + self._maybe_exit()

    def _summary(self) -> list[Command]:
        marks = self.marks
        spans = {
            "hold": marks["held"] - marks["fault"],
            "catch-up": marks["gathered"] - marks["held"],
            "rebuild and state": marks["rebuilt"] - marks["gathered"],
        }
        total = marks["rebuilt"] - marks["fault"]
        who = ", ".join(f"{r} ({c})" for r, c in self.dead.items()) or "none"
        text = ", ".join(f"{name} {span * 1e3:.0f} ms" for name, span in spans.items())
        event = {
            "event": "recovered",
            "generation": self.generation,
            "boundary": self.target,
            "dead": dict(self.dead),
            "seconds": {**spans, "total": total},
        }
        where = f"recovery: generation {self.generation}, lost: {who}, boundary {self.target}"
        done = f"recovery: done in {total * 1e3:.0f} ms ({text}), no step lost"
        about = sorted(map(int, self.dead))
        return [Log(where, about=about), Log(done, event, about)]

    # --- the rest

    def _hello(self, rank: int, message: Message) -> list[Command]:
        """A worker has connected: tell it where we are."""
        who = self.ranks[rank]
        who.port = int(message["port"])
        commands = self._tell_others(again=False)
        if self.phase == "live" and int(message["generation"]) == self.generation:
            who.spawned = False  # it is live, and to say so was lost with the connection before
        elif int(message["generation"]) < self.generation:
            if self.phase == "live":  # the word was lost with the connection before
                commands.append(Send(rank, {"op": "go", "generation": self.generation}))
            else:
                commands.append(Send(rank, self._abort(sorted(map(int, self.dead)))))
        if self.phase in ("gather", "rebuild"):
            commands += self._tell_plan(rank)
        if self.phase == "rebuild":
            commands.append(self._tell_rebuild(rank))
        return commands

    def _tell_others(self, again: bool = True) -> list[Command]:
        """Tell replacements whom to ask on each node which files its workers have changed, once
        there is somebody on each.

        Args:
            again: although they were told the same before (others are there now).
        """
        catching_up = [i for i, r in enumerate(self.ranks) if r.spawned]
        if len(self.bases) == 1 or self.phase == "live" or not catching_up:
            return []
        asked: dict[int, int] = {}  # node -> rank; one that has the state, if there is any
        for rank, who in sorted(enumerate(self.ranks), key=lambda item: not item[1].state):
            if who.port and not who.gone:
                asked.setdefault(bisect_right(self.bases, rank) - 1, rank)
        if len(asked) < len(self.bases):
            return []
        nodes = {str(rank): self.ranks[rank].port for rank in sorted(asked.values())}
        if nodes == self.others and not again:
            return []
        self.others = nodes
        word = {"op": "others", "generation": self.generation, "nodes": nodes}
        return [Send(rank, word) for rank in catching_up]

    def _maybe_exit(self) -> list[Command]:
        if self.phase == "live" and all(r.finished or r.gone for r in self.ranks):
            self.exiting = True
            return [
                Send(i, {"op": "exit"}) for i, r in enumerate(self.ranks) if not r.gone
            ]
        return []

    def _event(self, rank: int, event: dict[str, Any]) -> list[Command]:
        if event.get("event") == "recovery-class" and self.restart_only is None:
            self.restart_only = f"rank {rank}: {event['reason']}"
            line = f"recovery: restart only: {self.restart_only}; {event.get('remedy', '')}"
            return [Log(line, {**event, "rank": rank})]
        if event.get("event") == STEP_SPLITS:
            first, self.splits = not self.splits, True
            line = f"recovery: in place, but from now on {SPLITS}" if first else ""
            return [Log(line, {**event, "rank": rank})]
        if event.get("event") == "retention-cap":
            first, self.capped = not self.capped, True
            line = f"recovery: {event['reason']}; give a larger --retain" if first else ""
            return [Log(line, {**event, "rank": rank})]
        if event.get("event") == "retention-limit":
            first, self.limited = not self.limited, True
            return [Log(f"recovery: {event['reason']}" if first else "", {**event, "rank": rank})]
        if event.get("event") == "replay-warning":
            return [Log(f"recovery: rank {rank}: {event['reason']}", {**event, "rank": rank})]
        if event.get("event") == "default-store-moved":
            line = f"recovery: the default store's keys that were lost with node {event['place']}"
            return [Log(f"{line} are at {event['address']} again ({event['keys']})", event)]
        return [Log("", {**event, "rank": rank})]

    # --- replicas

    def _proof(self, rank: int, message: Message) -> list[Command]:
        """Hashes of a rank's state at a boundary: once all have come, equal ones are replicas."""
        boundary = str(message["boundary"])
        self.proofs.setdefault(boundary, {})[str(rank)] = message
        return self._judge(boundary)

    def _judge(self, boundary: str) -> list[Command]:
        proofs = self.proofs[boundary]
        if any(str(i) not in proofs and not r.finished for i, r in enumerate(self.ranks)):
            return []
        self.proofs = {b: p for b, p in self.proofs.items() if int(b) > int(boundary)}
        verdict = compare(proofs)
        lines = by_line(proofs, proofs, self.alike)
        differing = [name for line in lines for name in compare(line).differing]
        if any(p.get("confirm") for p in proofs.values()):
            if differing:
                return self.restart(
                    f"after a recovery {named(differing)} differs between ranks at boundary"
                    f" {boundary} (changed between a step and the next collective?)"
                )
            word = {"op": "confirmed", "boundary": int(boundary)}
            commands: list[Command] = [Send(i, word) for i in range(len(self.ranks))]
        else:
            commands = []
        own = kept_of(proofs)
        apart = {name for line in lines for name in kept_of(line).apart}
        lost = sorted(apart.intersection(self.plan.get("own", ())))
        if lost and commands:
            return self.restart(
                f"after a recovery {named(lost)} differs between ranks at boundary {boundary}"
            )
        self.unshared = sorted({*self.unshared, *own.apart})
        self.shared = sorted({*self.shared, *own.equal}.difference(self.unshared))
        if own.names:
            word = {"op": "own", "asked": sorted(own.names), "shared": self.shared}
            commands += [Send(i, word) for i in range(len(self.ranks))]
        self.private = sorted({*self.private, *verdict.private})
        for rank, name in verdict.lonely.items():
            self.peerless.setdefault(str(rank), name)
        self.size = verdict.size
        self.alike = alike_in(proofs)
        commands += self._tell_alone(proofs, verdict.differing)
        if self.restart_only is not None:
            return commands
        first, self.proved = not self.proved, True
        unformed = [i for i, r in enumerate(self.ranks) if not (r.formed or r.spawned)]
        if unformed:
            self.restart_only = (
                f"rank(s) {unformed} have formed no process group that flashrun carries"
            )
        elif differing:
            self.restart_only = f"{named(differing)} differs between ranks " + (
                "(model not wrapped in DDP?)"
                if first
                else f"at boundary {boundary} (replicas that differ on purpose?)"
            )
        elif len(self.ranks) == 1:
            self.restart_only = "there is only one rank"
        if self.restart_only is not None:
            line = f"recovery: restart only: {self.restart_only}"
        elif first:
            self.splits = any(proof.get("splits", False) for proof in proofs.values())
            line = promise(
                len(self.ranks), self.size, self.splits, self.peerless, self.private,
                len(self.bases),
            )  # fmt: skip
        else:
            return commands
        event = {"event": "recovery-class", "line": line, "splits": self.splits}
        return [*commands, Log(line, event)]

    def _tell_alone(self, proofs: Mapping[str, Message], differing: list[str]) -> list[Command]:
        """At the end of a Join say whose state nobody else has from now on, as it changes."""
        if self.restart_only is not None or not any(p.get("settles") for p in proofs.values()):
            return []
        lines = by_line(proofs, proofs, self.alike)
        alone = sorted(int(rank) for line in lines if len(line) == 1 for rank in line)
        if alone == self.alone or not differing:
            return []
        self.alone = alone
        line = (
            f"recovery: rank(s) {alone} have a state of their own after a Join of uneven inputs"
            f" ({named(differing)} differs): their loss restarts all"
        )
        return [Log(line if alone else "", {"event": "recovery-class", "line": line})]

    def _compared(self) -> str | None:
        """Why no survivor can be trusted as a donor, from their hashes at the target boundary."""
        if not self.plan["compare"]:
            return None
        digests = {
            str(i): {**r.digest, "buffers": self.private, "bytes": self.size}
            for i, r in enumerate(self.ranks)
            if r.digest is not None
        }
        checks = {str(i): r.held["check"] for i, r in enumerate(self.ranks) if r.held is not None}
        apart = {*self.shared}.difference(self.plan["own"])
        differing = [
            name
            for line in by_line(digests, checks, self.alike)
            for name in compare(line).differing
            if name not in apart
        ]
        if not differing:
            return None
        return (
            f"{named(differing)} differs between ranks {', '.join(digests)} at boundary"
            f" {self.target}, so nobody has what was lost (replicas that differ on purpose?)"
        )
