"""The thread that carries out the membership protocol for one agent.

It is a thin shell: it reads records, asks :mod:`flashrun.control.membership_plan`, writes the
answer and tells the agent what to do. Keys (all under ``flashrun/``; everything else in the store
belongs to the workers):

==================  ====================================================================
``job``             what all agents agree on; written once, by compare-and-swap
``count``           number of nodes that ever came; its value is a node's order
``node/<order>``    the record of a node; written by that node only
``beat/<order>``    its heartbeat, a counter
``leader``          who decides, with a term; by compare-and-swap
``plan``            what was decided; by compare-and-swap
``table/<name>``    the rank table that the plan names: of one round, never changed
``missing``         what is being waited for, for the eyes of all
``lost/<order>``    why a node is known to be lost, before its heartbeat tells; until it comes back
``silent``          whose heartbeat stands still, for the eyes of all
``losses``          bumped when one was found, or came back
``cordoned``        nodes that get no ranks, by address; by compare-and-swap
``faults/<addr>``   when workers of a node died, or it was lost
``quiet``           the round and joins of the table in which no recovery is under way
``revision``        bumped after each write that who leads has to see
``news``            bumped after each write that all have to see: a plan, another leader
==================  ====================================================================
"""

from __future__ import annotations

import atexit
import json
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from flashrun.control.controller import Controller
from flashrun.control.cordon import CordonBook
from flashrun.control.cut_off import come_back, fence_of
from flashrun.control.etcd_joining import EtcdOpener
from flashrun.control.events import (
    Connected,
    Event,
    Finish,
    HostStore,
    Lost,
    Membership,
    Node,
    Refused,
    Reseat,
    Start,
    Stop,
    Waiting,
)
from flashrun.control.failures import merge_failures
from flashrun.control.fence import Fence
from flashrun.control.growth import quiet_text
from flashrun.control.joining import HandlerOpener, Opener, RefusedError, StoreOpener
from flashrun.control.membership_plan import react
from flashrun.control.patience import Patience
from flashrun.control.plan_book import PREFIX, PlanBook
from flashrun.control.records import (
    Failure,
    Member,
    Plan,
    job_from_json,
    job_to_json,
    member_from_json,
    member_to_json,
)
from flashrun.rendezvous.endpoint import EndpointError, listen_address
from flashrun.rendezvous.kv import KeyValue, LeaseLost, StoreLost, StoreRefused
from flashrun.rendezvous.server import StoreInUse, StoreNotBound
from flashrun.rendezvous.table import NodeRanks, RankTable
from flashrun.rendezvous.tcp_kv import Cancelled, ConnectTimeout, NotAStore

_LOOK_S = 1.0
_MANY_NODES = 128  # from which on they look for news less often: the store's work stays the same


class Coordinator:
    """Joins the job, keeps this node's record, decides when it leads, and tells the agent.

    Events come out of ``events``; ``wake`` is called (from the thread) after each. The reports may
    be called from any thread, before the node is connected too, and more than once.

    Args:
        resume, table: where the agent before this one was connected, and the table it had: who the
            other nodes are must be known before the store has answered, or a node that is cut off
            in this moment would wait for it for ever, with its workers.
        answered: see `Fence`, ``kept``.
        paused: since when the workers stand still; by the agent before this one.
    """

    def __init__(
        self,
        membership: Membership,
        node: Node,
        *,
        wake: Callable[[], None],
        host_store: HostStore,
        resume: Connected | None = None,
        table: RankTable | None = None,
        doorbell: Callable[[str], int] | None = None,
        shard: Callable[[str], int] | None = None,
        answered: Path | None = None,
        paused: float | None = None,
    ) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._membership = membership
        self._timing = membership.timing
        self._node = node
        self._wake = wake
        self._host_store = host_store
        self._resume = resume
        self._doorbell = doorbell
        self._shard = shard
        self._answered = answered
        self._paused = paused
        self._alone = membership.alone
        self._reports: queue.SimpleQueue[Callable[[Member], Member]] = queue.SimpleQueue()
        self._news = threading.Event()
        self._closed = threading.Event()
        # Whether the others can know of this node; read by the thread after `_leaving` is written.
        self._known = resume is not None
        self._leaving = False
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)
        self._fence: Fence | None = None
        self._emitting = threading.Lock()
        # Of the thread only:
        self._opener: Opener
        self._base_round = 0
        self._base_restarts = 0
        self._kv: KeyValue
        self._book: PlanBook
        self._me: Member
        self._connected: Connected
        self._controller: Controller | None = None
        self._stop_sent = -1
        self._joins = 0  # of the table that the agent has
        self._seen: dict[str, int] = {}  # what is looked at for news -> its last value
        self._beats = 0
        self._beat_due = 0.0
        self._waiting_due = 0.0
        self._spare_said = False
        self._table = table
        self._listens = False  # for changes, instead of looking for them
        self._listens_to_all = False

    # --- for the agent ------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread; returns at once."""
        if self._resume is not None:
            self._be_fenced(self._resume, None)
        self._thread.start()
        # A daemon thread that is inside torch's store while the interpreter ends aborts the process
        # (CPython < 3.14 ends it through C++ frames). os._exit needs none of this.
        atexit.register(self.close, 1.0)

    def close(self, timeout_s: float = 0.0) -> None:
        """End the thread, whatever it waits for. It is a daemon and may be abandoned: a call to a
        store that does not answer ends only after its own timeout. Doesn't tell the other nodes
        (``leave`` does)."""
        self._closed.set()
        self._news.set()
        if self._fence is not None:
            self._fence.close()
        if timeout_s > 0:
            self._thread.join(timeout_s)

    def report_failed(self, round_: int, failures: Sequence[Failure], reason: str = "") -> None:
        """Workers of ``round_`` failed by themselves. Keep the others running until Stop comes."""
        self._report("failed", round_, failures, reason)

    def report_succeeded(self, round_: int) -> None:
        """All workers of this node have ended well. Wait for Finish (or Stop and Start)."""
        self._report("succeeded", round_)

    def report_stopped(self, round_: int, failures: Sequence[Failure] = ()) -> None:
        """After Stop: no worker of ``round_`` runs any more. ``failures``: all that failed by
        themselves before they were stopped, those already reported included."""
        self._report("stopped", round_, failures)

    def leave(self, reason: str) -> None:
        """This node goes away on purpose (a signal): the others needn't wait for its heartbeat."""
        self._leaving = True
        self._submit(lambda me: replace(me, state="left", reason=reason))

    def wait_left(self, timeout_s: float) -> bool:
        """Whether everything reported so far reached the store within ``timeout_s`` seconds. Not
        waited for where the others cannot know of this node yet."""
        if self._leaving and not self._known:
            return False
        done = threading.Event()

        def mark(me: Member) -> Member:
            done.set()
            return me

        self._submit(mark)
        return done.wait(timeout_s)

    def report_fault(self, what: str) -> None:
        """A worker of this node died of what may be the node's own fault."""

        def tell(me: Member) -> Member:
            timing = self._timing
            book = CordonBook(self._kv, PREFIX)
            why = book.note_fault(me.addr, what, timing.cordon_after, timing.cordon_window)
            if why is not None:
                self._emit(
                    Waiting(
                        f"this node ({me.addr}) is cordoned: {why}; from the next round on it gets"
                        " no ranks while there are other nodes (flashrun uncordon)"
                    )
                )
            return me

        if not self._alone:
            self._submit(tell)

    def report_lost(self, node: str, why: str) -> None:
        """Another node is known to be lost; its heartbeat need not be waited for."""

        def tell(me: Member) -> Member:
            found = [m for m in self._members() if m.node == node]
            for member in found:
                self._kv.put(f"{PREFIX}lost/{member.order}", why.encode())
                self._kv.increment(f"{PREFIX}losses")
                for counter in ("revision", "news"):  # it may be who leads
                    self._kv.increment(f"{PREFIX}{counter}")
            return me

        self._submit(tell)

    def report_quiet(self, round_: int, joins: int | None) -> None:
        """Whether a recovery is under way: no, in the table of ``round_`` in which other nodes have
        taken ``joins`` places; None: yes. (Growth waits for it to end.)"""

        def tell(me: Member) -> Member:
            said = "busy" if joins is None else quiet_text(round_, joins)
            self._kv.put(f"{PREFIX}quiet", said.encode())
            if joins is not None:
                self._kv.increment(f"{PREFIX}revision")
            return me

        if self._membership.job.grow == "restart" and not self._alone:
            self._submit(tell)

    def _members(self) -> list[Member]:
        return [] if self._controller is None else self._controller.members()

    def _report(
        self, state: str, round_: int, failures: Sequence[Failure] = (), reason: str = ""
    ) -> None:
        def change(me: Member) -> Member:
            if round_ < me.round or me.state == "left":
                return me  # a late report about a round that is over
            known = me.failures if me.round == round_ else ()
            kept = merge_failures(known, failures)
            if me.round == round_ and me.state == "failed" and state == "failed":
                return replace(me, failures=kept)  # more of them, or a duplicate after a re-fork
            if me.round == round_ and me.state in ("stopped", "failed") and state != "stopped":
                return me
            return replace(me, state=state, round=round_, failures=kept, reason=reason)  # type: ignore[arg-type]

        self._submit(change)

    def _submit(self, change: Callable[[Member], Member]) -> None:
        self._reports.put(change)
        self._news.set()

    # --- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._opener = self._make_opener()
            while True:
                self._join()
                if self._work() == "over":
                    break
            self._opener.close()
        except Cancelled:
            return
        except (
            RefusedError, StoreInUse, StoreNotBound, NotAStore, EndpointError, StoreRefused
        ) as error:
            self._emit(Refused(str(error)))
        except LeaseLost as error:
            self._emit(Lost(f"The job that this node belonged to is over: {error}"))
        except (StoreLost, ConnectTimeout) as error:
            self._emit(Lost(str(error)))
        except Exception as error:  # a bug must end the job visibly, not hang it
            self._emit(Lost(f"internal error in the coordinator: {type(error).__name__}: {error}"))
            raise
        finally:
            atexit.unregister(self.close)
            # The connections end with the thread, not with the last reference to this object.
            for name in ("_opener", "_kv", "_book", "_controller"):
                self.__dict__.pop(name, None)

    def _emit(self, event: Event) -> None:
        with self._emitting:
            if self._closed.is_set():
                return
            self.events.put(event)
            if self._fence is not None and isinstance(event, (Finish, Refused)):
                self._fence.close()
            if isinstance(event, Lost) and event.at_once:
                self.close()  # this node has no part in the job any more
        self._wake()

    def _be_fenced(self, at: Connected, sent: float | None) -> None:
        """From now on have the workers stand still when this node is cut off. (Its last heartbeat
        was answered when it was ``sent``; None: by the agent before this one.)"""
        self._fence = fence_of(
            self._membership, at, self._peers, self._emit, self._answered, self._paused
        )
        if self._fence is not None:
            self._fence.start(sent)

    def _peers(self) -> list[NodeRanks]:
        nodes = [] if self._table is None else self._table.nodes
        return [node for node in nodes if node.node != self._node.node_id]

    def _make_opener(self) -> Opener:
        if self._membership.etcd is not None:
            return EtcdOpener(
                self._membership,
                self._node,
                host_store=self._host_store,
                resume=self._resume,
                say=lambda line: self._emit(Waiting(line)),
                patience=self._patience(self._membership.etcd.where),
            )
        if self._membership.handler is None:
            return StoreOpener(
                self._membership,
                self._node,
                host_store=self._host_store,
                resume=self._resume,
                cancel=self._closed,
                waiting=self._say_waiting,
            )
        if self._resume is not None:
            raise StoreLost(
                f"The rendezvous backend '{self._membership.handler.backend}' can't take an agent "
                "back that was killed. Start the job again, or use the c10d or static backend."
            )
        return HandlerOpener(self._membership, self._node)

    def _patience(self, where: str) -> Patience:
        def awaited() -> bool:
            me = self.__dict__.get("_me")
            return (self._resume is None and me is None) or not (
                self._reports.empty() and (me is None or me.state == "running")
            )

        return Patience(
            where,
            self._timing,
            cancel=self._closed,
            say=lambda line: self._emit(Waiting(line)),
            awaited=awaited,
            paused=lambda: self._fence is not None and self._fence.paused,
        )

    def _join(self) -> None:
        opened = self._opener.open()
        met, self._known = self._known, True
        if self._leaving and not met:  # nobody waits for what would be told
            self._opener.leave()
            raise Cancelled
        self._kv = opened.kv
        self._book = PlanBook(opened.kv, PREFIX)
        self._membership = opened.membership
        self._alone = opened.membership.alone
        self._agree()
        if self._resume is not None:
            self._connected = self._resume
            record = self._kv.get(f"{PREFIX}node/{self._resume.order}")
            if record is None:
                raise StoreLost(
                    f"The store at {opened.host}:{opened.port} has no record of this node: it is "
                    "another store than before. Start the job again."
                )
            self._me = member_from_json(record)
        else:
            order = self._kv.increment(f"{PREFIX}count")
            self._connected = Connected(
                opened.host, opened.port, opened.hosting, order, opened.folder
            )
            self._me = Member(
                node=self._node.node_id,
                order=order,
                slots=self._node.slots,
                role=self._node.role,
                addr=opened.node_addr,
                node_rank=opened.node_rank,
                host=opened.hosting,
                base_round=self._base_round,
                base_restarts=self._base_restarts,
                port=self._opener.workers_port(),
                alive=self._port_of(self._doorbell, opened.node_addr),
                shard=self._port_of(self._shard, opened.node_addr),
            )
        began = time.monotonic()
        self._beat()
        if self._fence is None:
            self._be_fenced(self._connected, began)
        self._write_me()
        self._emit(self._connected)
        self._resume_round()

    def _port_of(self, opened: Callable[[str], int] | None, addr: str) -> int:
        """What this node serves to the others."""
        if opened is None or self._alone:
            return 0
        return opened(listen_address(addr, several_nodes=True))

    def _agree(self) -> None:
        """Write the job's terms, or compare ours with those that are there.

        Raises RefusedError with what differs.
        """
        mine = self._membership.job
        key = f"{PREFIX}job"
        if self._kv.compare_and_swap(key, None, job_to_json(mine)):
            return
        data = self._kv.get(key)
        if data is None:
            raise StoreLost("the store lost the terms of the job")
        theirs = job_from_json(data)
        where = self._membership.endpoint.text
        if theirs.run_id != mine.run_id:
            raise RefusedError(
                f"The endpoint {where} already serves job '{theirs.run_id}', and this is job "
                f"'{mine.run_id}'. Give this job an endpoint of its own, or the same --rdzv-id if "
                "it is meant to be one job."
            )
        differences = theirs.differences(mine)
        if differences:
            raise RefusedError(
                f"This agent does not fit job '{theirs.run_id}' at {where}: "
                + "; ".join(differences)
                + ". Start all nodes with the same flags and versions (or give a second job an "
                "endpoint of its own)."
            )

    def _resume_round(self) -> None:
        """After a re-fork: tell the agent of the round that it was in."""
        if self._resume is None or self._me.state not in ("running", "failed", "succeeded"):
            return
        plan = self._book.read()
        if plan.table is not None and plan.round == self._me.round:
            self._table = plan.table
            self._emit(Start(plan.table, resumed=True))
            self._follow_table(plan)  # the agent knows whether it is news

    def _work(self) -> str:
        """Until the job is ``over`` here, or the handler is to bring nodes together ``again``."""
        self._controller = Controller(
            self._kv, self._membership, self._connected, PREFIX, self._book, self._opener.knocking
        )
        self._seen = {}
        self._listens = self._opener.listen(f"{PREFIX}news", self._news.set)
        self._listens_to_all = False
        changed = True
        while not self._closed.is_set():
            self._opener.look_after()
            changed = self._take_reports() or changed
            now = time.monotonic()
            if now >= self._beat_due and not self._alone:
                self._beat()
            if self._fence is not None and self._fence.paused:
                self._beat()
                come_back(self._fence, self._kv, self._book, self._me)
            changed = self._look(now) or changed
            acted = self._controller.act(now, changed)
            if changed or acted:
                if outcome := self._follow():
                    return outcome
                # What was just done may call for more; only without news there is a wait.
                changed = acted or self._me_changed
                if changed:
                    continue
            self._tell_waiting(now)
            self._sleep()
            changed = False
        return "over"

    def _sleep(self) -> None:
        """Until there is news: a local report at once, others' by polling; alone, timers only."""
        assert self._controller is not None
        timeout: float | None = self._poll
        if self._listens:  # the leader's heartbeat is to be looked at, all else is told
            timeout = min(_LOOK_S, self._timing.heartbeat_interval / 4)
        if self._alone:
            timeout = self._controller.next_timer(time.monotonic())
        self._news.wait(timeout)
        self._news.clear()

    @property
    def _poll(self) -> float:
        """Seconds; longer where many nodes ask the one store."""
        return self._timing.poll * max(1.0, self._membership.job.max_nodes / _MANY_NODES)

    def _take_reports(self) -> bool:
        changed = False
        while True:
            try:
                change = self._reports.get_nowait()
            except queue.Empty:
                return changed
            updated = change(self._me)
            if updated != self._me:
                self._me = updated
                self._write_me()
                changed = True
                if updated.state == "left":
                    self._opener.leave()

    def _look(self, now: float) -> bool:
        """One small read: is there a plan, or another leader? Who leads looks at what nodes write,
        too. Now and then another: does the leader live?"""
        assert self._controller is not None
        if self._alone:
            return False
        names = ["news"]
        if self._controller.leads:
            names.append("revision")
            if self._listens and not self._listens_to_all:
                self._listens_to_all = self._opener.listen(f"{PREFIX}revision", self._news.set)
        seen = {name: self._kv.counter(f"{PREFIX}{name}") for name in names}
        changed = seen != self._seen
        self._seen = seen
        return self._controller.replaced_leader(now, changed) or changed

    def _follow(self) -> str:
        """Do what the plan asks of this node; says how ``_work`` ends, empty when it doesn't."""
        plan = self._book.read()
        self._me_changed = False
        todo = react(plan, self._me, self._stop_sent)
        if todo.kind == "start":
            assert plan.table is not None
            self._change_me(state="running", round=plan.round, failures=(), reason="")
            # It may have been told to stop in this round, when it was taken for lost.
            self._stop_sent = min(self._stop_sent, plan.round - 1)
            self._table = plan.table
            self._emit(Start(plan.table))
            self._joins = plan.table.joins
        elif todo.kind == "stop":
            self._stop_sent = todo.round
            self._emit(Stop(todo.round, todo.reason, plan.restart, plan.growth, todo.at_once))
        elif todo.kind == "acknowledge":
            self._change_me(state="stopped", round=plan.round, failures=(), reason="")
        elif todo.kind == "rejoin":
            if self._membership.handler is not None:
                self._base_round, self._base_restarts = plan.round, plan.restart_count
                return "again"
            lost = f"{PREFIX}lost/{self._me.order}"
            if self._kv.get(lost) is not None:  # it is not, after all
                self._kv.delete(lost)
                self._kv.increment(f"{PREFIX}losses")
            port = self._opener.workers_port()
            self._change_me(state="waiting", failures=(), reason="", port=port)
        elif todo.kind == "refused":
            self._change_me(state="left", reason="refused")  # nobody needs to wait for it
            self._emit(Refused(todo.reason))
            return "over"
        elif todo.kind == "finish":
            self._change_me(done=True)
            self._let_others_read()
            self._opener.leave()
            self._emit(Finish(plan.success, plan.failures, plan.reason))
            return "over"
        else:
            self._follow_table(plan)
            if plan.phase == "running" and self._me.state == "waiting" and not self._spare_said:
                # What it has said that it waits for is here.
                self._waiting_due = min(self._waiting_due, time.monotonic())
        return ""

    def _follow_table(self, plan: Plan) -> None:
        table = plan.table
        mine = table is not None and table.of(self._me.node) and self._me.round == plan.round
        if table is not None and mine and plan.phase == "running" and table.joins > self._joins:
            self._table, self._joins = table, table.joins
            self._emit(Reseat(table))

    def _let_others_read(self) -> None:
        """The store ends with the node that hosts it: the others read the verdict first."""
        if self._alone or not self._connected.hosting:
            return
        assert self._controller is not None
        deadline = time.monotonic() + self._timing.verdict_grace
        while not self._closed.is_set():
            now = time.monotonic()
            if now >= self._beat_due:
                self._beat()
            unread = self._controller.unread(now)
            if not unread:
                return
            if now >= deadline:
                self._emit(Waiting(f"{', '.join(unread)} did not read the verdict in time"))
                return
            self._closed.wait(self._poll / 4)

    _me_changed = False

    def _change_me(self, **fields: object) -> None:
        self._me = replace(self._me, **fields)  # type: ignore[arg-type]
        self._me_changed = True
        self._write_me()

    def _write_me(self) -> None:
        self._kv.put(f"{PREFIX}node/{self._me.order}", member_to_json(self._me))
        self._kv.increment(f"{PREFIX}revision")
        self._opener.show(self._me)

    def _beat(self) -> None:
        sent = time.monotonic()
        self._beats = self._kv.increment(f"{PREFIX}beat/{self._connected.order}")
        if self._fence is not None:
            self._fence.answered(sent)
        self._beat_due = time.monotonic() + self._timing.heartbeat_interval

    def _tell_waiting(self, now: float) -> None:
        assert self._controller is not None
        if self._me.state != "waiting":
            if missing := self._controller.spare_missing:
                self._say_waiting(missing)
            return
        if now < self._waiting_due:
            return
        if self._waiting_due:
            data = self._kv.get(f"{PREFIX}missing")
            missing = str(json.loads(data)) if data is not None else ""
            job = self._membership.job
            cordon = CordonBook(self._kv, PREFIX).read().get(self._me.addr)
            if cordon is not None:
                missing = missing or f"job '{job.run_id}' runs; this node waits"
                missing += f" (it is cordoned: {cordon.reason})"
            if self._membership.spares and not missing:
                self._say_spare(job.run_id)
                return
            self._say_waiting(
                missing
                or f"job '{job.run_id}' at {self._membership.endpoint.text} runs; this node waits "
                f"for a place (a second job needs its own --rdzv-endpoint and --rdzv-id)"
            )
            return
        self._waiting_due = now + min(5.0, self._timing.waiting_line)

    def _say_spare(self, run_id: str) -> None:
        """Once: it has nothing to wait for."""
        if not self._spare_said:
            self._spare_said = True
            self._emit(
                Waiting(f"job '{run_id}' runs; this node is a spare and takes a lost one's place")
            )

    def _say_waiting(self, text: str) -> None:
        now = time.monotonic()
        if now >= self._waiting_due:
            self._waiting_due = now + self._timing.waiting_line
            self._emit(Waiting(text))
