"""Rings at nodes that are missed (:mod:`flashrun.node.doorbell`)."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from flashrun.rendezvous.endpoint import join_host_port
from flashrun.rendezvous.table import NodeRanks

T = TypeVar("T")

_TRY_S = 1.0
_TRIES = 2
_AT_ONCE = 128
_NO_ANSWER = (errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT)


@dataclass(frozen=True)
class Nobody:
    """A node does not answer.

    Attributes:
        gone: nothing of it is left; otherwise it may live, and be cut off.
    """

    why: str
    gone: bool


def _ring(node: NodeRanks, try_s: float = _TRY_S) -> None:
    """Raises OSError: it does not answer."""
    with socket.create_connection((node.addr, node.alive), try_s) as connection:
        # For a supervisor that stands still the kernel takes the call; who lives hangs up.
        connection.recv(1)


def nobody_there(node: NodeRanks, try_s: float = _TRY_S) -> Nobody | None:
    """Why a node seems to be lost; None: it answers, or has no bell."""
    if not node.alive:
        return None
    where = join_host_port(node.addr, node.alive)
    for _ in range(_TRIES):
        try:
            _ring(node, try_s)
        except ConnectionRefusedError:
            return Nobody(f"{where} refuses connections", gone=True)
        except OSError as error:
            if not (isinstance(error, TimeoutError) or error.errno in _NO_ANSWER):
                return None  # our own trouble (names, descriptors, no network) is no sign
            problem = str(error)
        else:
            return None
    return Nobody(f"no answer from {where}: {problem}", gone=False)


def _answers(node: NodeRanks, try_s: float) -> bool:
    for _ in range(_TRIES):
        try:
            _ring(node, try_s)
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


def unanswered(nodes: Iterable[NodeRanks], try_s: float = _TRY_S) -> frozenset[str]:
    """Those of ``nodes`` to which there is no way from here, for whatever reason, by id."""
    answers = _of_each([node for node in nodes if node.alive], lambda n: _answers(n, try_s))
    return frozenset(node for node, answered in answers.items() if not answered)


def some(nodes: Sequence[NodeRanks]) -> Sequence[NodeRanks]:
    """No more of them than can be asked side by side, drawn by lot."""
    return nodes if len(nodes) <= _AT_ONCE else random.sample(nodes, _AT_ONCE)


def out_of_reach(host: str, port: int, try_s: float) -> str | None:
    """Why there is no way to a server's machine, None where there is one. (One that has ended, or
    stands still, is another matter.)"""
    problem = ""
    for _ in range(_TRIES):
        try:
            socket.create_connection((host, port), try_s).close()
        except ConnectionRefusedError:
            return None
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                return None
            problem = str(error)
        else:
            return None
    return f"{join_host_port(host, port)} cannot be reached ({problem})"


def lost_nodes(nodes: Iterable[NodeRanks], try_s: float = _TRY_S) -> dict[str, Nobody]:
    """Those of ``nodes`` that seem to be lost, by id, with the reason."""
    reasons = _of_each(list(nodes), lambda node: nobody_there(node, try_s))
    return {node: why for node, why in reasons.items() if why is not None}
