"""The workers of one round on this node: how they are started, followed, stopped and reported.

The agent owns one of these at a time. It holds no process itself: it asks the supervisor through
the wire, and can be rebuilt from :meth:`state` by the next agent.
"""

from __future__ import annotations

import ast
import json
import os
import signal
from collections.abc import Callable, Container, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import LogsDest

from flashrun.job import Job
from flashrun.node import stderr_tail, tags
from flashrun.node.elastic_events import WorkerFacts
from flashrun.node.failure_report import Failure, describe_failure
from flashrun.node.log_tee import LogTee, Sink, Tail
from flashrun.node.orphanage import Orphanage
from flashrun.node.process_tree import KILL_PATIENCE, TAG_VARIABLE, sweep
from flashrun.node.wire import Wire
from flashrun.node.worker_env import line_prefix, worker_command, worker_environment
from flashrun.node.worker_process import WorkerSpec
from flashrun.observe.console import say
from flashrun.rendezvous.table import NodeRanks, RankTable

_TAIL_LINES = 12


@dataclass
class Member:
    """One worker of the group.

    Attributes:
        pid: None until the zygote has answered.
        code: exit code, negative for a signal; None while it runs.
        asked: a stop signal was sent before it ended, so its end is not a failure.
        incarnation: which process in a row serves the rank.
        extra: variables of flashrun itself for this process.
    """

    id: str
    local_rank: int
    tag: str
    pid: int | None = None
    code: int | None = None
    asked: bool = False
    error: str = ""
    incarnation: int = 0
    extra: dict[str, str] = field(default_factory=dict)


@dataclass
class GroupState:
    """What the next agent needs to go on with a group. JSON types only."""

    table: dict[str, Any]
    node: str
    members: list[dict[str, Any]]
    logs: dict[str, Any]
    run_log_dir: str | None = None
    plain: bool = False
    reified: dict[str, dict[str, str]] = field(default_factory=dict)


def relays_stderr(plain: bool) -> bool:
    """Whether the workers' standard error takes the way through a file, so that the last lines of
    one are known whoever wrote them (abort, faulthandler, a child of it).

    Not on a terminal, whose users would lose isatty(), nor where nobody reads it. Nor where it goes
    to the same place as standard output, since the two would not come in the order in which they
    were written; a worker that is a fork of ours notes itself there what Python writes.

    Args:
        plain: workers are fresh processes.
    """
    out, err = os.fstat(1), os.fstat(2)
    if os.isatty(2) or os.path.samestat(err, os.stat(os.devnull)):
        return False
    return plain or (out.st_dev, out.st_ino) != (err.st_dev, err.st_ino)


def wants_logs(job: Job, run_log_dir: str | None, envs: dict[int, dict[str, str]]) -> LogsDest:
    """Ask the job's LogsSpecs for files; sets TORCHELASTIC_ERROR_FILE in ``envs``.

    ``DefaultLogsSpecs.reify`` empties the folder of the attempt, which holds logs when the round
    before it ended without counting as an attempt; that folder is moved aside first.
    """
    specs: Any = job.launch.logs_specs
    if run_log_dir is not None and hasattr(specs, "_run_log_dir"):
        specs._run_log_dir = run_log_dir
    known = getattr(specs, "_run_log_dir", None)
    if known:
        attempt = os.path.join(known, f"attempt_{envs[0]['TORCHELASTIC_RESTART_COUNT']}")
        number = 1
        while os.path.isdir(attempt) and os.path.exists(f"{attempt}.{number}"):
            number += 1
        if os.path.isdir(attempt):
            os.rename(attempt, f"{attempt}.{number}")
    destination: LogsDest = specs.reify(envs)
    return destination


class WorkerGroup:
    """See the module.

    Args:
        job: what runs.
        table: the round.
        node: this node's part of it.
        plain: workers are fresh processes.
        run_dir: private folder of the job on this node.
        wire: to the supervisor.
        tee: shows log files.
        orphanage: where daemons end up.
    """

    def __init__(
        self,
        job: Job,
        table: RankTable,
        node: NodeRanks,
        plain: bool,
        run_dir: str,
        wire: Wire,
        tee: LogTee,
        orphanage: Orphanage,
    ) -> None:
        self.job = job
        self.table = table
        self.node = node
        self.members: dict[str, Member] = {}
        self._plain = plain
        self._relayed = relays_stderr(plain)  # the same for every agent of the job
        self._run_dir = run_dir
        self._wire = wire
        self._tee = tee
        self._orphanage = orphanage
        self._reified: dict[int, dict[str, str]] = {}  # what the LogsSpecs set, by local rank
        self._logs = LogsDest()
        self._run_log_dir: str | None = None
        self._tag = os.environ[TAG_VARIABLE]
        self._filtered: list[int] = []
        self._replaced: list[str] = []  # ids of incarnations that are over
        self._stuck: set[int] = set()  # pids that cannot be killed: named, and not waited for again

    # -- start -----------------------------------------------------------------------------------

    def prepare(self, run_log_dir: str | None, extra_env: Mapping[str, str]) -> None:
        """Make the log folders and begin to show what will be written there.

        Args:
            run_log_dir: folder of the job's logs, once there is one.
            extra_env: variables of flashrun itself, the same for each worker.

        Raises:
            ValueError: the environment cannot be made (see worker_env).
        """
        plain, given = self._environments(), self._environments()
        self._logs = wants_logs(self.job, run_log_dir, given)
        self._reified = {
            rank: {name: value for name, value in env.items() if plain[rank].get(name) != value}
            for rank, env in given.items()
        }
        self._run_log_dir = getattr(self.job.launch.logs_specs, "_run_log_dir", None)
        # In a lost node's place, the processes are those that its recovery asks for (`replace`).
        for rank in range(self.node.slots if not self.node.instead else 0):
            id_ = f"r{self.table.round}.{rank}.0"
            tag = tags.of_worker(self._tag, rank, self.table.round, 0)
            self.members[id_] = Member(id_, rank, tag, extra=dict(extra_env))
        self._follow(fresh=True)

    def replace(self, rank: int, incarnation: int, extra_env: Mapping[str, str]) -> None:
        """Put the next process of a local rank into the place of the one before it, of which
        nothing is left afterwards; :meth:`spawn` asks for it."""
        old = next((m for m in self.members.values() if m.local_rank == rank), None)
        if old is not None:
            self._remove(old)
        Path(self._private("record", rank)).unlink(missing_ok=True)
        id_ = f"r{self.table.round}.{rank}.{incarnation}"
        tag = tags.of_worker(self._tag, rank, self.table.round, incarnation)
        self.members[id_] = Member(
            id_, rank, tag, incarnation=incarnation, extra=dict(extra_env)
        )

    def _remove(self, old: Member) -> None:
        leaders = [old.pid] if old.pid is not None else []
        left = sweep(lambda tag: tag == old.tag, [os.getpid()], KILL_PATIENCE, leaders)
        others = [m.local_rank for m in self.running if m is not old]
        # Where nobody else runs, every daemon that cleared its environment was this rank's.
        left |= self._orphanage.sweep(left, self._files_of(old.local_rank) if others else None)
        for pid in sorted(left):
            say(f"process {pid} of rank {self.rank_of(old)} cannot be killed", "error",
                event="unkillable", pid=pid)  # fmt: skip
        known = [path for rank in others for path in self._files_of(rank)]
        for pid in sorted(self._orphanage.present(left, but=known)):
            say(f"process {pid} has left its rank and emptied its environment, so nobody can tell"
                f" whether it was rank {self.rank_of(old)}'s; it is left until the job ends",
                "warning", event="nobodys-process", pid=pid)  # fmt: skip
        # The supervisor keeps its exit to the end of the round: an agent that dies before it has
        # saved this replacement leaves the old one in its place.
        del self.members[old.id]
        self._replaced.append(old.id)

    def spawn(self, but: Container[str]) -> None:
        """Ask for the workers that have not been started.

        Args:
            but: ids of those that have been asked for.
        """
        environments = self._environments()
        for member in self.running:
            if member.pid is None and member.id not in but:
                spec = self._spec(member, environments[member.local_rank])
                self._wire.send({"op": "spawn", "workers": [asdict(spec)]})

    def _environments(self) -> dict[int, dict[str, str]]:
        return {
            rank: {
                **worker_environment(self.job, self.table, self.node, rank, os.environ),
                **self._reified.get(rank, {}),
            }
            for rank in range(self.node.slots)
        }

    def _spec(self, member: Member, env: Mapping[str, str]) -> WorkerSpec:
        rank = member.local_rank
        stderr = self._logs.stderrs[rank]
        if self._relayed and not stderr:
            stderr = self._relay_path(rank)
        return WorkerSpec(
            id=member.id,
            environ={**env, **member.extra, TAG_VARIABLE: member.tag},
            stdout=self._logs.stdouts[rank],
            stderr=stderr,
            append=member.incarnation > 0,
            record=self._private("record", rank),
            tail="" if self._plain or stderr else self._private("tail", rank),
            tag=member.tag,
            plain=self._plain,
            local_rank=rank,
            command=worker_command(self.job, rank),
        )

    def _private(self, what: str, rank: int) -> str:
        return os.path.join(self._run_dir, f"{what}.{self.table.round}.{rank}")

    def _files_of(self, rank: int) -> list[str]:
        """Which a process has open if it is of this local rank, and did not close what it inherited
        (nor was given other streams)."""
        paths = [self._logs.stdouts[rank], self._logs.stderrs[rank], self._relay_path(rank)]
        return [path for path in paths if path and path != os.devnull]

    def _relay_path(self, rank: int) -> str:
        return self._private("stderr", rank)

    # -- output ----------------------------------------------------------------------------------

    def _follow(self, fresh: bool) -> None:
        """Show the files that are tee'd, and the filtered copies."""
        out, err = self._tee.out, self._tee.err
        logs = self._logs
        tails: list[Tail] = []
        streams: tuple[tuple[dict[int, str], Sink, list[str] | None, str, str], ...] = (
            (logs.tee_stdouts, out, self.job.launch.duplicate_stdout_filters,
             logs.filtered_stdout, "out"),
            (logs.tee_stderrs, err, self.job.launch.duplicate_stderr_filters,
             logs.filtered_stderr, "err"),
        )  # fmt: skip
        for files, sink, needles, filtered, name in streams:
            # An empty one too where nothing is tee'd, as torchrun makes it.
            copy = self._open_filtered(filtered, fresh) if needles and filtered else None
            for rank, path in files.items():
                if path == os.devnull:
                    continue
                header = self._header(rank)
                offset = self._private(f"offset-{name}", rank)
                tails.append(Tail(path, header, sink, lambda line: True, offset))
                if copy is not None:
                    keep = _matching(needles or [])
                    tails.append(Tail(path, header, copy, keep, f"{offset}-copy"))
        if self._relayed:
            tails += [
                Tail(self._relay_path(rank), b"", err, lambda line: True,
                     self._private("offset-relay", rank), raw=True)
                for rank in range(self.node.slots)
                if not logs.stderrs[rank]
            ]  # fmt: skip
        self._tee.follow(tails)

    def _open_filtered(self, path: str, fresh: bool) -> Sink:
        how = os.O_TRUNC if fresh else os.O_APPEND
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | how, 0o666)
        self._filtered.append(fd)
        return Sink(fd)

    def _header(self, rank: int) -> bytes:
        launch = self.job.launch
        text = line_prefix(
            launch.log_line_prefix_template, launch.role, self.node.base_rank + rank, rank
        )
        return text.encode()

    def finish_output(self) -> None:
        """Show what is left in the files; the group is over."""
        self._tee.finish()
        for fd in self._filtered:
            os.close(fd)
        self._filtered.clear()

    # -- what happens ----------------------------------------------------------------------------

    def on_spawned(self, id_: str, pid: int) -> None:
        if id_ in self.members:
            self.members[id_].pid = pid

    def on_spawn_failed(self, id_: str, error: str) -> None:
        if id_ in self.members:
            self.members[id_].code = 1
            self.members[id_].error = f"the worker could not be started: {error}"

    def on_exited(self, id_: str, code: int) -> None:
        member = self.members.get(id_)
        if member is None or member.code is not None:
            return
        member.code = code
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        rank = self.rank_of(member)
        level = "debug" if code == 0 or member.asked else "error"
        say(
            f"rank {rank} (local rank {member.local_rank}, pid {member.pid}) ended: {how}",
            level,
            event="worker-exited",
            rank=rank,
            local_rank=member.local_rank,
            pid=member.pid,
            exitcode=code,
            asked=member.asked,
        )

    def rank_of(self, member: Member) -> int:
        """In the job."""
        return self.node.base_rank + member.local_rank

    def member_of(self, rank: int) -> Member:
        """The present process of a rank of the job that this node has."""
        return next(m for m in self.members.values() if self.rank_of(m) == rank)

    @property
    def complete(self) -> bool:
        """Every rank has, or had, a process here; not before the recovery of a lost node's ranks
        has asked for them."""
        return len(self.members) == self.node.slots

    @property
    def running(self) -> list[Member]:
        return [m for m in self.members.values() if m.code is None]

    @property
    def succeeded(self) -> bool:
        return all(m.code == 0 for m in self.members.values())

    @property
    def failed(self) -> list[Member]:
        """Members that failed by themselves, not because they were asked to stop."""
        return [m for m in self.members.values() if m.code not in (None, 0) and not m.asked]

    def facts_of(self, member: Member) -> dict[str, Any]:
        """What a worker noted about its own failure."""
        path = self._private("record", member.local_rank)
        try:
            with open(path, encoding="utf-8") as file:
                facts: dict[str, Any] = ast.literal_eval(file.read())
        except FileNotFoundError:
            return {}
        return facts

    def failures(self, host: str) -> list[Failure]:
        """Each failed member, for the report and the controller."""
        return [
            describe_failure(
                rank=self.rank_of(m),
                local_rank=m.local_rank,
                pid=m.pid or 0,
                exitcode=m.code or 1,
                error_file=self._logs.error_files.get(m.local_rank, ""),
                host=host,
                facts=self.facts_of(m),
                tail=[m.error] if m.error else self._last_lines(m.local_rank),
            )
            for m in self.failed
        ]

    def _last_lines(self, rank: int) -> list[str]:
        path = self._logs.stderrs[rank]
        if path == os.devnull:
            return []
        if not path and not self._relayed and not self._plain:
            return stderr_tail.last_lines(
                stderr_tail.read(self._private("tail", rank)), _TAIL_LINES
            )
        try:
            with open(path or self._relay_path(rank), "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - (16 << 10)))
                return stderr_tail.last_lines(file.read().decode(errors="replace"), _TAIL_LINES)
        except FileNotFoundError:
            return []

    def facts(self) -> list[WorkerFacts]:
        """For events."""
        return [
            WorkerFacts(
                rank=self.rank_of(m),
                local_rank=m.local_rank,
                role_rank=self.node.base_role_rank + m.local_rank,
                role_world_size=self.node.role_world_size,
                pid=m.pid,
            )
            for m in self.members.values()
        ]

    # -- stop ------------------------------------------------------------------------------------

    def ask_to_stop(self, number: int) -> list[tuple[str, int]]:
        """The signals that ask each rank's own process; its children are its own business yet."""
        running = self.running
        for member in running:
            member.asked = True
        return [(member.id, number) for member in running]

    def kill(self) -> list[tuple[str, int]]:
        """The signals that end every member that has not ended; its tree is swept up after it."""
        running = self.running
        for member in running:
            member.asked = True
            say(
                f"local rank {member.local_rank} (pid {member.pid}) did not stop in time; killing"
                " it and its children",
                "warning",
                event="worker-killed",
                local_rank=member.local_rank,
                pid=member.pid,
            )
        return [(member.id, int(signal.SIGKILL)) for member in running]

    def give_up(self) -> None:
        """Go on without the members that SIGKILL has not ended; each is named."""
        for member in self.running:
            say(
                f"local rank {member.local_rank} (pid {member.pid}) cannot be killed (stuck in the"
                " kernel?); going on without it",
                "error",
                event="unkillable",
                pid=member.pid,
            )
            member.code = -int(signal.SIGKILL)
            if member.pid is not None:
                self._stuck.add(member.pid)

    def sweep_remnants(self) -> None:
        """Kill what the members left behind (DataLoader workers, helpers they started)."""
        mine = {m.tag for m in self.members.values()}
        leaders = [m.pid for m in self.members.values() if m.pid is not None]
        keep = [os.getpid(), *self._stuck]
        left = sweep(lambda tag: tag in mine, keep, KILL_PATIENCE, leaders)
        left |= self._orphanage.sweep(self._stuck | left)
        for pid in sorted(left - self._stuck):
            say(f"process {pid} of this job cannot be killed; it is left behind", "error",
                event="unkillable", pid=pid)  # fmt: skip
        self._stuck |= left

    def forget(self) -> None:
        """The next round's workers have taken over; the supervisor need not keep these exits."""
        self._wire.send({"op": "forget", "ids": [*self.members, *self._replaced]})

    # -- another agent ---------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return asdict(
            GroupState(
                table=json.loads(self.table.to_json()),
                node=self.node.node,
                members=[asdict(m) for m in self.members.values()],
                logs=_logs_to_json(self._logs),
                run_log_dir=self._run_log_dir,
                plain=self._plain,
                reified={str(rank): env for rank, env in self._reified.items()},
            )
        )

    @classmethod
    def adopt(
        cls,
        job: Job,
        state: Mapping[str, Any],
        run_dir: str,
        wire: Wire,
        tee: LogTee,
        orphanage: Orphanage,
    ) -> WorkerGroup:
        """Go on with the group of an agent that died; ``state`` is from :meth:`state`."""
        saved = GroupState(**state)
        table = RankTable.from_dict(saved.table)
        node = table.of(saved.node)
        if node is None:
            raise ValueError(f"the saved round {table.round} has no node {saved.node}")
        group = cls(job, table, node, saved.plain, run_dir, wire, tee, orphanage)
        group.members = {m["id"]: Member(**m) for m in saved.members}
        group._logs = _logs_from_json(saved.logs)
        group._run_log_dir = saved.run_log_dir
        group._reified = {int(rank): env for rank, env in saved.reified.items()}
        group._follow(fresh=False)
        return group

    @property
    def run_log_dir(self) -> str | None:
        return self._run_log_dir


def _matching(needles: list[str]) -> Callable[[bytes], bool]:
    encoded = [needle.encode() for needle in needles]
    return lambda line: any(needle in line for needle in encoded)


_PER_RANK = ("stdouts", "stderrs", "tee_stdouts", "tee_stderrs", "error_files")


def _logs_to_json(logs: LogsDest) -> dict[str, Any]:
    return asdict(logs)


def _logs_from_json(data: Mapping[str, Any]) -> LogsDest:
    fields = dict(data)
    for name in _PER_RANK:  # JSON has made the ranks into strings
        fields[name] = {int(rank): path for rank, path in fields[name].items()}
    return LogsDest(**fields)

