"""Who decides about this node's workers: the recovery machine right here on one node, or the
controller of a job on several (:mod:`flashrun.control.recovery_lead`), reached through the control
store. The shell (:mod:`flashrun.node.inplace`) need not know which.
"""

from __future__ import annotations

import os
import queue
import selectors
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from flashrun.control.commands import Command
from flashrun.control.director import Director
from flashrun.control.recovery import Limits
from flashrun.control.recovery_lead import Place
from flashrun.control.recovery_post import Batch, RecoveryPost
from flashrun.messages import Message
from flashrun.node.copies import NoCopy
from flashrun.node.copy_ring import CopyRing
from flashrun.observe.console import say
from flashrun.rendezvous.kv import ControlStore
from flashrun.rendezvous.table import RankTable

Obey = Callable[[list[Command]], None]
OnQuiet = Callable[["int | None"], None]

LOOPBACK = "127.0.0.1"


class Decides(Protocol):
    """Takes what is seen; commands come through `Obey`, at once or later in the agent's loop."""

    def exited(self, rank: int, incarnation: int, kind: str, cause: str) -> None: ...

    def message(self, rank: int, incarnation: int, message: Message) -> None: ...

    def tick(self) -> None: ...

    def wake_at(self) -> float | None:
        """When `tick` has something to do (monotonic)."""

    def state(self) -> dict[str, Any]:
        """For the next agent."""

    def close(self) -> None: ...


class Alone:
    """One node: the machine is here.

    Args:
        obey: carries commands out.
        state: of the agent before this one.
        on_quiet: told whether a recovery is under way (None), or not (0, the places that other
            nodes have taken).
    """

    def __init__(
        self, world_size: int, limits: Limits, obey: Obey, state: dict[str, Any] | None,
        on_quiet: OnQuiet = lambda joins: None,
    ) -> None:  # fmt: skip
        hosts = [LOOPBACK] * world_size
        self._obey = obey
        self._director = Director(hosts, limits)
        if state is not None:
            # The same clock, so what was waited for has waited while there was no agent.
            self._director = Director.load(state, hosts, float(state["now"]))
        self._on_quiet = on_quiet
        self._quiet: int | None = -1  # nothing was told
        self._tell_quiet()

    def _do(self, commands: list[Command]) -> None:
        self._tell_quiet()
        self._obey(commands)

    def _tell_quiet(self) -> None:
        quiet = 0 if self._director.quiet else None
        if quiet != self._quiet:
            self._quiet = quiet
            self._on_quiet(quiet)

    def exited(self, rank: int, incarnation: int, kind: str, cause: str) -> None:
        self._do(self._director.exited(rank, incarnation, kind, cause, time.monotonic()))

    def message(self, rank: int, incarnation: int, message: Message) -> None:
        self._do(self._director.message(rank, incarnation, message, time.monotonic()))

    def tick(self) -> None:
        commands = self._director.tick(time.monotonic())
        if commands:
            self._do(commands)

    def wake_at(self) -> float | None:
        return self._director.wake_at()

    def state(self) -> dict[str, Any]:
        return self._director.dump(time.monotonic())

    def close(self) -> None:
        return


@dataclass(frozen=True)
class Several:
    """What it takes to decide together with other nodes.

    Attributes:
        table: of the round.
        node: this one.
        address: where this node's workers listen for their peers; numeric, ``::`` for everywhere.
        open_store: connects to the control store; may wait.
        address_given: by --local-addr.
        outlived: that store is there after the job.
        on_lost: told of another node that is lost, and why; called in a thread.
        run_dir: private folder of the job on this node.
        policy: by which nodes get their places.
        backend: of the rendezvous.
        detection: seconds in which a node that is cut off has stopped its workers.
    """

    table: RankTable
    node: str
    address: str
    open_store: Callable[[], ControlStore]
    outlived: bool
    address_given: bool
    on_lost: Callable[[str, str], None]
    run_dir: str
    policy: str
    backend: str
    detection: float

    def lay_table(self, path: str, table: RankTable) -> None:
        """For the workers of this node, into shared memory."""
        everywhere = self.address in ("::", "0.0.0.0")
        table.lay(path, self.node, LOOPBACK if everywhere else self.address)


class Together:
    """Several nodes: the controller decides, this node's post is the way to it and back."""

    def __init__(
        self,
        several: Several,
        limits: Limits,
        obey: Obey,
        state: dict[str, Any] | None,
        selector: selectors.BaseSelector,
        on_quiet: OnQuiet,
    ) -> None:
        self._obey = obey
        self._selector = selector
        self._batches: queue.SimpleQueue[Batch] = queue.SimpleQueue()
        self._read = 0 if state is None else int(state["read"])
        self._open = threading.Lock()  # held while the descriptor below is used or closed
        self._closed = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        selector.register(self._wake, selectors.EVENT_READ, self._on_wake)
        place = Place(
            several.table, several.node, limits, several.outlived, several.policy, several.backend,
            several.detection, on_quiet=on_quiet,
        )  # fmt: skip
        mine = several.table.of(several.node)
        assert mine is not None  # whoever has no place in a round is not told of it
        # An agent that was killed before its node had taken a lost one's place begins with that.
        self._joining = bool(mine.instead) and (state is None or bool(state["joining"]))
        self._copies = CopyRing(
            several.table, several.node, several.address, Path(several.run_dir),
            lambda node: self._post.copies_at(node), state is None,
        )  # fmt: skip
        self._post = RecoveryPost(
            several.open_store,
            place,
            self._read,
            self._deliver,
            lambda line: say(line, "warning", event="control-store"),
            several.on_lost,
            self._copies.port,
            self._arrive if self._joining else None,
        )
        self._post.start()
        self._copies.start()

    def _arrive(self) -> str:
        try:
            self._copies.arrive()
        except (NoCopy, OSError) as error:
            return str(error) or type(error).__name__
        return ""

    def tell_seats(self, table: RankTable) -> None:
        """Another node has taken a place in the round: have it commanded to all."""
        self._post.tell_seats(table)

    def reseat(self, table: RankTable) -> None:
        """It was commanded."""
        self._copies.reseat(table)
        self._post.reseat(table)

    def exited(self, rank: int, incarnation: int, kind: str, cause: str) -> None:
        self._post.send({"rank": rank, "incarnation": incarnation, "ended": [kind, cause]})

    def message(self, rank: int, incarnation: int, message: Message) -> None:
        told = {name: value for name, value in message.items() if name != "token"}
        self._post.send({"rank": rank, "incarnation": incarnation, "message": told})

    def _deliver(self, batch: Batch) -> None:
        """Called by the post's threads."""
        self._batches.put(batch)
        with self._open:
            if not self._closed:
                os.eventfd_write(self._wake, 1)

    def _on_wake(self) -> None:
        os.eventfd_read(self._wake)
        while not self._batches.empty():
            number, commands = self._batches.get()
            # The number goes to the next agent with what the commands have changed.
            self._read = max(self._read, number)
            if commands:
                self._joining = False
                self._obey(commands)
            self._post.done(self._read)

    def tick(self) -> None:
        return

    def wake_at(self) -> float | None:
        return None

    def state(self) -> dict[str, Any]:
        return {"read": self._read, "joining": self._joining}

    def close(self) -> None:
        self._copies.close()
        self._post.close()
        self._selector.unregister(self._wake)
        with self._open:
            self._closed = True
            os.close(self._wake)
