"""Imports the etcd client and gRPC, for the modules here; import them from nowhere else.

gRPC reads two variables once, when it is loaded. What its C++ prints, the errors say anyway; its
handlers for forks, which print a line at forks of this process, are for clients that are used
across a fork, which ours never are.
"""

from __future__ import annotations

import os

from flashrun.rendezvous.kv import StoreRefused

__all__ = ["Endpoint", "grpc", "rpc"]

_QUIET = {"GRPC_VERBOSITY": "NONE", "GRPC_ENABLE_FORK_SUPPORT": "0"}
_set = {name: value for name, value in _QUIET.items() if name not in os.environ}
os.environ.update(_set)
try:
    import grpc
    from etcd3 import Endpoint
    from etcd3 import etcdrpc as rpc

    grpc.insecure_channel("127.0.0.1:1").close()  # starts it; connects to nothing
except ImportError as error:
    raise StoreRefused(
        f"The etcd client is not installed ({error}): pip install 'flashrun[etcd]'."
    ) from error
finally:
    for _name in _set:  # workers get the environment as it was
        os.environ.pop(_name, None)
