"""In-place recovery on one node: the shell around the recovery machine.

The machine (:mod:`flashrun.control.recovery`) decides, here or at the controller of several nodes
(:mod:`flashrun.node.deciding`); this listens on the workers' channel, passes on what is seen there
and which workers have ended, and carries the commands out through the agent. Its whole state goes
with the agent's to the supervisor, so the next agent continues: workers connect again and repeat
where they stand.
"""

from __future__ import annotations

import os
import secrets
import selectors
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from flashrun import messages
from flashrun.control import recovery
from flashrun.control.commands import (
    Command,
    Excuse,
    Fail,
    Kill,
    Log,
    Reseat,
    RestartAll,
    ScriptFailure,
    Send,
    Spawn,
)
from flashrun.control.events import Membership
from flashrun.control.recovery import Limits
from flashrun.control.recovery_store import no_control_store
from flashrun.job import Job
from flashrun.messages import Message
from flashrun.node.deciding import Alone, Decides, OnQuiet, Several, Together
from flashrun.node.heartbeats import Heartbeats
from flashrun.node.workers_channel import WorkersChannel
from flashrun.observe.console import say, shows
from flashrun.rendezvous.table import RankTable

# Exceptions that are a communication or device error, not the script's own: their texts. A worker
# that ends by one of them is as lost as one that was killed.
_FAULTS = ("CUDA error", "NCCL", "DistBackendError", "DistNetworkError", "Gloo", "gloo/")


_LET_GO_S = 1.0  # from the signal on; who ends by it never learns that peers ended first


class Workers(Protocol):
    """What the shell needs of the agent. Ranks are the job's, all of this node."""

    def replace_worker(self, rank: int, incarnation: int, environ: Mapping[str, str]) -> None:
        """Start the next process of ``rank``; nothing of the one before it may be left."""

    def kill_worker(self, rank: int) -> None:
        """End the present process of ``rank``, with the next :meth:`save`: an agent that dies in
        between has done nothing, and the next one begins again."""

    def pids(self) -> Mapping[int, int]:
        """The running process of each rank."""

    def incarnation_of(self, rank: int) -> int:
        """Of the present process of ``rank``."""

    def excuse_worker(self, rank: int) -> None:
        """The end of ``rank`` was no failure."""

    def reseat(self, table: RankTable) -> None:
        """Another node has taken a place in the round."""

    def save(self) -> None:
        """The machine has moved: leave its state with the supervisor, all at once with what was
        asked for."""


def gpus_are_here(environ: Mapping[str, str], exists: Callable[[str], bool]) -> bool:
    """Whether workers can come to use a GPU, by the drivers' device files (NVIDIA's, AMD's)."""
    hidden = environ.get("CUDA_VISIBLE_DEVICES"), environ.get("HIP_VISIBLE_DEVICES")
    names = ("/dev/nvidiactl", "/dev/kfd")
    return any(exists(n) and h not in ("", "-1") for n, h in zip(names, hidden, strict=True))


def no_recovery_in_place(job: Job, table: RankTable, membership: Membership) -> str | None:
    """Why workers of this round cannot be replaced in place; None if they can, "" if nobody asked.
    """
    if job.settings.recovery not in ("auto", "in-place") or table.world_size == 1:
        return ""
    if job.settings.recovery == "auto" and gpus_are_here(os.environ, os.path.exists):
        return "there are GPUs, on which it has not been tried yet; --recovery=in-place tries it"
    if job.kind == "run-path":
        return "--run-path"
    if not table.use_agent_store:
        return "rank 0 hosts the workers' store (TORCH_DISABLE_SHARE_RDZV_TCP_STORE)"
    if table.group_world_size > 1:
        return no_control_store(membership)
    return None


def classify(code: int, facts: Mapping[str, Any]) -> tuple[str, str]:
    """(kind, cause) of a worker's end.

    Args:
        code: exit code, negative for a signal.
        facts: what the worker noted of its own failure, {} if nothing.

    Who counts (issue 3): a signal, the node's out-of-memory killer (SIGKILL), a CUDA, NCCL or gloo
    error is a fault; an uncaught exception or a status of the script's own is the script's failure.
    """
    if code == 0:
        return recovery.CLEAN, "ended"
    if code < 0:
        return recovery.FAULT, signal.Signals(-code).name
    if code == messages.EXIT_DIVERGED:
        return recovery.FAULT, "its replay diverged"
    error = str(facts.get("error", ""))
    if "monitoredBarrier" in error:  # names who did not come, to the script (gloo's text follows)
        return recovery.SCRIPT, f"exit code {code}"
    if facts.get("exception") and any(word in error for word in _FAULTS):
        return recovery.FAULT, error.splitlines()[0][:120]
    return recovery.SCRIPT, f"exit code {code}"


@dataclass
class InPlaceState:
    """What goes to the next agent. JSON types only."""

    decides: dict[str, Any]
    token: str
    round: int
    gave_up: str | None = None
    lost: list[dict[str, Any]] = field(default_factory=list)
    causes: dict[str, str] = field(default_factory=dict)
    repeated: dict[str, dict[str, Message]] = field(default_factory=dict)
    untold: list[list[Any]] = field(default_factory=list)  # line and event, see `_obey`


class InPlace:
    """See the module.

    Args:
        round_: of the group; each has a machine and a socket of its own.
        world_size: ranks, all on this node unless `several` is given.
        limits: of the machine.
        run_dir: where the socket is.
        workers: the agent.
        selector: of the agent's loop.
        state: of the agent before this one.
        beats: looks at the workers; None: nobody does.
        token: the job's secret; "": one is made.
        several: how the nodes decide together; None: there is one.
        on_quiet: see :class:`flashrun.node.deciding.Alone`.

    Attributes:
        gave_up: why the rest is torchrun's business (restart or end); None while in place.
        told: `gave_up`, once a line that is shown here has said it; "" otherwise.
        lost: failures of workers that were replaced, for the report if it comes to that.
    """

    def __init__(
        self,
        round_: int,
        world_size: int,
        limits: Limits,
        run_dir: str,
        workers: Workers,
        selector: selectors.BaseSelector,
        state: InPlaceState | None = None,
        beats: Heartbeats | None = None,
        token: str = "",
        several: Several | None = None,
        on_quiet: OnQuiet = lambda joins: None,
    ) -> None:
        self._workers = workers
        self.round = round_
        self.gave_up: str | None = None
        self.told = ""
        self.lost: list[dict[str, Any]] = []
        self._let_go_at: float | None = None
        self._untold: list[list[Any]] = [] if state is None else list(state.untold)
        self._beats = beats
        self._address = "" if several is None else several.address
        self._address_given = several is not None and several.address_given
        self._several = several
        self._joins = 0 if several is None else several.table.joins  # of the table that is laid
        self._table = "" if several is None else os.path.join(run_dir, f"table.{round_}")
        if several is not None and state is None:
            several.lay_table(self._table, several.table)
        self._causes: dict[str, str] = {}  # rank.incarnation -> why we killed it
        self._token = token or secrets.token_hex(16)
        if state is not None:
            self.gave_up, self.lost, self._token = state.gave_up, state.lost, state.token
            self._causes = state.causes
        elif os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
            # torch wraps the groups that it makes itself (distributed_c10d.py:2289); ours is one
            # that holds, and the wrapper's own gloo group would not.
            say("TORCH_DISTRIBUTED_DEBUG=DETAIL: collectives are not compared between ranks under"
                " --recovery=in-place", "warning", event="no-comparison")  # fmt: skip
        self._channel = WorkersChannel(
            os.path.join(run_dir, f"channel.{round_}"),
            self._token,
            max(64, world_size),
            selector,
            workers.incarnation_of,
            self._on_message,
            None if state is None else state.repeated,
        )
        before = None if state is None else state.decides
        self._decides: Decides
        if several is None:
            self._decides = Alone(world_size, limits, self._obey, before, on_quiet)
        else:
            self._decides = Together(several, limits, self._obey, before, selector, on_quiet)
        self._tell()

    # -- for the agent ---------------------------------------------------------------------------

    def environment(self, incarnation: int = 0, generation: int = 0) -> dict[str, str]:
        """What a worker needs to join the channel."""
        table = {messages.TABLE: self._table} if self._table else {}
        return {
            **table,
            messages.CHANNEL: self._channel.path,
            messages.TOKEN: self._token,
            messages.ADDRESS: self._address,
            messages.ADDRESS_GIVEN: str(int(self._address_given)),
            messages.INCARNATION: str(incarnation),
            messages.GENERATION: str(generation),
        }

    def on_exited(self, rank: int, incarnation: int, code: int, facts: Mapping[str, Any]) -> None:
        """A worker's process has ended."""
        if self.gave_up is None:
            self._channel.hear_out(rank, incarnation)
        if self.gave_up is not None:  # which it may have asked for
            return
        kind, cause = classify(code, facts)
        if code == -signal.SIGKILL:
            cause = self._causes.pop(f"{rank}.{incarnation}", cause)
        self._decides.exited(rank, incarnation, kind, cause)

    def tell_seats(self, table: RankTable) -> None:
        """Another node has taken a lost one's place in the round."""
        if isinstance(self._decides, Together) and self.gave_up is None:
            self._decides.tell_seats(table)

    def _reseat(self, table: RankTable) -> None:
        several, decides = self._several, self._decides
        if several is None or not isinstance(decides, Together):
            return
        if table.joins <= self._joins:
            return  # said to all, because another node had not heard of it
        if table.of(several.node) is None:
            return  # this node was taken for lost; its coordinator is told to stop
        self._joins = table.joins
        self._workers.reseat(table)
        several.lay_table(self._table, table)
        decides.reseat(table)

    def stand_down(self) -> None:
        """The workers of this round are being stopped: what ends now is not to be replaced. Who
        does not end by the signal, and waits for a peer that did, is let go a moment later."""
        if self.gave_up is None:
            self.gave_up = ""
        self._let_go_at = time.monotonic() + _LET_GO_S

    def tick(self) -> None:
        """Time has passed."""
        now = time.monotonic()
        if self._let_go_at is not None and now >= self._let_go_at:
            self._let_go_at = None
            for rank in self._workers.pids():
                self._channel.send(rank, {"op": "stopping"})
        if self.gave_up is None:
            self._decides.tick()
        if self.gave_up is None and self._beats is not None and now >= self._beats.next:
            self._look(self._beats, now)

    def timeout(self) -> float | None:
        """Seconds until :meth:`tick` has something to do."""
        times = [self._let_go_at]
        if self.gave_up is None:
            times += [self._decides.wake_at(), None if self._beats is None else self._beats.next]
        at = min((t for t in times if t is not None), default=None)
        return None if at is None else max(0.0, at - time.monotonic())

    def _look(self, beats: Heartbeats, now: float) -> None:
        """Who hangs counts as lost; a job that somebody has suspended does not hang."""
        before = beats.suspended
        hung = beats.look(self._workers.pids(), os.getppid(), now)
        if beats.suspended != before:
            what = "the job was stopped and waits to be continued" if not before else "it goes on"
            say(what, "info", event="suspended" if not before else "continued")
        for rank in hung:
            self._end_hung(rank, f"stopped answering for {beats.timeout:g} s")
        if hung:
            self._workers.save()

    def _end_hung(self, rank: int, cause: str) -> None:
        """Kill a worker that hangs: it counts as lost, by `cause`."""
        incarnation = self._workers.incarnation_of(rank)
        self._causes[f"{rank}.{incarnation}"] = cause
        pid = self._workers.pids().get(rank)
        say(f"rank {rank} (pid {pid}) {cause}; killing it", "warning",
            event="hung", rank=rank, pid=pid, cause=cause)  # fmt: skip
        self._workers.kill_worker(rank)

    def state(self) -> dict[str, Any]:
        return {
            "decides": self._decides.state(),
            "token": self._token,
            "round": self.round,
            "gave_up": self.gave_up,
            "lost": self.lost,
            "causes": self._causes,
            "untold": self._untold,
            "repeated": self._channel.repeated,
        }

    def close(self) -> None:
        """The round is over."""
        self._decides.close()
        self._channel.close()

    def _on_message(self, rank: int, incarnation: int, message: Message) -> None:
        if self.gave_up is None:
            self._decides.message(rank, incarnation, message)

    # -- the machine's commands ------------------------------------------------------------------

    def _obey(self, commands: list[Command]) -> None:
        if self.gave_up is not None:
            return
        for command in commands:
            if isinstance(command, Reseat):
                self._reseat(RankTable.from_dict(command.table))
        # Survivors wake before the dead rank's remnants are swept. The next agent would see that
        # exit, too, and open the same generation.
        lost = any(isinstance(command, Spawn) for command in commands)
        sends = [command for command in commands if isinstance(command, Send)]
        early = [send for send in sends if lost and send.message["op"] == "abort"]
        for send in early:
            self._channel.send(send.rank, send.message)
        # First the state: the next agent must know of a process before it exists.
        for command in commands:
            if isinstance(command, (RestartAll, Fail)):
                self.gave_up = command.reason
            elif isinstance(command, ScriptFailure):
                self.gave_up = ""
        for command in commands:
            if isinstance(command, Kill) and command.cause:
                self._end_hung(command.rank, command.cause)
            elif isinstance(command, Kill):
                self._workers.kill_worker(command.rank)
            elif isinstance(command, Spawn):
                self._channel.forget(command.rank)
                environ = self.environment(command.incarnation, command.generation)
                if self.gave_up is None:
                    self._workers.replace_worker(command.rank, command.incarnation, environ)
            elif isinstance(command, Excuse):
                self._workers.excuse_worker(command.rank)
            elif isinstance(command, Log):
                self._untold.append([command.line, dict(command.event)])
                if self.gave_up and self.gave_up in command.line and shows("info"):
                    self.told = self.gave_up
        for send in sends:
            self._channel.note(send.rank, send.message)
        self._workers.save()
        # What was told holds: an agent that dies here leaves it to the next one, which tells it.
        self._tell()
        for send in sends:
            if send not in early:
                self._channel.send(send.rank, send.message)

    def _tell(self) -> None:
        while self._untold:
            line, event = self._untold.pop(0)
            kind = str(event.pop("event", "recovery"))
            event.pop("line", None)
            level = "info" if line else "debug"
            say(line or f"recovery: {kind} {event}", level, event=kind, **event)
