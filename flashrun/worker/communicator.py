"""What carries collectives for one group in one generation, behind one small interface.

`Gloo` relies on torch 2.13 (``torch/csrc/distributed/c10d/ProcessGroupGloo``, gloo's tcp
transport): every pair has one connected socket, made at creation; each device has one listening
socket. Gloo has no abort, but shutting down the connected sockets wakes whoever is blocked in about
a millisecond. A listening socket must never be shut down: the process would terminate.
"""

from __future__ import annotations

import _thread
import ctypes
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import Any, Protocol

from torch._C import _distributed_c10d as c10d

from flashrun.rendezvous.endpoint import is_loopback
from flashrun.rendezvous.sharded import ScopeStore

CREATE_TIMEOUT = timedelta(seconds=10)
CUT_GRACE = 2.0  # s after which an operation of a communicator that was cut is given up
# Of a wait; between two, it is looked whether it makes sense. (50 µs each. What a cut left behind
# ends so much later than need be, one operation after the other.)
_SLICE = timedelta(seconds=0.2)
_FIRST_PAUSE, _LAST_PAUSE = 0.0002, 0.01  # s between looks into the store


class Superseded(Exception):
    """The generation that was being built is no longer wanted; a newer one is open."""


class Stopping(RuntimeError):
    """The job's workers were asked to end, so no recovery ends any more: raised to the script that
    goes on nevertheless, where torch would have told it that the connection is closed."""


class BarrierMissed(RuntimeError):
    """torch's own error of ``monitored_barrier``, which names the ranks that did not come. A script
    calls it to be told that, so it is raised there unless somebody has died."""


def timed_out(error: Exception) -> bool:
    """Whether an operation ended because the group's own timeout has passed."""
    return "Timed out waiting" in str(error)  # gloo's words (unbound_buffer.cc), and `nccl`'s


class Handle(Protocol):
    """An operation on a communicator (a torch ``Work`` of gloo fits)."""

    def wait(self) -> Any:
        """Block until it has ended on this rank, and return only if the outputs hold its result.

        Real: the host waits (on CUDA for an event, not only the stream), and work that the caller
        queues afterwards sees the result. When it has returned or raised, nothing writes into the
        operation's tensors any more, so they may be filled and issued again.

        Raises:
            RuntimeError: it failed, or it ended because of `Communicator.abort`, or it may have:
                an abort makes queued operations end as if they had completed, with anything in
                their outputs.
        """

    def is_completed(self) -> bool:
        """Whether `wait` would not block (it may raise)."""

    def get_future(self) -> Any:
        """A future that is set when `wait` would return, to an exception where it would raise."""


class Communicator(Protocol):
    """See the module.

    Attributes:
        ordered: operations run one after the other in the order of issue (NCCL), so that one which
            completed here tells that all before it did; otherwise side by side (gloo).
    """

    ordered: bool

    def issue(self, kind: str, args: tuple[Any, ...]) -> Handle:
        """Start an operation and return at once; `kind` and `args` as in `oplog.KINDS`.

        What is wrong with the arguments is raised. A communicator that is broken or aborted is the
        handle's business: the script must not see it.
        """

    def abort(self) -> None:
        """End everything that was issued, wake everybody who waits in it.

        From any thread, more than once, also while others issue and wait. A peer that has died may
        show itself by an error or by nothing at all (NCCL); after this every `Handle.wait` returns
        or raises within a moment in either case.
        """

    def set_timeout(self, timeout: timedelta) -> None:
        """How long an operation may take before its `Handle.wait` raises."""


class Maker(Protocol):
    """Builds a communicator; blocks until all members have come.

    The members meet in the store right before the backend connects (`meet`): a peer that dies while
    a backend connects can cost many times the timeout, one that dies before costs nothing.
    """

    def __call__(
        self, store: Any, rank: int, size: int, timeout: timedelta, wanted: Callable[[], None]
    ) -> Communicator:
        """
        Args:
            store: torch store with a prefix of this group and generation.
            timeout: the script's own, for its operations.
            wanted: raises `Superseded` when there is no point in going on.
        """


def meet(
    store: Any,
    rank: int,
    size: int,
    value: str | None,
    deadline: float,
    wanted: Callable[[], None],
) -> list[str]:
    """A barrier in the store, with a word from each member; None: nobody has one to say.

    Raises:
        Superseded: see `wanted`.
        TimeoutError: somebody did not come; names them.
    """
    if isinstance(store, ScopeStore):  # of several nodes
        words = store.scope.meet("member", rank, value)
        wanted()
        return words
    store.set(f"member/{rank}", value or "")
    keys = [f"member/{i}" for i in range(size)]
    end = time.monotonic() + deadline
    pause = _FIRST_PAUSE
    # looking, not waiting: a blocked wait could not be given up, and one that times out makes torch
    # write warnings to the script's stderr
    while not store.check(keys):
        wanted()
        if time.monotonic() > end:
            missing = [i for i, key in enumerate(keys) if not store.check([key])]
            raise TimeoutError(
                f"waited {deadline:.0f} s for members {missing} of {size} to build a communicator"
            )
        time.sleep(pause)
        pause = min(pause * 1.5, _LAST_PAUSE)
    wanted()
    return [store.get(key).decode() for key in keys]


def _sockets() -> dict[int, int]:
    """Descriptors of this process that are sockets -> inode."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # closed meanwhile
        if target.startswith("socket:["):
            found[int(name)] = int(target[8:-1])
    return found


def _borrow(fd: int) -> socket.socket | None:
    """A TCP socket object on a duplicate of `fd`, or None for anything else."""
    try:
        copy = socket.socket(fileno=os.dup(fd))
    except OSError:
        return None
    if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
        return copy
    copy.close()
    return None


def _listening(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


_address, _address_given = "", False


def use_address(address: str, given: bool) -> None:
    """Where peers reach this process.

    Args:
        address: numeric; empty or a wildcard where nothing is known.
        given: by the user (--local-addr).
    """
    global _address, _address_given
    _address = "" if address in ("::", "0.0.0.0") else address
    _address_given = given


def _device(gloo: Any) -> Any:
    """The interface that gloo uses. As torch's: GLOO_SOCKET_IFNAME, else the one that the machine's
    name stands for; but the node's address where --local-addr gave it, or where that name leads
    nowhere (torch takes loopback then, by which no other node comes)."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        return gloo.create_device(interface=interface)
    if _address and (_address_given or not _has_name()):
        return gloo.create_device(hostname=_address)
    return gloo.create_default_device()


@cache
def _has_name() -> bool:
    """Whether this machine's name stands for an address of it by which others can come."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        if is_loopback(str(address[0])):
            continue
        with suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            return True
    return False


class Gloo:
    """One ``ProcessGroupGloo`` and the connected sockets it made."""

    ordered = False

    def __init__(self, group: Any, sockets: dict[int, int], store: Any) -> None:
        self._group = group
        self._sockets = sockets
        self._store = store
        self._barriers = 0
        self._cut: float | None = None

    def __del__(
        self,
        # Taken now: this module may have been emptied when the last one goes.
        is_finalizing: Any = sys.is_finalizing,
        start_thread: Any = _thread.start_new_thread,
        increment: Any = ctypes.pythonapi.Py_IncRef,
        reference: Any = ctypes.py_object,
    ) -> None:
        """Its end waits for its threads, and one of a communicator that was cut may wait for a peer
        until the group's timeout (see `_Cut`): no thread of the script must wait for that."""
        if self._cut is None:
            return
        last = [self._group]
        del self._group  # so that the thread drops the last reference
        if is_finalizing():  # no thread begins any more, and whatever waits ends with the process
            increment(reference(last))
            return
        # Not a `threading.Thread`, whose start waits, and takes locks that whoever is interrupted
        # by the collector may hold.
        try:
            start_thread(last.clear, ())
        except RuntimeError:  # no room for another one
            increment(reference(last))

    @classmethod
    def make(
        cls, store: Any, rank: int, size: int, timeout: timedelta, wanted: Callable[[], None]
    ) -> Gloo:
        """See `Maker`."""
        gloo: Any = c10d.ProcessGroupGloo
        before = _sockets()
        device = _device(gloo)
        ports = []
        for fd, inode in _sockets().items():
            if before.get(fd) != inode and (sock := _borrow(fd)) is not None:
                with sock:
                    if _listening(sock):
                        ports.append(sock.getsockname()[1])
        said = meet(
            store, rank, size, ",".join(map(str, ports)), timeout.total_seconds(), wanted
        )
        options = gloo._Options()
        options._devices = [device]
        options._threads = 2
        options._timeout = min(timeout, CREATE_TIMEOUT)
        group = gloo(c10d.PrefixStore("gloo", store), rank, size, options)
        group._set_default_timeout(timeout)
        others = {int(p) for i, word in enumerate(said) if i != rank for p in word.split(",") if p}
        return cls(group, _connections(set(ports), others), store)

    def issue(self, kind: str, args: tuple[Any, ...]) -> Handle:
        if kind == "monitored_barrier":
            self._barriers += 1
            return _MonitoredBarrier(self._group, self._store, self._barriers, *args)
        return _Cut(getattr(self._group, kind)(*args), self)

    def set_timeout(self, timeout: timedelta) -> None:
        self._group._set_default_timeout(timeout)

    def gone(self) -> bool:
        """Whether it was cut so long ago that nothing can come out of it any more."""
        return self._cut is not None and time.monotonic() - self._cut > CUT_GRACE

    def abort(self) -> None:
        if self._cut is None:
            self._cut = time.monotonic()
        for fd, inode in self._sockets.items():
            try:
                same = os.fstat(fd).st_ino == inode
            except OSError:
                continue  # gloo has closed it
            sock = _borrow(fd) if same else None
            if sock is not None:
                with sock:
                    if not _listening(sock):
                        try:
                            sock.shutdown(socket.SHUT_RDWR)
                        except OSError:
                            continue  # the peer is gone already


class _Cut:
    """An operation whose wait ends in any case once its communicator was cut.

    Cutting the sockets fails what is under way in about a millisecond; but now and then, on a busy
    machine, gloo misses it for an operation that is just being issued, which then waits for its
    peer until the group's timeout (30 minutes; seen in ``UnboundBuffer::waitSend``). It is given up
    after `CUT_GRACE`: with its sockets closed and what they held read, nothing can reach the tensor
    any more, and all that it will do is fail.
    """

    __slots__ = ("_owner", "_work")

    def __init__(self, work: Any, owner: Gloo) -> None:
        self._work = work
        self._owner = owner

    def wait(self) -> Any:
        while True:
            try:
                return self._work.wait(_SLICE)
            except RuntimeError:
                if self._work.is_completed():  # its own error, not the end of a slice
                    raise
                if self._owner.gone():
                    raise RuntimeError("gloo: cut off, and did not notice") from None

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def get_future(self) -> Any:
        return self._work.get_future()

    def source_rank(self) -> int:
        return int(self._work._source_rank())


class _MonitoredBarrier:
    """A barrier with a word from each member in the store, so that who did not come has a name.

    gloo's own blocks where it is called, and takes its place among the group's operations only then
    (ProcessGroupGloo.cpp, ``monitoredBarrier``: ``nextTag``), so it can't be issued again like the
    others. The texts are its.
    """

    def __init__(
        self, group: Any, store: Any, number: int, timeout: timedelta, wait_all_ranks: bool
    ) -> None:
        self._group = group
        self._store = store
        self._keys = [f"barrier/{number}/{rank}" for rank in range(group.size())]
        self._seconds = timeout.total_seconds()
        self._all = wait_all_ranks
        # A store that is gone shows in the barrier as well, and there it is dealt with.
        with suppress(RuntimeError, OSError):
            store.set(self._keys[group.rank()], "here")
        options = c10d.BarrierOptions()
        options.timeout = timeout
        self._work = group.barrier(options)

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise BarrierMissed(self._text(str(error))) from None

    def _text(self, original: str) -> str:
        rank = self._group.rank()
        if rank:
            return (
                f"Rank {rank} successfully reached monitoredBarrier, but received errors while"
                " waiting for send/recv from rank 0. Please check rank 0 logs for faulty rank."
                f"\n Original exception: \n{original}"
            )
        missing = [i for i, key in enumerate(self._keys) if not self._store.check([key])]
        if not missing:
            return original
        who = f"Rank {missing[0]}"
        if self._all:
            who = f"Ranks {', '.join(map(str, missing))}"
        text = f"[Rank 0]: {who} failed to pass monitoredBarrier in {self._seconds * 1e3:.0f} ms"
        return text if self._all else f"{text}\n Original exception: \n{original}"

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def get_future(self) -> Any:
        return self._work.get_future()


def _connections(own: set[int], others: set[int]) -> dict[int, int]:
    """The connected sockets that lead to a peer's listening port, or came to ours."""
    found = {}
    for fd, inode in _sockets().items():
        sock = _borrow(fd)
        if sock is None:
            continue
        with sock:
            if _listening(sock):
                continue
            try:
                peer = sock.getpeername()
            except OSError:
                continue
            if sock.getsockname()[1] in own or peer[1] in others:
                found[fd] = inode
    return found
