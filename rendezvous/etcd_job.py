"""Where a job is in an etcd cluster, which outlives its jobs.

Under ``/flashrun/<run id>/``:

======================  =================================================================
``job``                 ``<name>.<lease>``: the job that goes by this run id now
``agents/<name>/<id>``  a node of it that lives, and what it is; goes `ALIVE_S` after it has died
======================  =================================================================

and everything else of that job under ``/flashrun/<run id>/<name>/``. All of it has one lease, which
all its agents keep alive: the last one to leave ends it, and an hour after the last one has died it
is over. So a run id can be used again at once, and no job meets what is another's.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Literal

from flashrun.rendezvous.etcd_config import EtcdConfig
from flashrun.rendezvous.etcd_store import EtcdStore
from flashrun.rendezvous.kv import ControlStore, LeaseLost, Put, StoreLost, StoreRefused
from flashrun.rendezvous.lease import Lease

ALIVE_S = 10.0
KEPT_S = 3600.0
_JOB = "job"
_NOTHING_YET = b"{}"  # is known of a node that has just come
_DOUBT_S = 1.5 * ALIVE_S

Look = Callable[[ControlStore], Literal["over", "doubtful", "lives"]]
"""What the keys of a job say of it. Doubtful: it runs, by its keys, but none of its nodes answers;
then its agents are given the time that a dead one's key has."""


class Replaced(RuntimeError):
    """Another job goes by the run id now; the message says how that came and what to do."""


class JobFolder:
    """A job's folder as one agent sees it; see `find` and `resume`.

    Attributes:
        name: of the job, with its lease; for `resume`.
        store: its keys.
    """

    def __init__(self, base: EtcdStore, name: str, kept: Lease, alive: Lease, me: str) -> None:
        self._base = base
        self.name = name
        self._kept = kept
        self._alive = alive
        self._me = f"{agents_of(name)}{me}"
        self._shown = _NOTHING_YET
        self.store = base.under(name.partition(".")[0], kept)

    @classmethod
    def find(
        cls, base: EtcdStore, me: str, look: Look, report: Callable[[str], None]
    ) -> JobFolder:
        """The folder of the job that goes by the run id; of a new one where there is none, or
        where that one is over.

        Args:
            me: id of this node.
            report: takes a line for a person.
        """
        deadline: float | None = None
        while True:
            value = base.get(_JOB)
            if value is not None:
                name = value.decode()
                kept = base.share_lease(name.partition(".")[2])
                if kept is not None and _agents(base, name):
                    state = look(base.under(name.partition(".")[0], kept))
                    if state == "doubtful":
                        if deadline is None:
                            deadline = time.monotonic() + _DOUBT_S
                            report(
                                f"no node of the job that ran at {base.where} answers; waiting up "
                                f"to {_DOUBT_S:g} s to see whether it lives"
                            )
                        left = deadline - time.monotonic()
                        if left > 0:
                            _await_end(base, name, left)
                            kept.abandon()
                            continue
                    if state != "over":
                        folder = cls._enter(base, me, name, kept)
                        if folder is not None:
                            return folder
                        continue
                    kept.abandon()  # its agents are on their way, the last one ends it
                elif kept is not None:
                    kept.revoke()  # all that it has left
            folder = cls._make(base, me, value)
            if folder is not None:
                return folder

    @classmethod
    def resume(cls, base: EtcdStore, me: str, name: str) -> JobFolder:
        """For the agent that follows one that died.

        Raises:
            Replaced: the job is over.
        """
        kept = base.share_lease(name.partition(".")[2])
        folder = None if kept is None else cls._enter(base, me, name, kept)
        if folder is None:
            raise _replaced(base)
        return folder

    @classmethod
    def _enter(cls, base: EtcdStore, me: str, name: str, kept: Lease) -> JobFolder | None:
        folder = cls(base, name, kept, base.lease(ALIVE_S), me)
        shown = base.transaction({_JOB: name.encode()}, [folder._sign(folder._alive)])
        if not shown:
            folder._alive.revoke()
        return folder if shown else None

    @classmethod
    def _make(cls, base: EtcdStore, me: str, before: bytes | None) -> JobFolder | None:
        kept, alive = base.lease(KEPT_S), base.lease(ALIVE_S)
        name = f"{uuid.uuid4().hex[:12]}.{kept.id}"
        folder = cls(base, name, kept, alive, me)
        puts = [Put(_JOB, name.encode(), kept), folder._sign(alive)]
        expected = None if base.get(_JOB) is None else before  # it may have gone with its lease
        if base.transaction({_JOB: expected}, puts):
            return folder
        kept.revoke()
        alive.revoke()
        return None

    def _sign(self, alive: Lease) -> Put:
        """Of life."""
        return Put(self._me, self._shown, alive)

    def show(self, what: bytes) -> None:
        """For the eyes of people: what this node is, as long as it lives."""
        if what == self._shown:
            return
        self._shown = what
        with suppress(LeaseLost):  # then `look_after` does it
            self._base.transaction({}, [self._sign(self._alive)])

    def look_after(self) -> None:
        """Show again that this agent lives where that was forgotten, because the store was away.

        Raises:
            Replaced: the job was taken for dead meanwhile, and another has begun.
        """
        if not self._alive.lost.is_set():
            return
        alive = self._base.lease(ALIVE_S)
        if not self._base.transaction({_JOB: self.name.encode()}, [self._sign(alive)]):
            raise _replaced(self._base)
        self._alive = alive

    def leave(self) -> None:
        """This agent ends; the last one removes what there is of the job."""
        try:
            self._alive.revoke()
            if not _agents(self._base, self.name):
                self._kept.revoke()
        except (StoreLost, StoreRefused, LeaseLost):
            self._kept.abandon()  # it runs out


def current_job(base: ControlStore) -> str | None:
    """The folder of the job that goes by the run id, None if there is none."""
    value = base.get(_JOB)
    return None if value is None else value.decode().partition(".")[0]


def agents_of(name: str) -> str:
    """What the keys of a job's living agents begin with."""
    return f"agents/{name}/"


def _agents(base: EtcdStore, name: str) -> list[str]:
    return base.list_keys(agents_of(name))


def _await_end(base: EtcdStore, name: str, timeout_s: float) -> None:
    """Until something happens to the job's agents."""
    prefix = agents_of(name)
    start = base.snapshot(prefix)
    if start.entries:
        with base.watch(prefix, start) as watch:
            watch.get(timeout_s)


def _replaced(base: EtcdStore) -> Replaced:
    return Replaced(
        f"The job that this node belonged to is over at {base.where}: no agent of it was heard of, "
        "and its place is taken or its time is up. Start the job again."
    )


def open_folder(config: EtcdConfig, name: str, report: Callable[[str], None]) -> ControlStore:
    """The folder of job ``name``, whose agents look after its lease."""
    folder = replace(config, prefix=f"{config.prefix}{name.partition('.')[0]}/")
    return EtcdStore(folder, report, kept=name.partition(".")[2], alone=False)
