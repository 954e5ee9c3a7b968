"""The supervisor: owns the terminal, the signals and the processes of one node.

It decides nothing about training. It forks the agent, the zygote and (when asked) the store host,
is the parent of every worker (as their subreaper), sees each exit through a pidfd, keeps what it
saw until the agent has dealt with it, and starts an agent or zygote that died again. When it ends,
nothing of the job is left on the node; when it is killed, the kernel ends the workers
(PR_SET_PDEATHSIG) and the helpers, which see their wire close, sweep up the rest.

Messages from the agent (:mod:`flashrun.node.wire`):

==============  ==================================================================
``spawn``       ``workers``: list of WorkerSpec fields; answered by ``spawned`` (id,
                pid) or ``spawn-failed`` (id, error) each
``forget``      ``ids``: of a round that is over
``host-store``  ``host``, ``port``: answered by ``store`` (port) or ``store-failed`` (error)
``state``       ``state``: kept for the next agent; ``signals``: pairs (id, signal) to send to the
                workers' own processes, in the same packet so that neither is without the other
``doorbell``    ``host``: answered by ``doorbell`` (port; 0: there is none)
``host-shard``  ``host``: answered by ``shard`` (port; 0: there is none)
``finish``      ``code``: end the job
==============  ==================================================================

To the agent: ``hello`` (state, workers, pending, stop, supervisor, spare), ``spawned``,
``spawn-failed``, ``exited`` (id, code: negative for a signal), ``stop`` (signal), ``store``,
``store-failed``, ``doorbell`` (port), ``shard`` (port).
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from flashrun.job import Job
from flashrun.node import aftermath, linux, run_folder, tags, zygote
from flashrun.node.doorbell import Doorbell
from flashrun.node.log_folder import temporary_logs
from flashrun.node.process_tree import (
    KILL_PATIENCE,
    TAG_VARIABLE,
    children,
    kill,
    sweep,
    wait_until_gone,
)
from flashrun.node.store_host import serve_shard, serve_store
from flashrun.node.wire import Message, Wire, pair
from flashrun.node.worker_process import Origin
from flashrun.observe.console import say
from flashrun.rendezvous.server import StoreInUse, StoreNotBound, open_listener

# A helper that dies this often within the window is not started again: it would die for ever.
_RESTART_LIMIT = 5
_RESTART_WINDOW = 30.0
# What the agent gets beyond --shutdown-timeout to kill, name what it cannot kill, report and end,
# before the supervisor ends it (more than the agent's own patience for each of these).
_AGENT_GRACE = 15.0

# How long a helper that has closed its wire gets to end by itself.
_LAST_WORDS = 1.0

Outcome = int | Callable[[], None]


@dataclass
class _Helper:
    """A forked process that is started again when it dies."""

    name: str
    wire: Wire
    pid: int
    pidfd: int
    starts: deque[float] = field(default_factory=deque)


@dataclass
class _Worker:
    """What is known of one worker process; ``code`` is None while it runs."""

    id: str
    pid: int
    pidfd: int = -1
    code: int | None = None


class _Forked(Exception):  # not an error: leaves the loop in a forked child
    """Carries what a forked child is to do out of the supervisor's loop."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__()
        self.outcome = outcome


def _exit_code(info: Any) -> int:
    """waitid's result in subprocess's convention: negative for a signal."""
    return int(info.si_status) if info.si_code == os.CLD_EXITED else -int(info.si_status)


def watched_signals(names: str, handlers: dict[int, Any]) -> tuple[set[int], set[int]]:
    """(signals that stop the job, signals that are passed on to the workers).

    Args:
        names: --signals-to-handle, e.g. ``"SIGTERM,SIGINT"``.
        handlers: dispositions at the start; an ignored signal stays ignored (nohup).
    """
    stop = {int(getattr(signal, name.strip())) for name in names.split(",") if name.strip()}
    forward = {int(signal.SIGUSR1), int(signal.SIGUSR2)} - stop
    ignored = {number for number, handler in handlers.items() if handler == signal.SIG_IGN}
    return stop - ignored, forward - ignored


class Supervisor:
    """One job on one node.

    Args:
        job: what to run.
        origin: what the launcher was given.
        run_agent: the agent's life, run in a forked process; gives its exit code.
        install_runtime: called in a worker when its script imports torch; None without recovery.
        warm: whether the zygote imports what scripts need.
    """

    def __init__(
        self,
        job: Job,
        origin: Origin,
        run_agent: Callable[[Wire, Job, str], int],
        install_runtime: Callable[[], None] | None,
        warm: bool,
    ) -> None:
        self._job = job
        self._origin = origin
        self._run_agent = run_agent
        self._install_runtime = install_runtime
        self._warm = warm
        self._pid = os.getpid()
        self._tag = os.environ[TAG_VARIABLE]
        for folder in run_folder.remove_abandoned():
            text = f"removed {folder}, which a job has left that was killed with all its helpers"
            say(text, "debug", event="abandoned-folder")
        self.run_dir, self._mark = run_folder.make(temporary_logs(job.launch))
        self._selector = selectors.DefaultSelector()
        self._helpers: dict[str, _Helper] = {}
        self._workers: dict[str, _Worker] = {}
        self._pending: dict[str, Message] = {}  # spawns that no zygote has answered yet
        self._early_exits: dict[int, int] = {}  # exits seen before the zygote told the pid
        self._early_signals: dict[str, int] = {}  # to workers that have no pid yet
        self._cancelled: set[str] = set()  # spawns that must not run any more
        self._state: Any = None
        self._store: Message | None = None
        self._doorbell: Doorbell | None = None
        self._shard: socket.socket | None = None  # listens; a process of its own serves it
        self._stop_signal: int | None = None
        self._asked = ""  # the workers were, by the signal of this name
        self._deadline: float | None = None
        self._code: int | None = None
        self._waker, self._wakee = socket.socketpair()
        self._children_at_start = children(self._pid)

    # -- life ------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Run the job to its end.

        Returns:
            The exit code; in a forked child, what that child is to do.
        """
        try:
            linux.become_subreaper()
            self._watch_signals()
            self._start_zygote()
            self._start_agent()
            while self._code is None:
                self._turn()
        except _Forked as forked:
            return forked.outcome
        self._end_everything()
        return self._code

    def _turn(self) -> None:
        timeout = None
        if self._deadline is not None:
            timeout = max(0.0, self._deadline - time.monotonic())
        for key, _ in self._selector.select(timeout):
            handler: Callable[[], None] = key.data
            handler()
            if self._code is not None:
                return
        if self._deadline is not None and time.monotonic() >= self._deadline:
            say("the agent did not end in time; ending everything", "error")
            self._code = 1

    def _end_everything(self) -> None:
        """Leave nothing of the job on this node, and name what cannot be ended."""
        # Another one has nothing to hasten any more, and Python, as it ends, gives signals that
        # have a handler back to the system, which would end this process by them.
        for number in self._stop_signals | self._forward_signals:
            signal.signal(number, signal.SIG_IGN)
        # The helpers first: one that saw its wire close would begin to sweep by itself.
        kill(helper.pid for helper in self._helpers.values())
        mine = tags.job_of(self._tag)
        left = sweep(lambda tag: tags.job_of(tag) == mine, [self._pid], KILL_PATIENCE)
        # A daemon that cleared its environment is a child of this subreaper all the same, and what
        # it has started becomes one when it ends.
        while orphans := children(self._pid) - self._children_at_start - left:
            kill(orphans)
            left |= wait_until_gone(orphans, time.monotonic() + KILL_PATIENCE)
        for pid in sorted(left):
            names = [w.id for w in self._workers.values() if w.pid == pid]
            what = f"worker {names[0]} (pid {pid})" if names else f"process {pid}"
            say(f"{what} cannot be killed (it is stuck in the kernel); it is left behind", "error")
        self._reap()
        self._close_waker()
        run_folder.remove(self.run_dir)
        os.close(self._mark)
        if self._asked and not left:  # what they have said of it stands above
            say(f"{self._asked}: all workers have ended")

    # -- signals ---------------------------------------------------------------------------------

    def _watch_signals(self) -> None:
        self._wakee.setblocking(False)
        self._waker.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        stop, forward = watched_signals(
            self._job.launch.signals_to_handle, dict(self._origin.signals)
        )
        self._stop_signals, self._forward_signals = stop, forward
        for number in stop | forward | {int(signal.SIGCHLD)}:
            signal.signal(number, lambda number, frame: None)
        self._selector.register(self._wakee, selectors.EVENT_READ, self._on_signals)

    def _on_signals(self) -> None:
        for number in self._wakee.recv(4096):
            if number in self._stop_signals:
                self._on_stop(number)
            elif number in self._forward_signals:
                say(f"passing {signal.Signals(number).name} on to the workers", "debug")
                for worker in self._workers.values():
                    self._signal(worker, number)
            elif number == signal.SIGCHLD:
                self._reap()

    def _on_stop(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._stop_signal is not None:
            running = any(worker.code is None for worker in self._workers.values())
            what = "killing all workers" if running else "leaving at once"
            say(f"{name} again: {what}", "warning")
            self._code = 1
            return
        self._stop_signal = number
        timeout = float(self._job.launch.shutdown_timeout or 0)
        if any(worker.code is None for worker in self._workers.values()):
            self._asked = name
            line = f"asking the workers to stop (up to {timeout:g} s; again to kill them)"
        else:
            line = "leaving the job; no worker runs here"
        say(f"{name}: {line}", "info")
        self._deadline = time.monotonic() + timeout + _AGENT_GRACE
        self._tell_agent({"op": "stop", "signal": number})

    def _signal(self, worker: _Worker, number: int) -> None:
        if worker.code is not None:
            return
        try:
            # The pid is ours to wait for and not reaped yet, so it cannot be somebody else's.
            os.kill(worker.pid, number)
        except ProcessLookupError:
            return

    # -- children --------------------------------------------------------------------------------

    def _reap(self) -> None:
        """Collect every child that has ended; known ones are dealt with, orphans just collected."""
        while True:
            try:
                info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG)
            except ChildProcessError:
                return
            if info is None:
                return
            code = _exit_code(info)
            for worker in self._workers.values():
                if worker.pid == info.si_pid and worker.code is None:
                    self._worker_exited(worker, code)
                    break
            else:
                for helper in list(self._helpers.values()):
                    if helper.pid == info.si_pid:
                        self._helper_died(helper, code)
                        break
                else:
                    if self._pending or self._cancelled:
                        self._early_exits[info.si_pid] = code

    def _worker_exited(self, worker: _Worker, code: int) -> None:
        worker.code = code
        if worker.pidfd >= 0:
            self._selector.unregister(worker.pidfd)
            os.close(worker.pidfd)
            worker.pidfd = -1
        self._tell_agent({"op": "exited", "id": worker.id, "code": code})

    def _on_worker_pidfd(self, worker: _Worker) -> None:
        if worker.code is None:
            info = os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOHANG)
            if info is not None:
                self._worker_exited(worker, _exit_code(info))

    def _helper_died(self, helper: _Helper, code: int) -> None:
        # What it said before it died holds: a worker that it has started, a state that it has left.
        while self._code is None and (message := helper.wire.receive(wait=False)) is not None:
            self._on_message(helper, message)
        if self._helpers.get(helper.name) is not helper:
            return  # a store host that said why it ended
        self._selector.unregister(helper.wire.fileno())
        helper.wire.close()
        del self._helpers[helper.name]
        if self._code is not None:
            return
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        if helper.name == "store":
            say(
                f"the store host (pid {helper.pid}) died ({how}): what the workers have in their"
                " store is gone, so this node ends; without a spare to take its place, start the"
                " job again",
                "error",
            )
            self._code = 1
            return
        now = time.monotonic()
        helper.starts.append(now)
        while helper.starts and helper.starts[0] < now - _RESTART_WINDOW:
            helper.starts.popleft()
        if len(helper.starts) > _RESTART_LIMIT:
            say(f"the {helper.name} died {len(helper.starts)} times in a row ({how})", "error")
            self._code = 1
            return
        say(f"the {helper.name} (pid {helper.pid}) died ({how}); starting another", "warning")
        if helper.name == "zygote":
            self._end_unannounced()
            self._start_zygote(helper.starts)
        elif helper.name == "shard":
            self._start_shard(helper.starts)
        else:
            self._start_agent(helper.starts)

    def _end_unannounced(self) -> None:
        """Kill workers that the zygote forked and did not live to tell of: they start anew."""
        if not self._pending:
            return
        mine = tags.job_of(self._tag)
        announced = {worker.pid for worker in self._workers.values()}
        expected = {spec["tag"] for spec in self._pending.values()}

        def is_ours(tag: str) -> bool:
            # A worker shows the zygote's tag until it has written its own.
            half_born = tags.job_of(tag) == mine and tags.role_of(tag) == "zygote"
            return half_born or tag in expected

        keep = announced | {self._pid} | {h.pid for h in self._helpers.values()}
        for pid in sorted(sweep(is_ours, keep, KILL_PATIENCE)):
            say(f"process {pid} cannot be killed (it is stuck in the kernel)", "error")

    def _on_wire(self, helper: _Helper) -> None:
        """A helper's wire has something; it may be of a helper that died in this very turn."""
        if self._helpers.get(helper.name) is not helper:
            return
        message = helper.wire.receive()
        if message is None:
            self._await_helper(helper)
        else:
            self._on_message(helper, message)

    def _on_message(self, helper: _Helper, message: Message) -> None:
        handlers = {"agent": self._on_agent, "zygote": self._on_zygote, "store": self._on_store}
        handlers[helper.name](message)

    def _fork(
        self, name: str, starts: deque[float] | None, body: Callable[[Wire], Outcome | None]
    ) -> _Helper:
        mine, theirs = pair()
        pid = os.fork()
        if pid == 0:
            # Drop what is the supervisor's; the child keeps its own end of the wire only.
            mine.close()
            self._drop_descriptors()
            own = tags.with_role(self._tag, name)
            linux.overwrite_in_environ(self._tag.encode(), own.encode())
            outcome = body(theirs)
            raise _Forked(0 if outcome is None else outcome)
        theirs.close()
        helper = _Helper(name, mine, pid, -1, starts if starts is not None else deque())
        self._helpers[name] = helper
        self._selector.register(
            mine.fileno(), selectors.EVENT_READ, lambda: self._on_wire(helper)
        )
        return helper

    def _close_waker(self) -> None:
        signal.set_wakeup_fd(-1)
        self._waker.close()
        self._wakee.close()

    def _drop_descriptors(self) -> None:
        for helper in self._helpers.values():
            helper.wire.close()
        for worker in self._workers.values():
            if worker.pidfd >= 0:
                os.close(worker.pidfd)
        if self._doorbell is not None:
            self._doorbell.close()
        if self._shard is not None:
            self._shard.close()
        self._close_waker()
        self._selector.close()

    # -- zygote ----------------------------------------------------------------------------------

    def _start_zygote(self, starts: deque[float] | None = None) -> None:
        def body(wire: Wire) -> Outcome | None:
            outcome = zygote.serve(
                wire,
                self._job,
                self._origin,
                self._pid,
                tags.with_role(self._tag, "zygote"),
                self._install_runtime,
                self._warm,
                self._mark,
            )
            if outcome is None:
                aftermath.sweep_after_supervisor(self._tag, self._pid, self.run_dir)
            return outcome

        helper = self._fork("zygote", starts, body)
        for spec in self._pending.values():
            helper.wire.send({"op": "spawn", "workers": [spec]})

    def _on_zygote(self, message: Message) -> None:
        id_ = message["id"]
        self._pending.pop(id_, None)
        if id_ in self._cancelled:
            self._cancelled.discard(id_)
            if message["op"] == "spawned" and message["pid"] not in self._early_exits:
                kill([message["pid"]])
            return
        if message["op"] == "spawned":
            worker = _Worker(id_, message["pid"])
            self._workers[id_] = worker
            aftermath.note_worker(self.run_dir, worker.pid)
            self._tell_agent(message)
            self._watch(worker)
            if id_ in self._early_signals:
                self._signal(worker, self._early_signals.pop(id_))
        else:
            self._tell_agent(message)
        if not (self._pending or self._cancelled):
            self._early_exits.clear()

    def _watch(self, worker: _Worker) -> None:
        early = self._early_exits.pop(worker.pid, None)
        if early is not None:
            self._worker_exited(worker, early)
            return
        worker.pidfd = os.pidfd_open(worker.pid)
        self._selector.register(
            worker.pidfd, selectors.EVENT_READ, lambda: self._on_worker_pidfd(worker)
        )

    def _await_helper(self, helper: _Helper) -> None:
        """Its wire closed: it has died, or will (it has nothing to do without the wire)."""
        if self._helpers.get(helper.name) is not helper:
            return
        # Its own end is what is told of it; only one that lingers is ended.
        wait_until_gone([helper.pid], time.monotonic() + _LAST_WORDS)
        kill([helper.pid])
        info = os.waitid(os.P_PID, helper.pid, os.WEXITED)
        self._helper_died(helper, _exit_code(info) if info is not None else 0)

    # -- agent -----------------------------------------------------------------------------------

    def _start_agent(self, starts: deque[float] | None = None) -> None:
        def body(wire: Wire) -> Outcome | None:
            os.setsid()
            for number in self._stop_signals | self._forward_signals:
                signal.signal(number, signal.SIG_IGN)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            linux.set_command_line(["flashrun: agent"])
            code = self._run_agent(wire, self._job, self.run_dir)
            if wire.closed:
                aftermath.sweep_after_supervisor(self._tag, self._pid, self.run_dir)
            sys.stdout.flush()
            os._exit(code)

        helper = self._fork("agent", starts, body)
        helper.wire.send(
            {
                "op": "hello",
                "state": self._state,
                "workers": [
                    {"id": w.id, "pid": w.pid, "code": w.code} for w in self._workers.values()
                ],
                "pending": list(self._pending),
                "supervisor": self._pid,
                "spare": sorted(self._children_at_start),
                "stop": self._stop_signal,
            }
        )

    def _tell_agent(self, message: Message) -> None:
        helper = self._helpers.get("agent")
        if helper is not None:
            helper.wire.send(message)

    def _on_agent(self, message: Message) -> None:
        op = message["op"]
        if op == "spawn":
            self._pending.update({spec["id"]: spec for spec in message["workers"]})
            if "zygote" in self._helpers:
                self._helpers["zygote"].wire.send(message)
        elif op == "forget":
            for id_ in message["ids"]:
                self._workers.pop(id_, None)
        elif op == "state":
            self._state = message["state"]
            for id_, number in message["signals"]:
                self._signal_by_id(id_, number)
        elif op == "host-store":
            self._host_store(message["host"], message["port"])
        elif op == "doorbell":
            self._hang_doorbell(message["host"])
        elif op == "host-shard":
            self._host_shard(message["host"])
        elif op == "finish":
            self._code = int(message["code"])
        else:
            raise ValueError(f"the agent sent {op!r}")

    def _hang_doorbell(self, host: str) -> None:
        if self._doorbell is None:
            try:
                self._doorbell = Doorbell(host, self._selector)
            except (StoreInUse, StoreNotBound) as error:
                say(f"the loss of this node will be seen by its heartbeat only: {error}", "warning")
        port = self._doorbell.port if self._doorbell is not None else 0
        self._tell_agent({"op": "doorbell", "port": port})

    def _signal_by_id(self, id_: str, number: int) -> None:
        if id_ in self._workers:
            self._signal(self._workers[id_], number)
        elif id_ in self._pending and self._stop_signal is None:
            self._early_signals[id_] = number
        elif id_ in self._pending:
            # The job is to stop, and this worker has not begun: a zygote that is still loading
            # torch is not waited for.
            del self._pending[id_]
            self._cancelled.add(id_)
            self._tell_agent({"op": "exited", "id": id_, "code": -number})

    # -- store -----------------------------------------------------------------------------------

    def _host_store(self, host: str, port: int) -> None:
        if self._store is not None:
            self._tell_agent(self._store)
            return

        self._fork_server("store", None, lambda wire: serve_store(wire, host, port))

    def _fork_server(
        self, name: str, starts: deque[float] | None, serve: Callable[[Wire], None]
    ) -> None:
        """A helper that serves a store until the supervisor is gone."""

        def body(wire: Wire) -> Outcome | None:
            os.setsid()
            for number in self._stop_signals | self._forward_signals:
                signal.signal(number, signal.SIG_IGN)
            linux.set_command_line([f"flashrun: {name}"])
            serve(wire)
            aftermath.sweep_after_supervisor(self._tag, self._pid, self.run_dir)
            os._exit(0)

        self._fork(name, starts, body)

    def _host_shard(self, host: str) -> None:
        if self._shard is None:
            try:
                self._shard = open_listener(host, 0)
            except (StoreInUse, StoreNotBound) as error:
                say(f"no shard of the bootstrap store on this node, so the groups of all nodes are"
                    f" built through one store: {error}", "warning", event="no-shard")  # fmt: skip
            else:
                self._start_shard()
        port = 0 if self._shard is None else int(self._shard.getsockname()[1])
        self._tell_agent({"op": "shard", "port": port})

    def _start_shard(self, starts: deque[float] | None = None) -> None:
        """Serve the shard. The socket stays here as well: who connects while the server is started
        again waits for it, at the port that all nodes know."""
        assert self._shard is not None
        listener = self._shard.dup()
        self._fork_server("shard", starts, lambda wire: serve_shard(wire, listener))
        listener.close()

    def _on_store(self, message: Message) -> None:
        if message["op"] == "store":
            self._store = message
        else:  # it could not bind and ends by itself; that is an answer, not a death
            store = self._helpers.pop("store")
            self._selector.unregister(store.wire.fileno())
            store.wire.close()
        self._tell_agent(message)
