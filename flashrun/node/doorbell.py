"""A node's doorbell: a port that answers while the job's supervisor lives.

The agent may be restarted at any time, so it is no sign of the node's life; nothing of a job
outlives its supervisor. Peers that miss a node ring here: nobody at the door means that it is
lost, well before its heartbeat or a lease would tell.
"""

from __future__ import annotations

import selectors

from flashrun.rendezvous.server import open_listener


class Doorbell:
    """See the module.

    Args:
        host: to listen on; numeric, ``::`` for all interfaces.
        selector: of the supervisor's loop.

    Raises:
        StoreNotBound: ``host`` is not an address of this machine, and the like.
    """

    def __init__(self, host: str, selector: selectors.BaseSelector) -> None:
        self._listener = open_listener(host, 0)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        selector.register(self._listener, selectors.EVENT_READ, self._on_ring)

    def _on_ring(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # who rang has gone
        connection.close()

    def close(self) -> None:
        """In a fork: its copy of the socket would answer for a supervisor that is dead."""
        self._listener.close()
