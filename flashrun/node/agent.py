"""The agent: runs one node's part of the job. It decides about this node's workers only; what the
job does (who has which rank, restart, end) comes as events from the coordinator's thread.

One loop, one group of workers at a time, and everything that the next agent needs is told to the
supervisor whenever it changes: an agent can be killed at any moment, and its successor goes on with
the same workers.

=============  =========================================================================
phase          what it waits for
=============  =========================================================================
``joining``    the coordinator's Start
``running``    exits of workers, Stop, Finish
``settling``   other ranks of a young failure, to see whether all fail alike
``stopping``   the workers to end; after ``shutdown_timeout`` they are killed
``reported``   the coordinator's next word (Stop, Finish)
``stopped``    the same (Start of another round, Finish)
=============  =========================================================================
"""

from __future__ import annotations

import os
import queue
import selectors
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Literal

from torch.distributed.elastic.events.api import EventSource

from flashrun import messages
from flashrun.control.coordinator import Coordinator
from flashrun.control.events import (
    Connected,
    Event,
    Finish,
    GoOn,
    Lost,
    Membership,
    Pause,
    Refused,
    Reseat,
    Start,
    Stop,
    Waiting,
)
from flashrun.control.recovery import Limits
from flashrun.control.recovery_store import control_store
from flashrun.control.terms import node_of
from flashrun.job import Job
from flashrun.node import run_folder
from flashrun.node.deciding import Several
from flashrun.node.elastic_events import ElasticEvents
from flashrun.node.failure_report import Failure, hand_up, report
from flashrun.node.heartbeats import Heartbeats
from flashrun.node.inplace import InPlace, InPlaceState, no_recovery_in_place
from flashrun.node.log_tee import LogTee
from flashrun.node.orphanage import Orphanage
from flashrun.node.pausing import Standstill
from flashrun.node.process_tree import KILL_PATIENCE
from flashrun.node.watchdog import Watchdog
from flashrun.node.wire import Message, Wire
from flashrun.node.worker_group import Member, WorkerGroup
from flashrun.observe.console import begin_with, say
from flashrun.rendezvous.endpoint import listen_address
from flashrun.rendezvous.server import StoreInUse, StoreNotBound
from flashrun.rendezvous.table import RankTable, ranks_text

Phase = Literal["joining", "running", "settling", "stopping", "reported", "stopped"]

# A script that fails at once fails on all ranks within this time, or within as long again as the
# first took (fresh processes on a busy machine start seconds apart); only then is "the same error
# everywhere" worth a look before the others are stopped.
_SETTLE_SECONDS = 3.0
_SETTLE_AT_MOST = 20.0
# In the names of metrics: torch's classes, to which torchrun's functions belong.
_SIMPLE, _LOCAL = "SimpleElasticAgent", "LocalElasticAgent"
# How long the others' store may take to hear that this node leaves.
_LEAVE_PATIENCE = 1.0


class Agent:
    """See the module.

    Args:
        wire: to the supervisor.
        job: what to run.
        run_dir: private folder of the job on this node.
        plain: whether workers are fresh processes.
        membership: how the nodes of the job meet.
    """

    def __init__(
        self, wire: Wire, job: Job, run_dir: str, plain: bool, membership: Membership
    ) -> None:
        self._wire = wire
        self._job = job
        self._run_dir = run_dir
        self._plain = plain
        self._membership = membership
        launch = job.launch
        self._shutdown_timeout = float(launch.shutdown_timeout or 0)
        self._host = socket.gethostname()
        self._events = ElasticEvents(job, self._host)
        if launch.max_nodes > 1:  # one node has nobody to tell its full name to
            threading.Thread(target=self._learn_full_name, name="full name", daemon=True).start()
        self._tee = LogTee()
        begin_with(self._tee.end_line)
        self._group: WorkerGroup | None = None
        self._phase: Phase = "joining"
        self._deadline: float | None = None
        self._killed = False
        self._spawned_at = self._first_failure_at = time.monotonic()
        self._connected: Connected | None = None
        self._node_id = uuid.uuid4().hex[:12]  # for the life of the supervisor
        self._run_log_dir: str | None = None
        self._stop_signal: int | None = None
        self._verdict: Finish | None = None
        self._code: int | None = None
        self._began = self._joining_since = time.monotonic()
        self._stopping_since: float | None = None
        self._store_answer: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._outbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._selector = selectors.DefaultSelector()
        self._watchdog = Watchdog.from_environment(launch.run_id)
        self._inplace: InPlace | None = None
        self._inplace_moved = False
        self._standstill = Standstill()
        self._asked_for: set[str] = set()  # ids of members that the zygote was asked for
        self._doomed: list[str] = []  # ids of members that end with the next `save`

    # -- life ------------------------------------------------------------------------------------

    def run(self) -> int:
        """Until the job's part on this node is over, or the supervisor is gone.

        Returns:
            The exit code of the job on this node.
        """
        hello = self._wire.receive()
        if hello is None:
            return 1
        self._orphanage = Orphanage(hello["supervisor"], hello["spare"])
        if hello["state"] is not None:
            self._recall(hello["state"])
        in_place = self._job.settings.recovery in ("auto", "in-place")
        group = None if hello["state"] is None else hello["state"]["group"]
        # Before the workers are adopted: what was found lost in the meantime is told through it.
        self._coordinator = Coordinator(
            self._membership,
            node_of(self._job.launch, self._node_id),
            wake=self._wake,
            host_store=self._ask_for_store,
            resume=self._connected,
            table=None if group is None else RankTable.from_dict(group["table"]),
            doorbell=lambda host: self._ask_for_port("doorbell", host),
            shard=(lambda host: self._ask_for_port("host-shard", host)) if in_place else None,
            answered=Path(self._run_dir, "answered"),
            paused=self._standstill.since,
        )
        if group is not None:
            self._adopt(hello)
        self._coordinator.start()
        selector = self._selector
        selector.register(self._wire.fileno(), selectors.EVENT_READ, self._on_supervisor)
        selector.register(self._wake_read, selectors.EVENT_READ, self._on_wake)
        selector.register(self._tee.fileno(), selectors.EVENT_READ, self._tee.on_readable)
        if hello["stop"] is not None:
            self._on_stop_signal(hello["stop"])
        self._look_at_group()  # what happened while there was no agent
        while self._code is None and not self._wire.closed:
            self._turn()
        self._coordinator.close()
        if self._code is None:
            return 1  # the supervisor is gone; the caller sweeps
        self._end(self._code)
        return self._code

    def _turn(self) -> None:
        limits = [self._tee.timeout(), self._standstill.timeout()]
        if self._inplace is not None:
            limits.append(self._inplace.timeout())
        if self._deadline is not None:
            limits.append(max(0.0, self._deadline - time.monotonic()))
        waits = [limit for limit in limits if limit is not None]
        for key, _ in self._selector.select(min(waits) if waits else None):
            handler: Callable[[], None] = key.data
            handler()
        self._tee.tick()
        self._standstill.tick(self._group)
        if self._inplace is not None:
            self._inplace.tick()
        if self._inplace_moved:
            self._inplace_moved = False
            self._look_at_group()
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._on_deadline()

    def _end(self, code: int) -> None:
        self._watchdog.stop()
        if self._inplace is not None:
            self._inplace.close()
        if self._group is not None:
            self._group.finish_output()
        self._tee.close()
        sys.stdout.flush()
        sys.stderr.flush()
        self._wire.send({"op": "finish", "code": code})

    def _recall(self, state: Message) -> None:
        """Be who the agent before this one was in the job."""
        self._node_id = state["node_id"]
        self._run_log_dir = state["run_log_dir"]
        self._standstill.since = state["paused"]
        self._events.restarts = state["restarts"]
        if state["connected"] is not None:
            self._connected = Connected(**state["connected"])

    def _adopt(self, hello: Message) -> None:
        """Take the running workers over and go on where the agent before this one was."""
        state = hello["state"]
        self._group = WorkerGroup.adopt(
            self._job, state["group"], self._run_dir, self._wire, self._tee, self._orphanage
        )
        self._phase = state["phase"]
        if self._phase == "stopping":
            self._deadline = time.monotonic() + self._shutdown_timeout
        elif self._phase == "settling":
            self._deadline = time.monotonic() + _SETTLE_SECONDS
        for worker in hello["workers"]:
            self._group.on_spawned(worker["id"], worker["pid"])
            if worker["code"] is not None:
                self._group.on_exited(worker["id"], worker["code"])
        # The agent before this one may have died before it asked for all of them.
        asked_for = {*hello["pending"], *(worker["id"] for worker in hello["workers"])}
        self._group.spawn(asked_for)
        self._asked_for = set(self._group.members)
        if state["inplace"] is not None:
            self._inplace = self._recovery_of(self._group.table, InPlaceState(**state["inplace"]))
            if self._inplace is not None and self._phase == "stopping":
                self._inplace.stand_down()
            for member in list(self._group.members.values()):
                if member.code is not None:
                    self._tell_inplace(member)
        if self._standstill.since is not None and self._phase == "stopping":
            self._begin_stopping(int(signal.SIGKILL))
        running = len(self._group.running)
        say(f"the new agent has taken over {running} running workers", "info",
            event="agent-took-over", running=running)  # fmt: skip

    def _save(self, signals: Sequence[tuple[str, int]] = ()) -> None:
        """Leave everything that the next agent needs with the supervisor.

        Args:
            signals: for workers, sent by the supervisor as it takes the state.
        """
        self._wire.send(
            {
                "op": "state",
                "signals": list(signals),
                "state": {
                    "node_id": self._node_id,
                    "run_log_dir": self._run_log_dir,
                    "restarts": self._events.restarts,
                    "connected": None if self._connected is None else asdict(self._connected),
                    "phase": self._phase,
                    "paused": self._standstill.since,
                    "group": None if self._group is None else self._group.state(),
                    "inplace": None if self._inplace is None else self._inplace.state(),
                },
            }
        )

    def _learn_full_name(self) -> None:
        """A name look-up can take many seconds, and signals don't wait for it."""
        self._host = self._events.host = socket.getfqdn()

    # -- threads ---------------------------------------------------------------------------------

    def _wake(self) -> None:
        try:
            os.write(self._wake_write, b"!")
        except BlockingIOError:
            return  # plenty of wake-ups are waiting already

    def _ask_for_store(self, host: str, port: int) -> int:
        """Called by the coordinator's thread: have the supervisor start the store host."""
        self._outbox.put({"op": "host-store", "host": host, "port": port})
        self._wake()
        answer = self._store_answer.get()
        if answer["op"] == "store":
            return int(answer["port"])
        raise (StoreInUse if answer["in_use"] else StoreNotBound)(answer["error"])

    def _ask_for_port(self, op: str, host: str) -> int:
        """Called by the coordinator's thread: the port of something that the supervisor serves to
        other nodes: the ``doorbell``, at which this node can be asked whether it lives, or its
        shard of the bootstrap store (``host-shard``)."""
        self._outbox.put({"op": op, "host": host})
        self._wake()
        return int(self._store_answer.get()["port"])

    def _on_wake(self) -> None:
        os.read(self._wake_read, 4096)
        while not self._outbox.empty():
            self._wire.send(self._outbox.get())
        while self._code is None:
            try:
                event = self._coordinator.events.get_nowait()
            except queue.Empty:
                return
            self._on_event(event)

    # -- from the supervisor ---------------------------------------------------------------------

    def _on_supervisor(self) -> None:
        message = self._wire.receive()
        if message is None:
            return
        op = message["op"]
        if op in ("store", "store-failed", "doorbell", "shard"):
            self._store_answer.put(message)
        elif op == "stop":
            self._on_stop_signal(message["signal"])
        elif self._group is None:
            return  # of a round that is over
        elif op == "spawned":
            self._group.on_spawned(message["id"], message["pid"])
            if all(m.pid is not None for m in self._group.members.values()):
                self._events.started(self._group.facts())
                self._events.took(f"{_LOCAL}._start_workers", self._spawned_at)
                self._events.took(f"{_SIMPLE}._initialize_workers", self._joining_since)
                if self._stopping_since is not None:
                    self._events.took(f"{_SIMPLE}._restart_workers", self._stopping_since)
                    self._stopping_since = None
                self._save()
        elif op == "spawn-failed":
            self._group.on_spawn_failed(message["id"], message["error"])
            self._look_at_group()
        elif op == "exited":
            self._group.on_exited(message["id"], message["code"])
            if message["id"] in self._group.members:
                self._count_fault(self._group, self._group.members[message["id"]])
                self._tell_inplace(self._group.members[message["id"]])
            self._look_at_group()

    def _on_stop_signal(self, number: int) -> None:
        self._stop_signal = number
        self._coordinator.leave(f"{self._host} was told to stop ({signal.Signals(number).name})")
        if self._group is None or not self._group.running:
            self._leave()
        else:
            self._begin_stopping(number)

    def _leave(self) -> None:
        """Nothing runs here any more and the user asked to stop."""
        if self._group is not None:
            self._group.sweep_remnants()
        if not self._membership.alone:
            self._coordinator.wait_left(_LEAVE_PATIENCE)
        self._events.record("FAILED", raw_error=f"signal {self._stop_signal}")
        self._events.took(f"{_SIMPLE}.run", self._began, ok=False)
        self._code = 1

    # -- from the coordinator --------------------------------------------------------------------

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Connected):
            self._connected = event
            self._save()
        elif isinstance(event, Start):
            self._on_start(event.table, event.resumed)
        elif isinstance(event, Reseat):
            self._on_reseat(event.table)
        elif isinstance(event, Stop):
            self._on_stop(event)
        elif isinstance(event, Finish):
            self._on_finish(event)
        elif isinstance(event, Pause):
            self._on_pause(event)
        elif isinstance(event, GoOn):
            self._standstill.end(self._group, event.why, event.paused_s)
            self._save()
        elif isinstance(event, Waiting):
            say(event.text, "info", event="waiting")
        elif isinstance(event, Refused):
            self._give_up(event.reason, "refused")
        elif isinstance(event, Lost):
            self._give_up(event.reason, "control-plane-lost", event.at_once)

    def _on_start(self, table: RankTable, resumed: bool) -> None:
        if self._stop_signal is not None:
            return
        if resumed and self._group is not None and self._group.table.round == table.round:
            self._repeat_report()
            return
        node = table.of(self._node_id)
        if node is None:
            self._give_up(f"round {table.round} has no place for this node", "refused")
            return
        before = self._group
        if before is not None:
            before.finish_output()
        if table.restart_count > self._events.restarts:
            say(
                f"restart {table.restart_count} of at most {table.max_restarts}",
                "warning",
                event="restart",
                restart_count=table.restart_count,
            )
        self._events.restarts = table.restart_count
        # As torchrun, which knows the node's place only after both; the table came with its ranks.
        joining = (time.monotonic() - self._joining_since) * 1000
        self._events.record("RENDEZVOUS", duration_ms=joining)
        self._events.record("ASSIGN_WORKER_RANKS", duration_ms=0.0)
        self._events.took(f"{_SIMPLE}._rendezvous", self._joining_since)
        self._events.took(f"{_SIMPLE}._assign_worker_ranks", time.monotonic())
        self._events.group_rank = node.group_rank
        self._events.group_world_size = table.group_world_size
        group = WorkerGroup(
            self._job,
            table,
            node,
            self._plain,
            self._run_dir,
            self._wire,
            self._tee,
            self._orphanage,
        )
        self._watchdog.start()
        if self._inplace is not None:
            self._inplace.close()
            self._inplace = None
        run_folder.begin_round(self._run_dir)
        try:
            self._inplace = self._recovery_of(table)
            group.prepare(self._run_log_dir, self._own_variables())
        except (ValueError, OSError) as error:
            self._give_up(str(error), "cannot-start")
            return
        self._group = group
        self._run_log_dir = group.run_log_dir
        self._phase = "running"
        self._deadline = None
        self._killed = False
        self._asked_for = set(group.members)
        # First the state, so that no worker runs that the next agent would not know of.
        self._save()
        group.spawn(set())
        self._spawned_at = time.monotonic()
        if self._inplace is None:  # nothing will ever be recovered
            self._coordinator.report_quiet(table.round, table.joins)
        if before is not None:
            before.forget()
        ranks = ranks_text(node.ranks)
        if node.instead:
            self._take_place(ranks)
            return
        say(
            f"starting {node.slots} workers, {ranks} of {table.world_size}",
            "debug",
            event="started",
            round=table.round,
        )

    def _take_place(self, ranks: str) -> None:
        """In the middle of a round; the others are held."""
        say(f"this node takes a lost one's place: {ranks}", "info", event="takes-place")
        if self._inplace is None:
            self._report("failed")

    def _on_reseat(self, table: RankTable) -> None:
        """A spare has taken a lost node's place; what runs here goes on."""
        group = self._group
        if group is None or group.table.round != table.round or group.table.joins >= table.joins:
            return
        if self._inplace is not None:
            self._inplace.tell_seats(table)
            return
        group.table = table
        self._save()
        if self._phase in ("running", "settling"):
            self._report("failed")

    def reseat(self, table: RankTable) -> None:
        """For InPlace: another node has taken a place in the round."""
        assert self._group is not None
        self._group.table = table

    def _own_variables(self) -> dict[str, str]:
        variables = {messages.RUN_DIR: self._run_dir}
        if self._inplace is not None:
            variables[messages.RETAIN] = self._job.settings.retain
            variables[messages.RECOVERY_TIMEOUT] = str(self._job.settings.recovery_timeout)
            variables[messages.HEARTBEAT] = str(self._job.settings.heartbeat_interval)
            variables.update(self._inplace.environment())
        return variables

    # -- in-place recovery (see flashrun.node.inplace) ---------------------------------------------

    def _recovery_of(self, table: RankTable, state: InPlaceState | None = None) -> InPlace | None:
        """What replaces single workers of this round; None where only a restart can be had."""
        why_not = no_recovery_in_place(self._job, table, self._membership)
        if why_not is not None:
            if why_not and state is None:
                say(f"recovery: restart only: {why_not}", "info", event="recovery-class")
            return None
        settings = self._job.settings
        limits = Limits(
            max_retries=settings.max_retries,
            hold=settings.recovery_timeout,
            gather=settings.recovery_timeout,
        )
        beats = Heartbeats(
            self._run_dir, settings.heartbeat_interval, settings.detection_timeout,
            lambda: self._standstill.since is not None,
        )  # fmt: skip
        return InPlace(
            table.round,
            table.world_size,
            limits,
            self._run_dir,
            self,
            self._selector,
            state,
            beats,
            table.token,
            self._several(table),
            partial(self._coordinator.report_quiet, table.round),
        )

    def _several(self, table: RankTable) -> Several | None:
        if table.group_world_size == 1:
            return None
        node, connected = table.of(self._node_id), self._connected
        assert node is not None  # a round without this node is refused before
        assert connected is not None  # always the first event
        return Several(
            table,
            self._node_id,
            listen_address(node.addr, several_nodes=True),
            control_store(
                self._membership,
                connected,
                # (The coordinator says when etcd comes and goes.)
                lambda line: say(
                    line, "warning" if self._membership.etcd is None else "debug",
                    event="control-store",
                ),
            ),
            outlived=self._membership.etcd is not None,
            address_given=bool(self._job.launch.local_addr),
            on_lost=self._coordinator.report_lost,
            run_dir=self._run_dir,
            policy=self._membership.job.policy,
            backend=self._membership.job.backend,
            detection=self._membership.timing.detection_timeout,
        )

    def _count_fault(self, group: WorkerGroup, member: Member) -> None:
        """A death that may be the node's fault: by a signal, or of a device. (An exception of
        communication is as a rule another node's.)"""
        code = member.code
        if code is None or code == 0 or member.asked or self._phase != "running":
            return
        if code < 0:
            self._coordinator.report_fault(
                f"rank {group.rank_of(member)} ended by {signal.Signals(-code).name}"
            )
        elif "CUDA error" in str(group.facts_of(member).get("error", "")):
            self._coordinator.report_fault(f"rank {group.rank_of(member)} met a CUDA error")

    def _tell_inplace(self, member: Member) -> None:
        if self._inplace is None or self._group is None or self._phase != "running":
            return
        code = member.code
        assert code is not None
        facts = self._group.facts_of(member)
        rank = self._group.rank_of(member)
        self._inplace.on_exited(rank, member.incarnation, code, facts)

    def replace_worker(self, rank: int, incarnation: int, environ: Mapping[str, str]) -> None:
        """For InPlace: the group's next process of ``rank``; :meth:`save` asks for it."""
        assert self._group is not None and self._inplace is not None
        self._inplace.lost = [f for f in self._inplace.lost if f["rank"] != rank] + [
            f for f in self._group.failures(self._host) if f["rank"] == rank
        ]
        variables = {**self._own_variables(), **environ}
        self._group.replace(rank - self._group.node.base_rank, incarnation, variables)

    def kill_worker(self, rank: int) -> None:
        """For InPlace: end the present process of ``rank``; :meth:`save` does it."""
        assert self._group is not None
        # (Of a lost node's ranks none may have come here yet.)
        member = self._group.member_of(rank) if self._group.complete else None
        if member is not None and member.code is None:
            self._doomed.append(member.id)

    def pids(self) -> dict[int, int]:
        """For InPlace: the running workers."""
        group = self._group
        if group is None:
            return {}
        return {group.rank_of(m): m.pid for m in group.running if m.pid is not None}

    def incarnation_of(self, rank: int) -> int:
        """For InPlace: of the rank's present process."""
        assert self._group is not None
        return self._group.member_of(rank).incarnation

    def excuse_worker(self, rank: int) -> None:
        """For InPlace: the end of ``rank`` was no failure."""
        assert self._group is not None
        self._group.member_of(rank).asked = True

    def save(self) -> None:
        """For InPlace: leave its state with the supervisor, then ask for what it has placed."""
        doomed, self._doomed = self._doomed, []
        here = {} if self._group is None else self._group.members  # others are gone, by a Spawn
        self._save([(id_, int(signal.SIGKILL)) for id_ in doomed if id_ in here])
        if self._group is not None and self._phase == "running":
            self._group.spawn(self._asked_for)
            self._asked_for |= set(self._group.members)
        self._inplace_moved = True

    def _repeat_report(self) -> None:
        """The coordinator's thread is new and may not have passed on what was said before."""
        if self._group is None:
            return
        if self._phase in ("reported", "stopped"):
            self._say_result()
        else:
            self._look_at_group()

    def _on_stop(self, event: Stop) -> None:
        if self._group is None or self._group.table.round != event.round:
            return
        if event.restart:
            why = {"reason": event.reason}
            name, line = "stop", f"stopping this round: {self._not_again(event.reason)}"
            if event.growth:
                name, line, why = "growth", event.reason, event.growth
            say(line, "warning", event=name, round=event.round, **why)
        self._stopping_since = time.monotonic()
        if self._group.running:
            self._begin_stopping(int(signal.SIGKILL if event.at_once else signal.SIGTERM))
        else:
            self._stopped()

    def _not_again(self, reason: str) -> str:
        """`reason` without what the recovery's own last line has said."""
        told = "" if self._inplace is None else self._inplace.told
        return reason.replace(told, "it cannot go on in place, see above") if told else reason

    def _on_finish(self, event: Finish) -> None:
        self._verdict = event
        if self._group is not None and self._group.running:
            self._begin_stopping(int(signal.SIGTERM))
        else:
            self._conclude()

    def _on_pause(self, event: Pause) -> None:
        self._standstill.since = event.since
        self._save()  # the next agent has to know of it
        self._standstill.begin(self._group, event.why)
        if self._phase == "stopping":
            self._begin_stopping(int(signal.SIGKILL))

    def _give_up(self, reason: str, event: str, at_once: bool = False) -> None:
        say(reason, "error", event=event)
        self._verdict = Finish(success=False, failures=(), reason="")
        if self._group is not None and self._group.running:
            self._begin_stopping(int(signal.SIGKILL if at_once else signal.SIGTERM))
        else:
            self._conclude()

    # -- this node's workers ---------------------------------------------------------------------

    def _look_at_group(self) -> None:
        """Compare what the workers are with what the phase expects, and act."""
        group = self._group
        if group is None:
            return
        if self._phase == "stopping":
            if not group.running:
                self._stopped()
        elif self._phase in ("running", "settling"):
            inplace = self._inplace
            undone = group.running or group.failed or not group.complete
            if inplace is not None and inplace.gave_up is None and undone:
                return  # the machine deals with what has failed
            if inplace is not None and inplace.gave_up and not group.failed:
                self._report("failed")
            elif group.failed:
                self._on_failure(group)
            elif not group.running:
                self._report("succeeded")

    def _on_failure(self, group: WorkerGroup) -> None:
        if self._phase == "running":
            self._first_failure_at = time.monotonic()
        facts = [group.facts_of(member) for member in group.failed]
        young = all(f and not f["formed_group"] for f in facts)
        restarts_left = group.table.restart_count < group.table.max_restarts
        waited = time.monotonic() - self._first_failure_at
        took = self._first_failure_at - self._spawned_at
        settle = min(max(_SETTLE_SECONDS, took), _SETTLE_AT_MOST)
        others = group.running or group.table.group_world_size > 1
        if young and restarts_left and others and waited < settle:
            # Whether every rank fails alike decides whether a restart can help at all.
            self._phase = "settling"
            self._deadline = self._first_failure_at + settle
            return
        self._report("failed")

    def _report(self, result: Literal["succeeded", "failed"]) -> None:
        self._events.state(result)
        self._phase = "reported"
        self._deadline = None
        self._save()
        self._say_result()

    def _say_result(self) -> None:
        group = self._group
        assert group is not None
        failures = group.failures(self._host)
        reason = ""
        if self._inplace is not None and self._inplace.gave_up:
            ranks = {failure["rank"] for failure in failures}
            failures += [f for f in self._inplace.lost if f["rank"] not in ranks]
            reason = self._inplace.gave_up
            if reason and not group.table.max_restarts:
                reason += " (give --max-restarts to have all workers restarted then)"
        elif self._inplace is None and group.table.joins:
            reason = "a node was lost, and its ranks can't go on in place (see above)"
        if self._phase == "stopped":
            self._coordinator.report_stopped(group.table.round, failures)
        elif failures or reason:
            self._coordinator.report_failed(group.table.round, failures, reason)
        elif not group.running:
            self._coordinator.report_succeeded(group.table.round)

    def _begin_stopping(self, number: int) -> None:
        group = self._group
        assert group is not None
        if self._standstill.since is not None:
            number = int(signal.SIGKILL)  # they must not act any more, and can't
        if self._phase == "stopping":
            if number == signal.SIGKILL:
                self._save(group.ask_to_stop(number))
            return
        self._phase = "stopping"
        if self._inplace is not None:
            self._inplace.stand_down()
        self._killed = False
        self._deadline = time.monotonic() + self._shutdown_timeout
        self._save(group.ask_to_stop(number))

    def _on_deadline(self) -> None:
        self._deadline = None
        group = self._group
        if group is None:
            return
        if self._phase == "settling":
            self._look_at_group()
        elif self._phase == "stopping" and group.running:
            if not self._killed:
                self._killed = True
                self._deadline = time.monotonic() + KILL_PATIENCE
                self._save(group.kill())
                return
            group.give_up()
            self._stopped()

    def _stopped(self) -> None:
        """Every worker of the group has ended; leave nothing of them, and say so."""
        group = self._group
        assert group is not None
        self._deadline = None
        self._phase = "stopped"
        group.sweep_remnants()
        self._joining_since = time.monotonic()
        if self._stopping_since is not None:
            self._events.took(f"{_LOCAL}._stop_workers", self._stopping_since)
        if self._stop_signal is not None:
            self._leave()
        elif self._verdict is not None:
            self._conclude()
        else:
            self._save()
            self._say_result()

    def _conclude(self) -> None:
        """The verdict is in and nothing runs here: tell the user and end."""
        verdict = self._verdict
        assert verdict is not None
        self._events.total_run_time = int(time.monotonic() - self._began)
        failures: list[Failure] = list(verdict.failures)
        if self._group is not None:
            self._group.sweep_remnants()
            self._group.finish_output()
            by_rank: Mapping[int, Failure] = {f["rank"]: f for f in failures}
            self._events.ended(self._group.facts(), by_rank, verdict.success)
        self._events.took(f"{_SIMPLE}.run", self._began, ok=self._group is not None)
        if verdict.reason:
            line = self._not_again(verdict.reason)
            level = "error" if not verdict.success else "debug"
            say(line, level, event="finish", reason=verdict.reason)
        if failures:
            sys.stderr.write(report(self._job.entrypoint_name, failures) + "\n")
            hand_up(failures)
        self._events.record(
            "SUCCEEDED" if verdict.success or failures else "FAILED", EventSource.AGENT
        )
        self._code = 0 if verdict.success else 1


def run_agent(plain: bool, membership: Membership) -> Callable[[Wire, Job, str], int]:
    """What the supervisor runs in the forked agent."""

    def run(wire: Wire, job: Job, run_dir: str) -> int:
        threading.current_thread().name = "agent"
        return Agent(wire, job, run_dir, plain, membership).run()

    return run
