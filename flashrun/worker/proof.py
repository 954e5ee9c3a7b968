"""Replicas are proved, not assumed: when a rank hashes its state, and how.

At the first two boundaries, since what has to differ between two averagings of local SGD may be
equal at one of them; later at pairs of boundaries that become rarer, since replicas may begin to
differ; at every recovery before a donor is trusted; and at the two boundaries after one, when the
replacement must have become what its peers are.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flashrun.worker.checksum import checksum_of
from flashrun.worker.state import as_bytes, plain

RARELY = 1024  # boundaries from one pair to the next in the end
AFTER_RECOVERY = 2  # boundaries at which the ranks are compared
CONFIRM = 10.0  # s to wait for the comparison; it goes on without the script then


def due(boundary: int) -> bool:
    """Whether to prove at this boundary: 1, then 2, 3, 4, 5, 8, 9, 16, 17, …, 1024, 1025, 2048, …

    Two in a row, since one of them may be that of an averaging.
    """
    first = boundary & ~1
    return boundary > 0 and (first & (first - 1) == 0 or first % RARELY == 0)


def digest(tensor: torch.Tensor) -> str:
    """A hash of the content."""
    return f"{checksum_of(as_bytes(plain(tensor))):016x}"


def digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in tensors.items()}
