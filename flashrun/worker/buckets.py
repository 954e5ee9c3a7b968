"""How DDP modules have put their gradients into buckets, for the comparison before a rank goes live
(rule 10).

After its first backward a DDP module rebuilds its buckets in the order in which gradients became
ready, and rank 0 tells the others which that was. A catch-up hears of nobody, so where that order
differs between ranks, a replacement's buckets are others: its gradients would be added to those of
other parameters. It rebuilds them in its next forward, which is a collective: so whether there was
such a backward is compared as well.

Relied on in torch 2.13: `Logger` records the rebuilt buckets, and the order before, in a module's
first ten forwards and in each hundredth (logger.cpp, set_runtime_stats_and_log); asking takes the
reducer's lock, which its hooks hold in backward.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterable, Mapping

import torch
from torch.nn.parallel import DistributedDataParallel

from flashrun import messages

NOT_YET = messages.BUCKETS_NOT_REBUILT
_ORDER = "prev_iteration_grad_ready_order_indices"
_FIELDS = "rebuilt_bucket_sizes", "rebuilt_per_bucket_param_indices"


class Buckets:
    """Those of the DDP modules of this rank."""

    def __init__(self) -> None:
        self._modules: list[weakref.ref[DistributedDataParallel]] = []
        self._known: list[str | None] = []

    def note(self, modules: Iterable[DistributedDataParallel]) -> None:
        """These are the modules that there are."""
        before = {id(ref()): known for ref, known in zip(self._modules, self._known, strict=True)}
        found = list(modules)
        self._modules = [weakref.ref(module) for module in found]
        self._known = [before.get(id(module)) for module in found]

    def now(self, look: bool) -> list[str | None]:
        """Per module: one of `NOT_YET` before it has rebuilt its buckets (one rank doing so alone
        would hang), the second if it will in its next forward; then a hash of what is in which;
        None while that is unknown.

        Args:
            look: into what is unknown (some µs).
        """
        found: list[str | None] = []
        for at, ref in enumerate(self._modules):
            module = ref()
            if module is None:
                continue
            if not module._has_rebuilt_buckets:
                found.append(NOT_YET[_will_rebuild(module)])
                continue
            if look and self._known[at] is None:
                self._known[at] = _look(module)
            found.append(self._known[at])
        return found


def _told(module: DistributedDataParallel) -> Mapping[str, str]:
    if torch._C._current_graph_task_id() != -1:
        return {}  # a step in backward, which may hold the lock
    logger = module.logger
    if logger is None:
        return {}
    logger.set_runtime_stats_and_log()
    told: Mapping[str, str] = logger._get_ddp_logging_data().strs_map
    return told


def has_yet_to_rebuild(module: DistributedDataParallel) -> bool:
    """Whether a module is to rebuild its buckets some day, which takes a backward and a forward
    after it (nn/parallel/distributed.py:1775; never where it looks for unused parameters,
    reducer.hpp, should_rebuild_buckets)."""
    return not module._has_rebuilt_buckets and (
        module.static_graph or not module.find_unused_parameters
    )


def _will_rebuild(module: DistributedDataParallel) -> bool:
    """In its next forward."""
    return has_yet_to_rebuild(module) and _ORDER in _told(module)


def _look(module: DistributedDataParallel) -> str | None:
    told = _told(module)
    if any(field not in told for field in _FIELDS):
        return None
    text = "\n".join(told[field] for field in _FIELDS)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
