"""Rings at nodes that are missed (:mod:`flashrun.node.doorbell`)."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from flashrun.rendezvous.endpoint import join_host_port
from flashrun.rendezvous.table import NodeRanks

T = TypeVar("T")

_TRY_S = 1.0
_TRIES = 2
_AT_ONCE = 32
_NO_ANSWER = (errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT)


def _ring(node: NodeRanks) -> None:
    """Raises OSError: it does not answer."""
    socket.create_connection((node.addr, node.alive), _TRY_S).close()


def nobody_there(node: NodeRanks) -> str | None:
    """Why a node counts as lost; None: it answers, or has no bell."""
    if not node.alive:
        return None
    where = join_host_port(node.addr, node.alive)
    for _ in range(_TRIES):
        try:
            _ring(node)
        except ConnectionRefusedError:
            return f"{where} refuses connections"
        except OSError as error:
            if not (isinstance(error, TimeoutError) or error.errno in _NO_ANSWER):
                return None  # our own trouble (names, descriptors, no network) is no sign
            problem = str(error)
        else:
            return None
    return f"no answer from {where}: {problem}"


def _answers(node: NodeRanks) -> bool:
    for _ in range(_TRIES):
        try:
            _ring(node)
        except OSError:
            continue
        return True
    return False


def _of_each(nodes: Sequence[NodeRanks], ask: Callable[[NodeRanks], T]) -> dict[str, T]:
    """What ``ask`` gives for each of ``nodes``, side by side, by id."""
    if not nodes:
        return {}
    with ThreadPoolExecutor(min(_AT_ONCE, len(nodes)), "ring") as pool:
        return dict(zip([node.node for node in nodes], pool.map(ask, nodes), strict=True))


def unanswered(nodes: Iterable[NodeRanks]) -> frozenset[str]:
    """Those of ``nodes`` to which there is no way from here, for whatever reason, by id."""
    answers = _of_each([node for node in nodes if node.alive], _answers)
    return frozenset(node for node, answered in answers.items() if not answered)


def lost_nodes(nodes: Iterable[NodeRanks]) -> dict[str, str]:
    """Those of ``nodes`` that are lost, by id, with the reason."""
    reasons = _of_each(list(nodes), nobody_there)
    return {node: why for node, why in reasons.items() if why is not None}
