"""The store host: one process that keeps the job's TCPStore, so that a dying agent does not take it
along; on each node of several another one that keeps the node's bootstrap shard (workers build
every process group through these)."""

from __future__ import annotations

import socket

from flashrun.node.wire import Wire
from flashrun.rendezvous.server import (
    StoreInUse,
    StoreNotBound,
    look_up_no_names,
    open_listener,
    serve,
)


def serve_store(wire: Wire, host: str, port: int) -> None:
    """Listen, tell the supervisor the port, and stay until the supervisor is gone.

    Args:
        wire: to the supervisor; gets ``store`` (port) or ``store-failed`` (error, in_use).
        host: numeric address to bind; ``::`` for all.
        port: 0 for a free one.
    """
    try:
        listener = open_listener(host, port)
    except (StoreInUse, StoreNotBound) as error:
        in_use = isinstance(error, StoreInUse)
        wire.send({"op": "store-failed", "error": str(error), "in_use": in_use})
        return
    bound = listener.getsockname()[1]
    look_up_no_names()
    server = serve(listener)
    wire.send({"op": "store", "host": host, "port": bound})
    while wire.receive() is not None:
        pass
    del server


def serve_shard(wire: Wire, listener: socket.socket) -> None:
    """Serve this node's shard of the bootstrap store until the supervisor is gone."""
    look_up_no_names()
    server = serve(listener)
    while wire.receive() is not None:
        pass
    del server
