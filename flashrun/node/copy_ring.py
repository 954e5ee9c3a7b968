"""This node's place in the ring of copies: it streams what its ranks leave to the next node of the
round's table, holds what comes from the one before, and takes over from a lost node whose place it
takes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

from flashrun.node.copies import Keeper, NoCopy, fetch
from flashrun.node.copying import CopyStream, Holder
from flashrun.observe.console import say
from flashrun.rendezvous.server import StoreInUse, StoreNotBound
from flashrun.rendezvous.table import NodeRanks, RankTable

_COME_S = 10.0  # for a holder that is itself on its way
_AGAIN_S = 0.05

Lookup = Callable[[str], "int | None"]
"""The port at which a node takes copies; None: not known (yet). Raises OSError."""


def next_of(table: RankTable, node: str) -> NodeRanks:
    """Who holds the copies of a node's ranks."""
    place = table.of(node)
    assert place is not None
    return table.nodes[(place.group_rank + 1) % len(table.nodes)]


class CopyRing:
    """See the module.

    Args:
        table: of the round.
        node: this one.
        host: to listen on; numeric, ``::`` for all interfaces.
        lookup: see there; called in threads.
        fresh: no worker of this round has been started.

    Attributes:
        port: where this node takes copies; 0: it does not.
    """

    def __init__(
        self, table: RankTable, node: str, host: str, run_dir: Path, lookup: Lookup, fresh: bool
    ) -> None:
        self._table = table
        self._node = node
        self._run_dir = run_dir
        self._lookup = lookup
        self._closed = threading.Event()
        self._note = run_dir / "view" / "holder"  # for the next agent
        self._noted: Holder | None = None
        if fresh:
            self._note.unlink(missing_ok=True)
        self._keeper: Keeper | None = None
        try:
            self._keeper = Keeper(run_dir / "view" / "copies", host, table.token, fresh)
        except (StoreInUse, StoreNotBound) as error:
            _warn(f"this node holds no copies, so the loss of the one before restarts all: {error}")
        self.port = self._keeper.port if self._keeper is not None else 0
        mine = table.of(node)
        assert mine is not None
        self._stream = CopyStream(
            run_dir, node, mine.ranks, table.token, self._holder, _warn, fresh
        )

    def start(self) -> None:
        """Begin to stream."""
        self._stream.start()

    def reseat(self, table: RankTable) -> None:
        """A place has been taken by another node."""
        before, self._table = next_of(self._table, self._node), table
        if next_of(table, self._node).node != before.node:
            self._stream.move()

    def _holder(self) -> Holder | None:
        place = next_of(self._table, self._node)
        port = self._lookup(place.node)
        if not port:  # this agent is new, and has no connection to the control store yet
            return self._holder_before(place)
        holder = Holder(place.node, place.addr, port)
        if holder != self._noted:
            self._note.write_text(json.dumps([holder.node, port]))
            self._noted = holder
        return holder

    def _holder_before(self, place: NodeRanks) -> Holder | None:
        """Where the agent before this one has streamed to, if that has still the place."""
        try:
            node, port = json.loads(self._note.read_text())
        except (FileNotFoundError, ValueError):
            return None
        return Holder(node, place.addr, int(port)) if node == place.node else None

    def arrive(self) -> None:
        """Take over what the ranks of the lost node have left, whose place this one takes.

        Raises:
            NoCopy: there is none.
        """
        mine = self._table.of(self._node)
        assert mine is not None
        holder = next_of(self._table, self._node)
        try:
            port = self._await_port(holder)
            # A spare that was lost before its ranks had sealed anything has left no copy, and what
            # it took over is still where it was.
            fetch(
                (holder.addr, port), self._table.token, mine.instead, list(mine.ranks),
                self._run_dir, holder.addr,
            )  # fmt: skip
        except NoCopy as error:
            lost = " (the node that held it was lost as well)" if holder.instead else ""
            raise NoCopy(f"{error}{lost}") from error

    def _await_port(self, holder: NodeRanks) -> int:
        end = time.monotonic() + _COME_S
        while time.monotonic() < end and not self._closed.is_set():
            try:
                port = self._lookup(holder.node)
            except OSError:
                port = None
            if port:
                return port
            self._closed.wait(_AGAIN_S)
        raise NoCopy(f"the node at {holder.addr}, which copies it, takes no copies")

    def close(self) -> None:
        """The round is over."""
        self._closed.set()
        self._stream.close()
        if self._keeper is not None:
            self._keeper.close()


def _warn(line: str) -> None:
    say(line, "warning", event="copies")


