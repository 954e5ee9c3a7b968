"""The way to the workers of the other nodes, for questions that any one of a node can answer.

The recovery machine says in each generation whom to ask on each node (``others``). Who does not
answer has died or will be found hung, which opens another generation with another one to ask, so
each question is put again until it is answered.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from flashrun.messages import Message
from flashrun.worker.replay.api import Divergence
from flashrun.worker.transfer import Fetch, Refused, TransferError

_AT_ONCE = 16
_ANSWER_S = 5.0
_AGAIN_S = 0.1
_PIECE = 4 << 20  # bytes

_now = time.monotonic


class Others:
    """See the module.

    Args:
        mine: the ranks of this node.
        token: the job's secret.
        patience: s for an answer.
    """

    def __init__(self, mine: range, token: str, patience: float) -> None:
        self._mine = mine
        self._token = token
        self._patience = patience
        self._told = threading.Condition()
        self._addresses: Sequence[tuple[int, str]] = ()  # of each node, this one included
        self._pid = os.getpid()

    @classmethod
    def of(cls, environ: Mapping[str, str], token: str, patience: float) -> Others:
        first = int(environ["RANK"]) - int(environ["LOCAL_RANK"])
        return cls(range(first, first + int(environ["LOCAL_WORLD_SIZE"])), token, patience)

    def told(self, nodes: Mapping[str, str]) -> None:
        """Whom to ask: a rank of each node, and its data server."""
        with self._told:
            self._addresses = sorted((int(rank), address) for rank, address in nodes.items())
            self._told.notify_all()

    def numbers(self) -> list[int]:
        """The other nodes, by their number in the job."""
        if os.getpid() == self._pid:  # a fork has what there was, and nobody who tells it more
            with self._told:
                self._told.wait_for(lambda: bool(self._addresses), self._patience)
        if not self._addresses:
            raise Divergence(
                f"waited {self._patience:.0f} s for the addresses of the other nodes' workers from"
                " the agent, to ask them for the files they have changed; look into flashrun's own"
                " log for why it said nothing"
            )
        return [n for n, (rank, _) in enumerate(self._addresses) if rank not in self._mine]

    def name(self, number: int) -> str:
        """A node, for people."""
        rank, address = self._addresses[number]
        return f"the node of rank {rank} ({address.rpartition(':')[0]})"

    def ask(self, requests: Mapping[int, Message]) -> dict[int, Message]:
        """Ask several nodes side by side (number -> request).

        Raises:
            Divergence: no answer in time, or a refusal.
        """
        if len(requests) < 2:
            return {number: self._ask(number, request) for number, request in requests.items()}
        with ThreadPoolExecutor(min(_AT_ONCE, len(requests)), "flashrun-ask") as pool:
            answers = pool.map(self._ask, requests, requests.values())
            return dict(zip(requests, answers, strict=True))

    def copy(self, number: int, request: Message, path: str) -> Message:
        """Ask a node for the content of a file, whose ``size`` the answer has.

        Raises:
            Divergence: no answer in time, or a refusal.
            OSError: it can't be written.
        """

        def take(fetch: Fetch) -> None:
            with open(path, "wb") as file:
                fetch.into(_written(file, int(fetch.header["size"])))

        return self._ask(number, request, take)

    def _ask(
        self,
        number: int,
        request: Message,
        take: Callable[[Fetch], object] = lambda fetch: fetch.into(()),
    ) -> Message:
        end = _now() + self._patience
        while True:
            rank, address = self._addresses[number]
            try:
                fetch = Fetch(address, self._token, request, _ANSWER_S)
                take(fetch)
                return fetch.header
            except Refused as error:
                raise Divergence(f"{self.name(number)}: {error}") from error
            except TransferError as error:
                if _now() > end or os.getpid() != self._pid:
                    raise Divergence(
                        f"waited {self._patience:.0f} s for an answer of rank {rank} at {address}"
                        f" on which files its node has changed: {error}; is that node lost?"
                    ) from error
            self._await_another(number, (rank, address))

    def _await_another(self, number: int, known: tuple[int, str]) -> None:
        """For a moment, somebody else to ask on that node."""
        with self._told:
            self._told.wait_for(lambda: self._addresses[number] != known, _AGAIN_S)


def _written(file: Any, size: int) -> Iterator[memoryview]:
    """Room for `size` bytes, piece by piece; each is written once it is full."""
    while size:
        piece = bytearray(min(size, _PIECE))
        yield memoryview(piece)
        file.write(piece)
        size -= len(piece)
