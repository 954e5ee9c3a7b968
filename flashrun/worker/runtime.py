"""The worker runtime: what runs inside a training process, live or catching up.

One `Runtime` per process. The script's thread calls in through the process groups (`issue`, `wait`,
`create_group`), the boundary hook (`at_boundary`) and the end (`finish`). The channel's thread
brings the agent's words. A generation that fails is handled on the script's thread, wherever it
needs a collective: it *holds* there (rule 3), takes part in the recovery, and goes on as if the
collective had taken longer.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch

from flashrun import messages
from flashrun.messages import Message
from flashrun.worker import boundary as boundary_hook
from flashrun.worker import comm_hooks, process_group, proof, reductions, uneven, untraced
from flashrun.worker.arrival import Arrival
from flashrun.worker.backends import Choose, choose
from flashrun.worker.bootstrap import Bootstrap
from flashrun.worker.channel import Channel
from flashrun.worker.communicator import (
    BarrierMissed,
    Stopping,
    Superseded,
    timed_out,
    use_address,
)
from flashrun.worker.completion import Completion
from flashrun.worker.default_store import Shared
from flashrun.worker.futures import Futures
from flashrun.worker.heartbeat import Heartbeat
from flashrun.worker.hook_state import HookStates
from flashrun.worker.laggard import Laggard
from flashrun.worker.oplog import GATHERS, KINDS, Creation, Entry, Op, flatten
from flashrun.worker.others import Others
from flashrun.worker.own import Own
from flashrun.worker.peers import Peers
from flashrun.worker.private import Private
from flashrun.worker.process_group import FlashProcessGroup
from flashrun.worker.proving import Proving
from flashrun.worker.rejoining import Rejoining
from flashrun.worker.replay.api import Divergence, Mode, Replay
from flashrun.worker.retention import Retention
from flashrun.worker.sealing import Copied, Sealing
from flashrun.worker.state import Objects, State, fingerprint
from flashrun.worker.stepping import Stepping
from flashrun.worker.unchanged import Unchanged

MARGIN = 300.0  # s beyond the machine's own deadlines that a worker waits for its word
COMPUTED = (
    "an output from before the step at which this worker was replaced is still in use, and"
    " computing it again takes collectives"
)
BARRIER_GRACE = 1.0  # s in which the death is told that a monitored_barrier has failed of


class Runtime:
    """See the module.

    Attributes:
        generation: the one whose communicators the script uses.
        pending: the newest one that the machine has opened; the worker is live while it equals
            `generation`.
        default_store: the scripts', where that outlives any node; what all have in common.
        patience: s in which a word of the machine comes, if one comes.
        has_state: the state here is that of `boundary`; False for a replacement until
            a donor has sent it.
        line: names what this rank has shadowed so far (see `uneven`).
        shadowed: the last boundary ended an iteration that it shadowed.
    """

    def __init__(self, replay: Replay, environ: Mapping[str, str], choose: Choose) -> None:
        self.rank = int(environ["RANK"])
        self.world_size = int(environ["WORLD_SIZE"])
        self.incarnation = int(environ.get(messages.INCARNATION, "0"))
        self.run_dir = Path(environ[messages.RUN_DIR])
        self._token = environ[messages.TOKEN]
        self.bootstrap = Bootstrap(environ)
        # The machine gives up a hold and a catch-up after this time each; no word at all after both
        # means that nobody is there to say it.
        self.patience = 2 * float(environ.get(messages.RECOVERY_TIMEOUT, "1800")) + MARGIN
        self.retention = Retention(environ.get(messages.RETAIN, "on"), self.log)
        self._released = 0  # the last interval of which every rank has completed an operation
        self._beat_interval = float(environ.get(messages.HEARTBEAT, "5"))
        self._choose = choose
        self.replay = replay
        self.mode = Mode.CATCHUP if self.incarnation else Mode.LIVE
        self.boundary = 0
        self.pending = int(environ.get(messages.GENERATION, "0"))
        self.generation = self.pending if self.mode is Mode.LIVE else self.pending - 1
        self.has_state = self.mode is Mode.LIVE
        self.line = ""
        self.shadowed = False
        self._replaying = False  # the replay is there to be told the target
        self.no_log = False
        self.target: int | None = None
        self.groups: dict[str, FlashProcessGroup] = {}
        self.log_of: dict[int, list[Entry]] = {0: []}
        self._names: dict[str, int] = {}
        self.sites: dict[int, tuple[str, int]] = {}
        self.buckets: dict[int, list[str | None]] = {}
        self.lock = threading.RLock()  # log and communicators
        self.hold_lock = threading.RLock()  # one thread takes part in a recovery
        self.told = threading.Condition()
        self._inbox: dict[tuple[str, int], Message] = {}
        self.exiting = False  # every script has ended
        self.stopping = False  # this job's workers were asked to end: nobody is waited for any more
        self.finished = False
        self._formed = False
        self.objects = Objects()
        self.state = State(self.objects)
        self.private = Private(self.run_dir, self.rank, fresh=not self.incarnation)
        self.own = Own(self.run_dir, self.rank, fresh=not self.incarnation)
        self.unchanged = Unchanged(self.run_dir, self.rank, fresh=not self.incarnation)
        self.hook_states = HookStates(self.run_dir, self.rank, fresh=not self.incarnation)
        self._rung = [-1, -1]  # the last interval with a collective outside and in backward
        self.sealing = Sealing(environ, self.rank, self.incarnation)
        self.copied = Copied.find(self.run_dir, self.rank) if self.incarnation else None
        address = environ.get(messages.ADDRESS, "")
        use_address(address, environ.get(messages.ADDRESS_GIVEN) == "1")
        self.peers = Peers(self, self._token, address)
        self.others = Others.of(environ, self._token, self.patience) if address else None
        self.laggard = Laggard(self)
        self.completion = Completion(self)
        self.futures = Futures(self)
        self.arrival = Arrival(self)
        self.rejoining = Rejoining(self)
        self.stepping = Stepping(self)
        self.proving = Proving(self)
        path = environ[messages.CHANNEL]
        said = messages.left(path, self.rank)
        self.channel = Channel(path, self._hello, self._receive, said, self.incarnation)
        table = self.bootstrap.spread
        self.default_store = (
            None if table is None else Shared(self, environ, table, self.bootstrap.here)
        )

    # --- beginning and end

    def install(self) -> None:
        """Hook torch; in a replacement, begin the catch-up."""
        self._start_heartbeat()
        self.objects.install()
        process_group.install(self)
        comm_hooks.install(self.log, self.hook_states.add)
        reductions.install()
        if self.default_store is not None:
            self.default_store.install()
        self.channel.start()
        if self.mode is Mode.LIVE:
            self.replay.start_recording(self)
        else:
            self._start_catchup()
        boundary_hook.install(self)
        uneven.install(self)
        untraced.leave_all_alone()  # of what is loaded by now
        atexit.register(self._at_exit)
        if self.mode is Mode.CATCHUP:
            self.arrival.at_boundary(0)

    def _start_heartbeat(self) -> None:
        try:
            Heartbeat(self.run_dir, self.rank, self._beat_interval, self._at_beat).start()
        except OSError as error:
            reason = f"no heartbeat, so it is not found if it is stopped: {error}"
            event = {"event": "replay-warning", "reason": reason}
            self.channel.send({"op": "event", "event": event}, standing="no-heartbeat")

    def _at_beat(self) -> tuple[int, str]:
        """Where this worker is."""
        self.futures.at_beat()
        return self._where()

    def _where(self) -> tuple[int, str]:
        if self.finished:
            return self.boundary, "finished"
        if self.mode is Mode.CATCHUP:
            return self.boundary, "catch-up"
        return self.boundary, "live" if self.pending == self.generation else "held"

    def _start_catchup(self) -> None:
        """Begin the replay. A worker that died before it had a log has seen nothing of the world:
        where nobody has taken a step, its replacement simply begins."""
        self.replay.copied = self.copied is not None
        try:
            self.replay.start_catchup(self)
        except Divergence as error:
            if self.copied is not None or self.await_target() != 0:
                self.diverged(error)
            self.replay.start_recording(self)
            self.no_log = True
            return
        with self.told:
            self._replaying = True
            if self.target is not None:
                self.replay.set_target(self.target)

    def await_target(self) -> int:
        with self.told:
            if not self.told.wait_for(lambda: self.target is not None, timeout=self.patience):
                self.diverged(self._no_word("where the survivors are"))
            return self.target if self.target is not None else -1

    def finish(self, error: BaseException | None = None) -> None:
        """The script has ended. Without an error this worker stays until every rank has ended."""
        if self.finished:
            return
        self.finished = True
        if self.mode is Mode.CATCHUP:
            # the dead worker came further than this, so it is no failure of the script
            error = self.replay.failure() or error
            made = self.replay.made_since()
            if made and isinstance(error, Exception) and not isinstance(error, Divergence):
                error = Divergence(
                    f"{type(error).__name__}: {error}; the replay looked for {made}, which was made"
                    " after this rank's script had begun, where nothing says what the lost rank had"
                    " found (a thread, or a process of its own); make it before the job begins"
                )
            if error is None or isinstance(error, SystemExit):
                error = Divergence(
                    f"the script ended at boundary {self.boundary} of the replay, before boundary"
                    f" {self.target}"
                )
            self.diverged(error)
        if error is not None and not (isinstance(error, SystemExit) and error.code in (None, 0)):
            return
        self.channel.send({"op": "finished", "boundary": self.boundary}, standing="finished")
        while True:
            with self.told:
                self.told.wait_for(lambda: self.ending or self.pending > self.generation)
                if self.ending:
                    return
            with self.hold_lock:
                self.enter()

    def _at_exit(self) -> None:
        if not self.finished:
            failed = getattr(sys, "last_value", None)
            self.finish(failed)
        self.replay.stop()

    def diverged(self, error: BaseException) -> NoReturn:
        """This worker can't go on exactly: say why, and end. Everybody is restarted."""
        self.replay.abort_catchup()
        reason = str(error) if isinstance(error, Divergence) else f"{type(error).__name__}: {error}"
        self.channel.send({"op": "diverged", "reason": reason}, standing="diverged")
        with self.told:
            self.told.wait_for(lambda: self.ending, timeout=30)
        os._exit(messages.EXIT_DIVERGED)

    def log(self, event: Mapping[str, Any]) -> None:
        """Pass an event to the agent (also the replay's, see `RuntimeLike`)."""
        # What decides how a fault is met must not be lost with a connection.
        standing = "recovery-class" if event.get("event") == "recovery-class" else None
        self.channel.send({"op": "event", "event": dict(event)}, standing)

    @property
    def ending(self) -> bool:
        """Nothing more is to be waited for."""
        return self.exiting or self.stopping

    # --- the agent's words

    def _hello(self) -> Message:
        return {
            "op": "hello",
            "rank": self.rank,
            "incarnation": self.incarnation,
            "pid": os.getpid(),
            "token": self._token,
            "port": self.peers.server.port,
            "generation": self.generation,
            "boundary": self.boundary,
        }

    def _receive(self, message: Message) -> None:
        op = message["op"]
        generation = int(message.get("generation", 0))
        with self.told:
            if op == "exit":
                self.exiting = True
            elif op == "stopping":
                self.stopping = True
            elif op == "confirmed":
                self.proving.confirmed(int(message["boundary"]))
            elif op == "own":
                self.own.answered(message["asked"], message["shared"])
            elif op == "others" and self.others is not None:
                self.others.told(message["nodes"])
            elif op == "abort":
                self.pending = max(self.pending, generation)
            else:
                self._inbox[op, generation] = message
            if op == "plan" and self.mode is Mode.CATCHUP and generation >= self.pending:
                self.pending = generation
                self.target = int(message["target"])
                self.own.offered = message["own"]
                if self._replaying:
                    self.replay.set_target(self.target)
            self.told.notify_all()
        if op == "abort":
            self.abort()

    def abort(self) -> None:
        """Cut all communicators, so that whoever waits in one wakes up (rule 2)."""
        for group in list(self.groups.values()):
            communicator = group.communicator
            if communicator is not None:
                communicator.abort()

    def wanted(self, generation: int) -> Callable[[], None]:
        def check() -> None:
            if self.pending > generation:
                raise Superseded

        return check

    def await_word(self, op: str, generation: int) -> Message:
        """The machine's word in this generation.

        Raises:
            Superseded: a newer generation is open, or every script has ended.
            Stopping: the job is being stopped.
        """
        with self.told:
            came = self.told.wait_for(
                lambda: (
                    (op, generation) in self._inbox or self.pending > generation or self.ending
                ),
                timeout=self.patience,
            )
            if self.stopping:
                raise Stopping(f"no '{op}' of generation {generation}: the job is being stopped")
            if self.pending > generation or self.exiting:
                raise Superseded
            if not came:
                self.diverged(self._no_word(f"'{op}' of generation {generation}"))
            return self._inbox[op, generation]

    def _no_word(self, what: str) -> Exception:
        return TimeoutError(
            f"rank {self.rank}, held at boundary {self.boundary}, waited {self.patience:.0f} s for"
            f" {what} from its agent; look into flashrun's own log for why it said nothing"
        )

    # --- groups

    def carries(self, backend: str) -> bool:
        """Whether groups of this backend are ours."""
        return self._choose(backend) is not None

    def create_group(
        self, name: str, rank: int, ranks: list[int], backend: str, timeout: timedelta
    ) -> FlashProcessGroup:
        """A new group; live, its communicator is there on return."""
        count = self._names[name] = self._names.get(name, -1) + 1
        ident = f"{name}.{count}"
        group = FlashProcessGroup(self, ident, rank, ranks, backend, timeout)
        if not self._formed:
            self._formed = True
            self.channel.send({"op": "formed"}, standing="formed")
        with self.lock:
            self.groups[ident] = group
            entry = Creation(group)
            if self.mode is Mode.LIVE and not self.laggard.running:
                self.log_of[self.boundary].append(entry)
        if self.mode is Mode.LIVE and not self.laggard.running:
            self._build_or_hold(group)
        return group

    def _build_or_hold(self, group: FlashProcessGroup) -> None:
        if self.pending == self.generation:
            try:
                self.build(group, self.generation)
                return
            except Superseded:
                pass
            except (RuntimeError, OSError) as error:  # (a timeout is one of the latter)
                if self.pending == self.generation:
                    self.suspect(error)
        with self.hold_lock:
            self.enter()

    def build(self, group: FlashProcessGroup, generation: int) -> None:
        wanted = self.wanted(generation)
        store = self.bootstrap.store(
            generation, group.ident, group.ranks, group.timeout, wanted
        )
        group.communicator = None
        make = self._choose(group.backend)
        assert make is not None  # see carries
        group.communicator = make(store, group.rank(), group.size(), group.timeout, wanted)
        if self.pending > generation:  # the abort came before there was anything to cut
            group.communicator.abort()
            raise Superseded

    # --- operations

    def issue(self, group: FlashProcessGroup, kind: str, args: tuple[Any, ...]) -> Op:
        """Log an operation and start it."""
        with self.lock:
            if self.stepping.now:
                self.stepping.issues()
            counts = not KINDS[kind].point_to_point
            in_backward = torch._C._current_graph_task_id() != -1
            poisoned = self.replay.poisoned
            if poisoned and self.replay.computing:
                raise Divergence(COMPUTED)
            if poisoned and in_backward and self.mode is Mode.LIVE:
                self.replay.written_by_torch(flatten(args[0]))
            if self._rung[in_backward] != self.boundary:
                # What is logged by now (the loss) is to be there should the node be lost, before
                # the others can use what is sent here to take their step.
                self._rung[in_backward] = self.boundary
                self.sealing.ring()
            op = Op(group, kind, args, group.seq if counts else -1, self.boundary, in_backward)
            if counts:
                group.seq += 1
            if self.mode is Mode.CATCHUP:
                if self.completion.give(op):
                    return op
                op.stand_in()
                mine = kind == "broadcast" and (op.is_root() or self.unchanged.has(op))
                if group.size() > 1 and not mine:
                    self.replay.stood_in(op.outputs())
                return op
            if poisoned and not in_backward:
                gives = kind != "broadcast" or op.is_root()
                self.replay.sent(op.inputs() if gives else [], op.outputs())
            if self.laggard.running:
                self.laggard.give(op)
                return op
            given = self.peers.served
            served = given.pop((group.ident, op.seq), None) if given else None
            self.retention.keep(op)
            if served is not None:
                op.receive(served)
                self.log_of[self.boundary].append(op)
                return op
            if self.state.buffers:
                self.private.keep(self.boundary + 1, self.state.buffers)
            if kind == "broadcast":
                self.unchanged.before(op)
            self.log_of[self.boundary].append(op)
            if self.pending == self.generation and group.communicator is not None:
                op.issued = True
                op.handle = group.communicator.issue(kind, op.args)
        if in_backward:
            self.futures.in_backward(op)
        elif kind in GATHERS:
            self.proving.gathers(op.interval)
        return op

    def wait(self, op: Op) -> None:
        """Return when `op` has really completed here."""
        try:
            return self._wait(op)
        except KeyboardInterrupt as raised:
            interrupt = raised
        raise _as_from_here(interrupt)

    def _wait(self, op: Op) -> None:
        while not op.done:
            handle = op.handle
            error: RuntimeError | None = None
            if handle is not None:
                try:
                    handle.wait()
                except RuntimeError as problem:
                    error = problem
                else:
                    self.completed(op)
                    return
            with self.hold_lock:
                if op.done or op.handle is not handle:
                    continue
                if isinstance(error, BarrierMissed) and self._nobody_died():
                    self._missed(op, error)
                if self.pending == self.generation:
                    never = RuntimeError(f"{op.describe()} was never issued")
                    self.suspect(error or never, op)
                self.enter()

    def _nobody_died(self) -> bool:
        with self.told:
            newer = self.told.wait_for(lambda: self.pending > self.generation, BARRIER_GRACE)
        return not newer

    def _missed(self, op: Op, error: RuntimeError) -> NoReturn:
        """Ranks did not come to a ``monitored_barrier``: the script hears of it, as from torch."""
        self.completed(op)
        event = {
            "event": "recovery-class",
            "reason": f"monitored_barrier failed in the script: {error}",
            "remedy": "what the script does about that can't be repeated",
        }
        self.channel.send({"op": "event", "event": event}, standing="barrier")
        raise error

    def completed(self, op: Op) -> None:
        if self.unchanged.watches:
            self.unchanged.after(op)
        op.keep_results()
        op.complete()
        if self.retention.held > self.retention.limit:
            with self.lock:
                self.retention.relieve(self.log_of[self.boundary], self.boundary)
        if (
            op.interval > self._released
            and KINDS[op.kind].synchronizes
            and len(op.group.ranks) == self.world_size
        ):
            self._all_are_at(op.interval)

    def _all_are_at(self, interval: int) -> None:
        """Every rank has issued an operation of this interval, so nobody needs the one before."""
        with self.lock:
            self._released = max(self._released, interval)
            before = self.log_of.get(interval - 1)
            if before:
                undone = [e for e in before if isinstance(e, Op) and not e.done]
                self.retention.release(e for e in before if isinstance(e, Creation) or e.done)
                self.log_of[interval - 1] = list[Entry](undone)

    def suspect(self, error: Exception, op: Op | None = None) -> None:
        """A collective failed and nobody has said why: ask, and wait for the answer."""
        generation = self.generation
        message = {"op": "suspect", "generation": generation, "error": str(error)[:500]}
        if op is not None and timed_out(error):
            seconds = op.group.timeout.total_seconds()
            message["late"] = {"what": op.describe(), "seconds": seconds, "ranks": op.peers()}
        self.channel.send(message, standing="suspect")
        self._await_newer(generation, error)

    def _await_newer(self, generation: int, error: Exception) -> None:
        """The agent was told that something does not work in `generation`: it opens another one, or
        ends this worker."""
        with self.told:
            if not self.told.wait_for(
                lambda: self.pending > generation or self.ending, timeout=self.patience
            ):
                self.diverged(self._no_word(f"an answer to '{type(error).__name__}: {error}'"))
            if self.stopping:
                raise error

    # --- recovery, on the script's thread

    def enter(self) -> None:
        """Stand still and take part until the newest generation is live (or, as a laggard, until
        the script may run to its boundary)."""
        try:
            return self._enter()
        except KeyboardInterrupt as raised:
            interrupt = raised
        raise _as_from_here(interrupt)

    def _enter(self) -> None:
        while self.pending > self.generation and not self.exiting:
            generation = self.pending
            try:
                self.rejoining.take_part(generation)
                return
            except Superseded:
                continue
            except Stopping:
                raise
            except Divergence as error:
                self.diverged(error)  # another attempt would end the same
            except Exception as error:  # noqa: BLE001  # nothing of this is the script's to see
                self.failed(generation, error)

    def failed(self, generation: int, error: Exception) -> None:
        """Something of a recovery did not work, most likely since a peer went away: the machine
        decides what follows. Returns when a newer generation is open, or every script has ended."""
        text = f"{type(error).__name__}: {error}"[:500]
        word = {"op": "failed", "generation": generation, "error": text}
        self.channel.send(word, standing="failed")
        self._await_newer(generation, error)

    # --- boundaries

    def before_step(self) -> None:
        """An outermost step of an optimizer is about to begin."""
        if not self.boundary:
            self.own.before_first_step(self.state.layout().tensors.values())

    def close(self, interval: int) -> None:
        """Wait for what the script has left open in `interval`: what is in flight at a boundary
        could be neither repeated (its peers are a step further) nor logged (its outputs are what it
        may still write). A receive that is open may need a send that comes after the step, so it
        is not waited for; from then on lost workers are not replaced."""
        for op in [e for e in self.log_of.get(interval, ()) if isinstance(e, Op) and not e.done]:
            if not KINDS[op.kind].point_to_point:
                self.wait(op)
            elif op.handle is None or not op.handle.is_completed():
                event = {
                    "event": "recovery-class",
                    "reason": f"{op.describe()} was still open at an optimizer step",
                    "remedy": "wait for it before the step",
                }
                self.channel.send({"op": "event", "event": event}, standing="open")
            else:
                self.wait(op)

    def at_boundary(self, shadowed: bool = False, prove: bool = False) -> None:
        """An outermost step of an optimizer has returned.

        Args:
            shadowed: the others' has; this rank has taken none (see `uneven`).
            prove: let the ranks be compared here in any case.
        """
        live = self.mode is Mode.LIVE  # a replacement does not seal the boundary at which it joins
        b = self.boundary + 1
        due = prove or proof.due(b)
        with self.lock:
            self.boundary = b
            self.shadowed = shadowed
            if shadowed:
                self.line = fingerprint({"line": self.line, "boundary": b})
            self.log_of[b] = []
            self.retention.release(self.log_of.pop(b - 2, ()))
            self.retention.at_boundary(due and self.mode is Mode.LIVE)
            for ident, group in list(self.groups.items()):
                if group.destroyed:
                    del self.groups[ident]
                    continue
                group.base[b] = group.seq
                group.base.pop(b - 2, None)
        self.close(b - 1)
        frame = sys._getframe(2)
        self.sites[b] = frame.f_code.co_filename, frame.f_lineno
        self.sites.pop(b - 2, None)
        self.state.refresh(force=b <= 3)
        self.buckets[b] = self.state.buckets.now(look=b <= 3 or due)
        self.buckets.pop(b - 2, None)
        try:
            self.replay.at_boundary(self, b)
        except Divergence as error:
            if self.mode is not Mode.CATCHUP:
                raise
            self.diverged(error)
        if self.mode is Mode.CATCHUP:
            self.arrival.at_boundary(b)
        arrived, self.laggard.running = self.laggard.running, False
        if self.mode is Mode.LIVE:
            self._keep_hook_states(b)
        if self.has_state:
            self.state.at_boundary(b)
            if self.state.buffers:
                self.private.keep(b, self.state.buffers)
        if self.mode is Mode.LIVE and self.has_state:
            self.proving.at_boundary(b, due, settles=prove)
        if arrived:
            self.peers.served.clear()
            with self.hold_lock:
                self.enter()
        if live:
            self.sealing.seal(b)

    def _keep_hook_states(self, b: int) -> None:
        reason = self.hook_states.at_boundary(b)
        if reason is not None:
            event = {"event": "recovery-class", "reason": reason, "remedy": comm_hooks.REMEDY}
            self.channel.send({"op": "event", "event": event}, standing="hooks")

    def fills(self, b: int) -> list[torch.Tensor]:
        """For the replay: tensors in places of the script's own that get their values at a join."""
        return list(self.own.can_fill(b, self.own.taken).values())


def _as_from_here(interrupt: KeyboardInterrupt) -> KeyboardInterrupt:
    """Ctrl-C ends the script where it waits: its traceback tells nothing of how we wait, nor of the
    errors that a recovery is about to make good. Raise it outside of the handler: it has the
    context of the script's own then."""
    interrupt.__context__ = None
    return interrupt.with_traceback(None)


_installed: Runtime | None = None


def install(replay: Replay | None = None, choose: Choose = choose) -> Runtime | None:
    """Install the runtime where the environment asks for it (``FLASHRUN_CHANNEL``); once.

    Args:
        choose: what carries the groups of a backend.
    """
    global _installed
    if _installed is None and messages.CHANNEL in os.environ:
        _installed = Runtime(replay or Replay(), os.environ, choose)
        _installed.install()
    return _installed
