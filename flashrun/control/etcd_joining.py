"""How a node gets to a job whose agents meet in etcd: the store is there before and after it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from flashrun.control.events import Connected, HostStore, Membership, Node
from flashrun.control.joining import Opened, RefusedError, free_port, route_address
from flashrun.control.patience import Patience, PatientKeyValue
from flashrun.control.plan_book import PREFIX, PlanBook
from flashrun.control.probing import unanswered
from flashrun.control.records import Member, shown
from flashrun.rendezvous.endpoint import is_loopback, listen_address, reached_at
from flashrun.rendezvous.kv import ControlStore, StoreRefused
from flashrun.rendezvous.tcp_kv import connect
from flashrun.rendezvous.watch import Watch

if TYPE_CHECKING:
    from flashrun.rendezvous.etcd_job import JobFolder
    from flashrun.rendezvous.etcd_store import EtcdStore

_CONNECT_S = 5.0  # to the store for the workers, on this node
_LONG_S = 3600.0


class EtcdOpener:
    """A job's folder in etcd, and on each node a store for the workers, of which those of a round
    use its first node's. Patient once the job is found.

    Args:
        cancel: ends every wait.
        say: takes a line for a person.
        patience: is asked while the store does not answer.
    """

    def __init__(
        self,
        membership: Membership,
        node: Node,
        *,
        host_store: HostStore,
        resume: Connected | None,
        say: Callable[[str], None],
        patience: Patience,
    ) -> None:
        assert membership.etcd is not None
        self._membership = membership
        self._config = membership.etcd
        self._node = node
        self._host_store = host_store
        self._resume = resume
        self._say = say
        self._patience = patience
        self._addr = ""
        self._base: EtcdStore | None = None
        self._folder: JobFolder | None = None
        self._watches: list[Watch] = []
        self._closed = threading.Event()

    def open(self) -> Opened:
        """Raises StoreLost, StoreRefused: it does not answer, or not to us; EndpointError."""
        from flashrun.rendezvous.etcd_job import JobFolder, Replaced
        from flashrun.rendezvous.etcd_store import EtcdStore

        self._addr = self._own_address()
        me, quick = self._node.node_id, self._config.quick()
        if self._resume is not None:
            name = self._resume.folder
            base = self._base = EtcdStore(quick, self._say, alone=False)
            try:
                folder = self._patience.call(lambda: JobFolder.resume(base, me, name))
            except Replaced as error:
                raise RefusedError(str(error)) from None
        else:
            with EtcdStore(self._config, self._say) as store:
                store.get("job")  # the first word of it may take longer than a later one
            base = self._base = EtcdStore(quick, self._say, alone=False)
            folder = JobFolder.find(base, me, _look, self._say)
        self._folder = folder
        kv = PatientKeyValue(folder.store, self._patience)
        return Opened(
            kv, "", 0, False, self._addr, self._membership, self._node.node_rank, folder.name
        )

    def _own_address(self) -> str:
        if self._node.local_addr:
            return self._node.local_addr
        hosts = [where.rpartition(":")[0].strip("[]") for where in self._config.endpoints]
        ways = [route_address(host) for host in hosts]
        # A member on this very machine tells nothing of how the others reach it.
        outward = [way for way in ways if way is not None and not is_loopback(way)]
        return next(iter(outward), None) or next(filter(None, ways), socket.gethostname())

    def workers_port(self) -> int:
        """Of this node's store for the workers, emptied: what those of the last round have left
        must not meet the next ones."""
        if not self._membership.job.use_agent_store:
            return free_port()
        listen = listen_address(self._addr, several_nodes=True)
        port = self._host_store(listen, 0)
        kv = connect(
            reached_at(listen), port, _CONNECT_S, self._membership.timing.read_timeout
        )
        for key in kv.list_keys():
            kv.delete(key)
        return port

    def listen(self, key: str, wake: Callable[[], None]) -> bool:
        """Call ``wake`` when ``key`` has changed, from a thread; True: nobody need look."""
        assert self._folder is not None
        store = self._folder.store

        def run() -> None:
            try:
                with store.watch(key) as watch:
                    self._watches.append(watch)
                    while not self._closed.is_set():
                        watch.get(_LONG_S)
                        wake()
            except StoreRefused as error:
                self._say(f"changes are seen late: {error}")

        threading.Thread(target=run, name="changes", daemon=True).start()
        return True

    def show(self, me: Member) -> None:
        folder = self._folder
        if folder is not None:
            self._patience.call(lambda: folder.show(shown(me)))

    def look_after(self) -> None:
        """Raises RefusedError: the job is over, or another's."""
        from flashrun.rendezvous.etcd_job import Replaced

        if self._folder is None:
            return
        try:
            self._patience.call(self._folder.look_after)
        except Replaced as error:
            raise RefusedError(str(error)) from None

    def knocking(self) -> int:
        return 0

    def leave(self) -> None:
        """This node needs the job no more."""
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.leave()

    def close(self) -> None:
        self.leave()
        self._closed.set()
        for watch in self._watches:
            watch.close()
        if self._base is not None:
            self._base.close()


def _look(store: ControlStore) -> Literal["over", "doubtful", "lives"]:
    """See `flashrun.rendezvous.etcd_job.Look`."""
    plan = PlanBook(store, PREFIX).read()
    if plan.phase == "finished":
        return "over"
    if plan.table is not None and len(unanswered(plan.table.nodes)) == len(plan.table.nodes):
        return "doubtful"
    return "lives"
