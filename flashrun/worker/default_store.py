"""The scripts' default store, in jobs that outlive any node.

Under ``--rdzv-backend=flash-etcd`` what ``init_process_group`` makes at ``MASTER_ADDR`` is a
`DefaultStore`, which behaves like torch's TCPStore. Its keys are spread over those that the nodes
serve (:mod:`flashrun.worker.spread`), and it knows what this rank has written
(:mod:`flashrun.worker.store_keys`). When a node is lost, the table of the next generation has
another one in its place, the ranks bring together what each of them has written of the keys that
were there, and that is written there again (`Shared.settle`); an operation that was under way is
done again. All other keys stay as they are. What can't be told exactly is a `Divergence` that names
the key.

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
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from flashrun.rendezvous.endpoint import join_host_port
from flashrun.rendezvous.sharded import Scope, ScopeStore
from flashrun.rendezvous.table import RankTable
from flashrun.worker.replay import kinds
from flashrun.worker.replay.api import Divergence, Mode
from flashrun.worker.script_store import DefaultStore, install_prefixed, look
from flashrun.worker.spread import INIT, Spread, Unreached, connect
from flashrun.worker.store_keys import Keys, Part, Refused, merge

if TYPE_CHECKING:
    from flashrun.worker.replay.session import Session
    from flashrun.worker.runtime import Runtime

T = TypeVar("T")

_FIRST_PAUSE, _LAST_PAUSE = 0.0002, 0.05  # s between two looks for a key
_KNOCK_S = 1.0  # between two looks whether the next node is there, while waiting for a key
_LARGEST = 64 << 10  # bytes of an operation in the log
_HOLDS = 3  # of one operation with the same nodes, before its error is the script's

_QUEUES = frozenset(["queue_push", "queue_pop"])
_WRITES = _QUEUES | {"set", "add", "append", "compare_set", "delete_key", "multi_set"}
_SAFE = frozenset(["set", "multi_set"])  # done twice it is as done once
_RAISED = {
    kind.__name__: kind for kind in (dist.DistStoreError, dist.DistNetworkError, Unreached)
}


def _size(arg: Any) -> int:
    """Of an argument, in bytes."""
    parts = arg if isinstance(arg, list) else [arg]
    return sum(len(part) for part in parts if isinstance(part, (bytes, str)))


def _named(args: Sequence[Any]) -> str:
    """The key, or the first of them, for people."""
    key = args[0] if args else ""
    return str(key if isinstance(key, str) else next(iter(key), ""))


class Shared:
    """What all default stores of a process have in common.

    Attributes:
        keys: what this rank knows.
        client: of all servers.
    """

    def __init__(
        self, runtime: Runtime, environ: Mapping[str, str], table: RankTable, own: int
    ) -> None:
        self._rt = runtime
        self._main = threading.get_ident()
        self._known = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
        self.client = Spread(table, own, self._connect)
        self.keys = Keys()
        self._joined = not runtime.incarnation  # live since its beginning, or for a generation
        self._absorbed = False
        self._next: tuple[RankTable, set[int]] | None = None
        # The boundary at which keys were brought together, and whose.
        self._moved: tuple[int, set[int]] = -1, set()
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
            store.add(INIT, 1)
            return store

        @wraps(begin)
        def opened(store: Any, *args: Any, **kwargs: Any) -> None:
            if self.client.table.nodes[0].joined:
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
            run: does it, with a client; what may be waited for is looked for with `awaited`.
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
        self.keys.note(what, args, value, self._rt.boundary)
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
        if doubtful and what in _WRITES and args[0] != INIT:
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
        """The lost worker may have done this already, and somebody else something after it (unless
        the home was lost as well: it has now what is known to have been done)."""
        pairs: list[tuple[str, Any]] = [(args[0], args[-1])]
        if what == "multi_set":
            pairs = list(zip(*args, strict=True))
        boundary, lost = self._moved
        if boundary == self._rt.boundary:
            pairs = [(key, value) for key, value in pairs if self.client.home(key) not in lost]
        safe = what in _SAFE
        if any(not safe or look(self.client, key) != value for key, value in pairs):
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
            table = self.client.table
            try:
                value = run(self.client)
            except dist.DistStoreError:
                raise
            except RuntimeError as error:
                holds += 1
                if not self._may_hold() or holds > _HOLDS:
                    raise
                self._hold(error, what, args)
                asked = what in _WRITES - _SAFE and not isinstance(error, Unreached)
                if self.client.table.joins > table.joins:
                    holds = 0
                if asked and not self._moved_since(table, args[0]):
                    self._rt.diverged(
                        Divergence(
                            f"rank {self._rt.rank} got no answer to the default store's {what} of"
                            f" '{_named(args)}', so whether it was done is not known"
                        )
                    )
                continue
            if self._rt.mode is Mode.LIVE:
                self.keys.note(what, args, value, self._rt.boundary)
            return value

    def _moved_since(self, table: RankTable, key: str) -> bool:
        """Whether another node than then is the home of a key."""
        return self.client.home(key) in self.client.table.taken_since(table.joins)

    def _may_hold(self) -> bool:
        return threading.get_ident() == self._main and self._rt.mode is Mode.LIVE

    def _hold(self, error: Exception, what: str, args: tuple[Any, ...]) -> None:
        """As a collective that fails: the home may be lost."""
        rt = self._rt
        if rt.laggard.running:
            rt.diverged(
                Divergence(
                    f"rank {rt.rank} was one boundary behind when a node of the default store was"
                    f" lost, and its script asks there for {what} of '{_named(args)}'"
                )
            )
        with rt.hold_lock:
            if rt.pending == rt.generation:
                rt.suspect(error)
            rt.enter()

    def await_keys(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Look until all are there, see `awaited`."""
        missing = list(keys)

        def there() -> bool | None:
            nonlocal missing
            missing = self.client.missing(missing)
            return None if missing else True

        self.awaited(there, keys, timeout)

    def awaited(
        self, look: Callable[[], T | None], keys: Sequence[str], timeout: timedelta
    ) -> T:
        """Look until there is something. (A wait in the server could not be ended for a recovery.)

        Raises:
            DistStoreError: not in time; torch's words.
        """
        now = time.monotonic()
        end, next_knock = now + timeout.total_seconds(), now + _KNOCK_S
        pause = _FIRST_PAUSE
        while (found := look()) is None:
            now = time.monotonic()
            if now >= end:
                spent = int(timeout.total_seconds() * 1000)
                named = ", ".join(f"/{key}" for key in keys)
                raise dist.DistStoreError(f"wait timeout after {spent}ms, keys: {named}")
            if self._is_called():
                with self._rt.hold_lock:
                    self._rt.enter()
            elif now >= next_knock and self._may_hold() and not self._rt.laggard.running:
                self.client.knock()
                next_knock = now + _KNOCK_S
            time.sleep(pause)
            pause = min(pause * 1.5, _LAST_PAUSE)
        return found

    def _is_called(self) -> bool:
        """A recovery waits for this thread."""
        rt = self._rt
        return self._may_hold() and rt.pending > rt.generation and not rt.laggard.running

    def _connect(self, host: str, port: int) -> Any:
        return connect(host, port, self._is_called)

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
                    self.keys.note(*asked, value, self._rt.boundary)
                asked = None

    def settle(self, generation: int) -> None:
        """Bring the keys together whose homes were lost; the first rank of each of these places
        writes there what it had.

        Raises:
            Divergence: it can't be done exactly.
        """
        rt = self._rt
        self._absorb(rt.replay.session)
        patience = timedelta(seconds=rt.patience)
        store = rt.bootstrap.store(
            generation, "default-store", range(rt.world_size), patience, rt.wanted(generation)
        )
        table = rt.bootstrap.spread
        assert table is not None  # a round has it or not
        lost: set[int] = set()
        if table.joins:
            if not isinstance(store, ScopeStore):
                raise Divergence(
                    "keys of the default store were lost with a node, and the ranks bring theirs"
                    " together only where all nodes have shards"
                )
            try:
                parts = self._brought(store.scope, table)
                # Who is live with a table already knows what it says to be complete.
                lost = set(table.taken_since(max(part.at for part in parts)))
                mine = [part.of(lambda key: self.client.home(key) in lost) for part in parts]
                merged = merge(mine, rt.boundary)
            except Refused as error:
                raise Divergence(str(error)) from error
            for place in lost:
                if rt.rank == table.nodes[place].base_rank:
                    self._put_again(table, place, merged)
        self._next = table, lost

    def _brought(self, scope: Scope, table: RankTable) -> list[Part]:
        """By every rank: what it has of the keys whose home is another node than when it was live,
        for all that it knows."""
        at = self.client.table.joins if self._joined else 0
        taken = table.taken_since(at)
        keys = self.keys.of(lambda key: self.client.home(key) in taken)
        word = keys.to_word(replaced=not self._joined, at=at)
        return [Part.from_word(w) for w in scope.meet("keys", self._rt.rank, word)]

    def _put_again(self, table: RankTable, place: int, merged: Mapping[str, bytes]) -> None:
        keys = {key: value for key, value in merged.items() if self.client.home(key) == place}
        Spread(table, place).put_again(place, keys)
        node = table.nodes[place]
        where = join_host_port(node.addr, node.store)
        self._rt.log(
            {"event": "default-store-moved", "place": place, "address": where, "keys": len(keys)}
        )

    def arrive(self) -> None:
        """All have come to the end of `settle`."""
        self._joined = True
        if self._next is None:
            return
        (table, lost), self._next = self._next, None
        self.client.use(table)
        self._moved = self._rt.boundary, lost


def _unpack(payload: bytes) -> Any:
    kind, value = marshal.loads(payload)
    if kind:
        raise _RAISED.get(kind, RuntimeError)(value)
    return value
