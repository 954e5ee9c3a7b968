"""Endpoints ``host:port`` as torch reads them, and whether a host is this machine, without DNS."""

from __future__ import annotations

import ipaddress
import queue
import socket
import threading
from dataclasses import dataclass

import psutil

C10D_PORT = 29400
"""Default port of torch's c10d backend (``c10d_rendezvous_backend.DEFAULT_PORT``)."""


class EndpointError(ValueError):
    """An endpoint that can't be understood or resolved; the message says what would be right."""


@dataclass(frozen=True)
class Endpoint:
    """Where a store is: ``host`` without brackets, ``port``, and ``text`` as the user wrote it."""

    host: str
    port: int
    text: str

    def __str__(self) -> str:
        return join_host_port(self.host, self.port)


def join_host_port(host: str, port: int) -> str:
    """``host:port`` with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_endpoint(text: str | None, default_port: int) -> Endpoint:
    """Read ``host``, ``host:port``, ``[v6]``, ``[v6]:port`` or a bare IPv6 address.

    As ``torch.distributed.elastic.rendezvous.utils.parse_rendezvous_endpoint``, except for a bare
    IPv6 address: torch takes its last group for a port. Both readings of ``fe80::1:29400`` are
    valid; a text that is an IPv6 address as a whole is taken as an address.

    Raises:
        EndpointError: for anything else.
    """
    given = (text or "").strip()
    if _is_ipv6(given):
        return Endpoint(given, default_port, given)
    # Late: a client of etcd has no other use for torch, which takes seconds to import.
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    try:
        host, port = parse_rendezvous_endpoint(given, default_port)
    except ValueError as error:
        what = str(error).replace("65536", "65535")  # torch's words, which mean that
        raise EndpointError(f"{what} Right would be HOST:PORT, [IPV6]:PORT or HOST.") from error
    return Endpoint(host, port, given)


def _is_ipv6(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False


def numeric_address(host: str) -> str | None:
    """``host`` when it is an IP address already (``localhost`` counts: 127.0.0.1), else None."""
    if host == "localhost":
        return "127.0.0.1"
    try:
        ipaddress.ip_address(host.split("%", 1)[0])
    except ValueError:
        return None
    return host


def is_loopback(host: str) -> bool:
    """Whether ``host`` is ``localhost`` or a loopback address; never asks DNS."""
    address = numeric_address(host)
    return address is not None and ipaddress.ip_address(address.split("%", 1)[0]).is_loopback


def own_addresses() -> frozenset[str]:
    """The numeric addresses of this machine's interfaces, without scope ids."""
    return frozenset(
        entry.address.split("%", 1)[0]
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    )


def resolve(host: str, deadline_s: float = 10.0) -> list[str]:
    """The numeric addresses of ``host``, in the order of the system's resolver.

    A name is looked up in a thread of its own, since ``getaddrinfo`` has no timeout.

    Raises:
        EndpointError: the name is unknown, or no answer came within ``deadline_s`` seconds.
    """
    address = numeric_address(host)
    if address is not None:
        return [address]
    answer: queue.SimpleQueue[list[str] | OSError] = queue.SimpleQueue()

    def look_up() -> None:
        try:
            found = socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)
            answer.put([str(entry[4][0]) for entry in found])
        except OSError as error:
            answer.put(error)

    threading.Thread(target=look_up, name=f"resolve {host}", daemon=True).start()
    try:
        result = answer.get(timeout=deadline_s)
    except queue.Empty:
        raise EndpointError(
            f"The name '{host}' was not resolved within {deadline_s:g} s. "
            "Give the numeric address of that host instead, or mend the name service."
        ) from None
    if isinstance(result, OSError):
        raise EndpointError(
            f"The name '{host}' can't be resolved ({result.strerror or result}). "
            "Give the numeric address of that host instead."
        )
    return list(dict.fromkeys(result))


def is_local(host: str, local_addr: str | None = None, deadline_s: float = 10.0) -> bool:
    """Whether ``host`` is this machine (torch: ``_matches_machine_hostname``).

    Asked without DNS first: ``localhost``, loopback, the given ``local_addr``, the addresses of the
    machine's interfaces, the machine's own host name. Only another name is looked up.
    A name that does not resolve is not this machine.
    """
    if is_loopback(host) or host == local_addr or host == socket.gethostname():
        return True
    own = own_addresses()
    address = numeric_address(host)
    if address is not None:
        return address.split("%", 1)[0] in own
    try:
        found = resolve(host, deadline_s)
    except EndpointError:
        return False
    return any(is_loopback(a) or a.split("%", 1)[0] in own for a in found)


def reached_at(listen: str) -> str:
    """By which address this machine itself reaches what listens at `listen` (`listen_address`)."""
    return "127.0.0.1" if listen == "::" else listen


def listen_address(host: str, several_nodes: bool, deadline_s: float = 10.0) -> str:
    """Where the hosting node listens for an endpoint at ``host``: never wider than needed.

    A numeric address or ``localhost`` is taken as it is, a name by what it resolves to here. With
    several nodes the wildcard ``::`` is needed where that is loopback (Debian maps a machine's own
    name to 127.0.1.1) or not an address of this machine (a NAT or virtual address in front of it).

    Raises:
        EndpointError: the name can't be resolved; the workers could not reach it either.
    """
    address = numeric_address(host)
    own = own_addresses()
    if address is not None and (is_loopback(address) or address.split("%", 1)[0] in own):
        return address
    candidates = resolve(host, deadline_s)
    for candidate in candidates:
        if candidate in own and (not several_nodes or not is_loopback(candidate)):
            return candidate
    if several_nodes:
        return "::"
    loopback = [c for c in candidates if is_loopback(c)]
    return (loopback or candidates)[0]  # one that is not ours is refused by open_listener
