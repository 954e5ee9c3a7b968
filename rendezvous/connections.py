"""Connections to the servers of many nodes, each opened when it is first needed: what it costs a
process to begin does not grow with the cluster."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")

_PARALLEL = 16  # that are opened at the same time


class Connections(Generic[T]):
    """By number of the node.

    Args:
        count: of nodes.
        open_one: opens the connection to one of them.
    """

    def __init__(self, count: int, open_one: Callable[[int], T]) -> None:
        self._open_one = open_one
        self._open: dict[int, T] = {}
        self._locks = [threading.Lock() for _ in range(count)]

    def __getitem__(self, node: int) -> T:
        with self._locks[node]:
            found = self._open.get(node)
            if found is None:
                found = self._open[node] = self._open_one(node)
            return found

    def open(self, nodes: Iterable[int]) -> None:
        """Open several side by side."""
        missing = [node for node in nodes if node not in self._open]
        if len(missing) < 2:
            return  # whoever needs it opens it
        with ThreadPoolExecutor(_PARALLEL, thread_name_prefix="flashrun-connect") as pool:
            for future in [pool.submit(self.__getitem__, node) for node in missing]:
                future.result()

    def opened(self) -> dict[int, T]:
        """Those that there are."""
        return dict(self._open)

    def drop(self, node: int) -> None:
        """Who needs it next opens another one."""
        self._open.pop(node, None)
