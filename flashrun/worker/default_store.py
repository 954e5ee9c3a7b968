"""The scripts' default store, in jobs that outlive the node which hosts it.

Under ``--rdzv-backend=flash-etcd`` what ``init_process_group`` makes at ``MASTER_ADDR`` is a
`DefaultStore`: a client of the TCPStore that the node of rank 0 serves, which behaves like torch's.
It knows what this rank has written (:mod:`flashrun.worker.store_keys`). When that node is lost, the
table of the next generation names another host, the ranks bring together what each of them has
written, and the first rank writes it there (`Home.settle`); an operation that was under way is done
again. What can't be told exactly is a `Divergence` that names the key.

A replacement's script does the operations of the lost one again: up to the boundary at which it
joins, and as far as the log goes beyond it, they give what the log has, and the store, which has
them already, is left alone. One that the lost worker had begun, and whose end is not known, is done
again only if nobody can tell the difference.

Only the script's own thread can be followed like this, and outside of what a replay skips; the
first write from anywhere else makes the job *restart only*.
"""

from __future__ import annotations

import importlib
import marshal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import wraps
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from flashrun.rendezvous.endpoint import join_host_port
from flashrun.rendezvous.links import links_to, set_deadline
from flashrun.rendezvous.sharded import ScopeStore
from flashrun.rendezvous.table import StorePlace
from flashrun.worker.replay import kinds
from flashrun.worker.replay.api import Divergence, Mode
from flashrun.worker.script_store import DefaultStore, install_prefixed, look
from flashrun.worker.store_keys import Keys, Part, Refused, merge

if TYPE_CHECKING:
    from flashrun.worker.replay.session import Session
    from flashrun.worker.runtime import Runtime

_ANSWER_S = 30.0  # of the host, to a request that waits for nothing
_CONNECT = timedelta(seconds=20)
_FIRST_PAUSE, _LAST_PAUSE = 0.0002, 0.05  # s between two looks for a key
_LARGEST = 64 << 10  # bytes of an operation in the log
_HOLDS = 3  # of one operation, before its error is the script's

_QUEUES = frozenset(["queue_push", "queue_pop"])
_WRITES = _QUEUES | {"set", "add", "append", "compare_set", "delete_key", "multi_set"}
_SAFE = frozenset(["set", "multi_set"])  # done twice it is as done once
_RAISED = {"DistStoreError": dist.DistStoreError, "DistNetworkError": dist.DistNetworkError}


def connect(host: str, port: int) -> Any:
    """A client; the first answer that does not come in time ends it."""
    store = c10d.TCPStore(host, port, None, False, _CONNECT, wait_for_workers=False)
    for link in links_to(port).values():
        set_deadline(link, _ANSWER_S)
        link.close()
    return store


def note(keys: Keys, what: str, args: Sequence[Any], value: Any, interval: int) -> None:
    """An operation was done, and gave `value`."""
    if what == "set":
        keys.set(args[0], args[1])
    elif what == "multi_set":
        for key, one in zip(args[0], args[1], strict=True):
            keys.set(key, one)
    elif what == "add":
        keys.add(args[0], args[1], value, interval)
    elif what == "append":
        keys.append(args[0], args[1])
    elif what == "compare_set":
        keys.compare_set(args[0], args[1], args[2], value, interval)
    elif what == "delete_key":
        keys.delete(args[0], value)
    elif what == "get":
        keys.saw(args[0], value, interval)
    elif what == "multi_get":
        for key, one in zip(args[0], value, strict=True):
            keys.saw(key, one, interval)
    elif what == "wait" or (what == "check" and value):
        for key in args[0]:
            keys.saw(key, None, interval)


def _size(arg: Any) -> int:
    """Of an argument, in bytes."""
    parts = arg if isinstance(arg, list) else [arg]
    return sum(len(part) for part in parts if isinstance(part, (bytes, str)))


def _named(args: Sequence[Any]) -> str:
    """The key, or the first of them, for people."""
    key = args[0] if args else ""
    return str(key if isinstance(key, str) else next(iter(key), ""))


class Home:
    """What all default stores of a process have in common.

    Attributes:
        keys: what this rank knows.
        moves: how often the host that is used is another one than before, in this round.
    """

    def __init__(self, runtime: Runtime, environ: Mapping[str, str], place: StorePlace) -> None:
        self._rt = runtime
        self._main = threading.get_ident()
        self._known = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
        self._where = (place.addr, place.port) if place.moves else self._known
        self.moves = place.moves
        self.keys = Keys()
        self._client: Any = None
        self._lock = threading.RLock()
        self._joined = not runtime.incarnation  # live since its beginning, or for a generation
        self._absorbed = False
        self._next: tuple[StorePlace, bool] | None = None
        self._moved_at = -1  # the boundary at which the keys were brought together
        self._alive: list[Any] = []  # C++ keeps its own half alone alive (2.13)

    def install(self) -> Callable[[], None]:
        """Have torch's rendezvous give the script a `DefaultStore`; returns the undo."""
        # (In torch.distributed that name is a function.)
        place: Any = importlib.import_module("torch.distributed.rendezvous")
        server: Any = c10d.TCPStore
        original, begin = place._create_c10d_store, server.__init__

        def create(
            hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, *rest: Any,
            **more: Any,
        ) -> Any:  # fmt: skip
            if (hostname, port) != self._known or not place._torchelastic_use_agent_store():
                return original(hostname, port, rank, world_size, timeout, *rest, **more)
            store = self.store(timeout)
            store.add("init/", 1)  # as a TCPStore does
            return store

        @wraps(begin)
        def opened(store: Any, *args: Any, **kwargs: Any) -> None:
            if self.moves:
                host = args[0] if args else kwargs.get("host_name")
                port = args[1] if len(args) > 1 else kwargs.get("port")
                if (host, port) == self._known:
                    raise dist.DistNetworkError(
                        f"MASTER_ADDR ({host}, port {port}) was lost with the node of rank 0, and a"
                        " TCPStore of the script's own there with it; the default store"
                        " (torch.distributed.distributed_c10d._get_default_store()) goes on"
                    )
            begin(store, *args, **kwargs)

        place._create_c10d_store = create
        server.__init__ = opened
        withdraw = install_prefixed()

        def undo() -> None:
            withdraw()
            place._create_c10d_store = original
            server.__init__ = begin

        return undo

    def store(self, timeout: timedelta) -> DefaultStore:
        store = DefaultStore(self)
        store.set_timeout(timeout)
        self._alive.append(store)
        return store

    # --- operations

    def do(self, what: str, args: tuple[Any, ...], run: Callable[[Any], Any]) -> Any:
        """One operation of the script.

        Args:
            run: does it, with a client; what may be waited for is looked for with `await_keys`.
        """
        session = self._rt.replay._session
        size = sum(map(_size, args))
        unfit = size > _LARGEST or what in _QUEUES
        if session is None or not session.here() or unfit:
            if what in _WRITES or unfit:
                self._not_followed(session, what, args, size)
            return self._run(what, args, run)
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename == __file__:
            frame = frame.f_back
        asked = marshal.dumps((what, args))
        if session.replaying:
            return self._recalled(session, frame, what, args, asked)
        return self._logged(session, frame, what, args, asked, run)

    def _recalled(
        self, session: Session, frame: FrameType, what: str, args: tuple[Any, ...], asked: bytes
    ) -> Any:
        """In a replay: what the lost worker got."""
        record = session.expect(kinds.STORE, frame)
        if record is not None and record.payload != asked:
            raise session.diverged(f"another {what} of the default store's '{_named(args)}'", frame)
        answer = session.expect(kinds.STORE_GAVE, frame) if record is not None else None
        if answer is None:
            raise session.diverged(
                f"the dead worker's log ends before the default store's {what} of '{_named(args)}'",
                frame,
            )
        value = _unpack(answer.payload)
        note(self.keys, what, args, value, self._rt.boundary)
        return value

    def _logged(
        self, session: Session, frame: FrameType, what: str, args: tuple[Any, ...], asked: bytes,
        run: Callable[[Any], Any],
    ) -> Any:  # fmt: skip
        given = session.given(kinds.STORE, frame)
        doubtful = given is not None or session.uncertain == self._rt.boundary
        if given is None:
            session.append(kinds.STORE, session.site(frame), asked)
        elif given != asked:
            session.refuse(f"another {what} of the default store's '{_named(args)}' than before")
        else:
            answer = session.given(kinds.STORE_GAVE, frame)
            if answer is not None:  # (it is in `keys`)
                return _unpack(answer)
        if doubtful and what in _WRITES and self._moved_at != self._rt.boundary:
            self._is_harmless(session, what, args)
        try:
            value = self._run(what, args, run)
        except RuntimeError as error:
            text = marshal.dumps((type(error).__name__, str(error)))
            session.append(kinds.STORE_GAVE, session.site(frame), text)
            raise
        packed = marshal.dumps(("", value))
        session.append(kinds.STORE_GAVE, session.site(frame), packed)
        if len(packed) > _LARGEST:
            self._not_followed(session, what, args, len(packed))
        return value

    def _is_harmless(self, session: Session, what: str, args: tuple[Any, ...]) -> None:
        """The lost worker may have done this already, and somebody else something after it."""
        pairs: list[tuple[str, bytes]] = [args] if what == "set" else []
        if what == "multi_set":
            pairs = list(zip(*args, strict=True))
        client = self._connected()
        if what not in _SAFE or any(look(client, key) != value for key, value in pairs):
            session.refuse(
                f"whether the lost worker has done the default store's {what} of '{_named(args)}'"
                " is not known"
            )

    def _not_followed(
        self, session: Session | None, what: str, args: tuple[Any, ...], size: int
    ) -> None:
        if session is None or session.replaying or session.gave_up:
            return
        how = "on another thread, or inside of a forward, backward or step"
        if what in _QUEUES:
            how = "(queues have no order that the ranks know)"
        elif size > _LARGEST:
            how = f"with {size >> 10} KB"
        session.give_up(
            f"the default store's {what} of '{_named(args)}' was done {how}, where it can't be"
            " repeated",
            "use the default store in the script's main thread, between steps, for small values",
        )

    def _run(self, what: str, args: tuple[Any, ...], run: Callable[[Any], Any]) -> Any:
        holds = 0
        while True:
            moves = self.moves
            try:
                value = run(self._connected())
            except dist.DistStoreError:
                raise
            except RuntimeError as error:
                holds += 1
                if not self._may_hold() or holds > _HOLDS:
                    raise
                self._hold(error, what, args)
                if what in _WRITES - _SAFE and self.moves == moves:
                    self._rt.diverged(
                        Divergence(
                            f"rank {self._rt.rank} got no answer to the default store's {what} of"
                            f" '{_named(args)}', so whether it was done is not known"
                        )
                    )
                continue
            if self._rt.mode is Mode.LIVE:
                note(self.keys, what, args, value, self._rt.boundary)
            return value

    def _may_hold(self) -> bool:
        return threading.get_ident() == self._main and self._rt.mode is Mode.LIVE

    def _hold(self, error: Exception, what: str, args: tuple[Any, ...]) -> None:
        """As a collective that fails: the host may be lost."""
        rt = self._rt
        if rt.laggard.running:
            rt.diverged(
                Divergence(
                    f"rank {rt.rank} was one boundary behind when the host of the default store was"
                    f" lost, and its script asks there for {what} of '{_named(args)}'"
                )
            )
        with rt.hold_lock:
            if rt.pending == rt.generation:
                rt.suspect(error)
            rt.enter()
        with self._lock:
            self._client = None

    def await_keys(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Look until all are there. (A wait in the server could not be ended for a recovery.)

        Raises:
            DistStoreError: not in time; torch's words.
        """
        rt = self._rt
        end = time.monotonic() + timeout.total_seconds()
        pause = _FIRST_PAUSE
        while not self._connected().check(list(keys)):
            if time.monotonic() >= end:
                spent = int(timeout.total_seconds() * 1000)
                named = ", ".join(f"/{key}" for key in keys)
                raise dist.DistStoreError(f"wait timeout after {spent}ms, keys: {named}")
            if self._may_hold() and rt.pending > rt.generation and not rt.laggard.running:
                with rt.hold_lock:
                    rt.enter()
            time.sleep(pause)
            pause = min(pause * 1.5, _LAST_PAUSE)

    def _connected(self) -> Any:
        with self._lock:
            if self._client is None:
                self._client = connect(*self._where)
            return self._client

    # --- recovery, on the script's thread

    def _absorb(self, session: Session) -> None:
        """What the lost worker did after the boundary, as far as it is known: it will be given."""
        if self._absorbed or self._joined:
            return
        self._absorbed = True
        asked: tuple[str, tuple[Any, ...]] | None = None
        for record in session.answers:
            if record.kind == kinds.STORE:
                asked = marshal.loads(record.payload)
            elif record.kind == kinds.STORE_GAVE and asked is not None:
                kind, value = marshal.loads(record.payload)
                if not kind:
                    note(self.keys, *asked, value, self._rt.boundary)
                asked = None

    def settle(self, generation: int) -> None:
        """Bring the keys together on the present host, where its predecessor was lost.

        Raises:
            Divergence: it can't be done exactly.
        """
        rt = self._rt
        self._absorb(rt.replay.session)
        patience = timedelta(seconds=rt.patience)
        store = rt.bootstrap.store(
            generation, "default-store", range(rt.world_size), patience, rt.wanted(generation)
        )
        place = rt.bootstrap.default_store
        assert place is not None  # a round has it or not
        published = False
        if place.moves:
            if not isinstance(store, ScopeStore):
                raise Divergence("the default store moves only where all nodes have shards")
            at = str(self.moves) if self._joined else ""
            try:
                word = self.keys.to_word(replaced=not self._joined, at=at)
                parts = [Part.from_word(w) for w in store.scope.meet("keys", rt.rank, word)]
                # Who is live with the new host already knows it to be complete.
                published = all(part.at != str(place.moves) for part in parts)
                merged = merge(parts, rt.boundary) if published else {}
            except Refused as error:
                raise Divergence(str(error)) from error
            if published and rt.rank == 0:
                _publish(place, merged)
                where = join_host_port(place.addr, place.port)
                rt.log(
                    {"event": "default-store-moved", "address": where, "keys": len(merged)}
                )
        self._next = place, published

    def arrive(self) -> None:
        """All have come to the end of `settle`."""
        self._joined = True
        if self._next is None:
            return
        (place, published), self._next = self._next, None
        if place.moves != self.moves:
            self.moves = place.moves
            self._where = place.addr, place.port
            with self._lock:
                self._client = None
        self._moved_at = self._rt.boundary if published else -1


def _publish(place: StorePlace, keys: Mapping[str, bytes]) -> None:
    client = connect(place.addr, place.port)
    for key in client.list_keys():  # of an attempt before this one
        if key not in keys:
            client.delete_key(key)
    for key, value in keys.items():
        client.set(key, value)
    client.num_keys()  # answered after all of them


def _unpack(payload: bytes) -> Any:
    kind, value = marshal.loads(payload)
    if kind:
        raise _RAISED.get(kind, RuntimeError)(value)
    return value
