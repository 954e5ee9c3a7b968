"""The listening socket and the server of a TCPStore, bound where flashrun says.

torch binds a TCPStore to every interface; a socket of our own, handed over as
``master_listen_fd``, is bound to one address. The server runs in a process of its own (the store
process), so that it outlives the agent.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from datetime import timedelta

import psutil
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not in __all__

from flashrun.rendezvous.endpoint import join_host_port

_BACKLOG = 2048


class StoreInUse(RuntimeError):
    """The port is taken; the message names who holds it and what to do."""


class StoreNotBound(RuntimeError):
    """The address can't be listened on at all; the message says why and what to do."""


def open_listener(host: str, port: int) -> socket.socket:
    """Bind and listen on ``host`` (numeric; ``::`` means every interface, both families).

    Args:
        port: 0 picks a free one.

    Raises:
        StoreInUse: another socket listens there.
        StoreNotBound: not an address of this machine, no permission, …
    """
    if host == "::" and not socket.has_ipv6:
        host = "0.0.0.0"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    except OSError as error:
        if host == "::" and error.errno == errno.EAFNOSUPPORT:  # a kernel without IPv6
            return open_listener("0.0.0.0", port)
        raise StoreNotBound(f"No socket for {join_host_port(host, port)}: {error}") from error
    try:
        # A port in TIME_WAIT from the job before is not in use.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(host != "::"))
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        where = join_host_port(host, port)
        if error.errno == errno.EADDRINUSE:
            raise StoreInUse(
                f"Port {port} on {host} is already in use by {port_owner(port)}. "
                "End that process, or choose another port (--master-port / --rdzv-endpoint); "
                "port 0 or --standalone picks a free one for a job on one node."
            ) from error
        if error.errno == errno.EADDRNOTAVAIL:
            raise StoreNotBound(
                f"Can't listen on {where}: that is not an address of this machine. "
                "Give an address of the node that is to host the store (node rank 0)."
            ) from error
        raise StoreNotBound(f"Can't listen on {where}: {error.strerror}.") from error
    return listener


def port_owner(port: int) -> str:
    """Who listens on TCP ``port``, in words; as much as this user may see."""
    try:
        connections = psutil.net_connections(kind="tcp")
    except (psutil.Error, OSError):
        return "a process that this user may not see"
    for connection in connections:
        if connection.status != psutil.CONN_LISTEN or not connection.laddr:
            continue
        if connection.laddr.port != port:
            continue
        if connection.pid is None:
            return "a process of another user or container"
        try:
            process = psutil.Process(connection.pid)
            # The program's name only: a command line may hold secrets.
            return f"process {connection.pid} ({process.name()}, user {process.username()})"
        except psutil.Error:
            return f"process {connection.pid}"
    return "a process of another user or container"


def serve(listener: socket.socket, timeout_s: float = 300.0) -> TCPStore:
    """Start a TCPStore server on ``listener``; the server owns its descriptor from now on.

    Keep the returned object: the server ends with it. ``listener`` is detached.
    """
    host, port = listener.getsockname()[:2]
    connect_to = {"::": "::1", "0.0.0.0": "127.0.0.1"}.get(host, host)
    return TCPStore(
        connect_to,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=_give_away(listener),
    )


def look_up_no_names() -> None:
    """For a process that only serves stores: torch asks the name service for the name of each peer
    that connects, one after the other, which takes seconds each where it does not answer (torch
    2.13: socket.cpp, formatSockAddr). With this (glibc) it asks the hosts file alone."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "__nss_configure_lookup"):
        libc["__nss_configure_lookup"](b"hosts", b"files")


def _give_away(listener: socket.socket) -> int:
    """The descriptor without its Python owner, so that it is closed once, by the server."""
    descriptor = listener.detach()
    os.set_inheritable(descriptor, False)
    return descriptor
