"""A worker keeps the memory that a step frees, for the next step.

glibc gives the free end of the heap back to the kernel (``M_TRIM_THRESHOLD``, mallopt(3): 128 kB,
or twice the largest block that was freed from a mapping of its own, 64 MB at most). The tensors of
a step come and go at that end, so that each step may fault hundreds of pages in again, and whether
it does is a matter of what lies where. What flashrun itself allocates must not tip that, so the
limit is one that a step seldom reaches. Without these faults a step takes less time than under
torchrun, from some milliseconds on (``benchmarks/recovery.py cost``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

KEPT = 256 << 20  # bytes at the end of the heap that are kept at most
# Larger blocks are mapped each for itself; the most that mallopt takes, and that glibc itself comes
# to. It must be given: a trim threshold that is set stops glibc from adapting this one.
MAPPED = 32 << 20

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_GIVEN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")  # mallopt(3)


def keep_freed_memory(environ: Mapping[str, str]) -> bool:
    """Have this process and its children keep what is freed at the end of the heap.

    Not where the user has set any of this: ``MALLOC_*_``, or ``glibc.malloc`` in GLIBC_TUNABLES.

    Returns:
        Whether the allocator has taken it (another C library has no ``mallopt``).
    """
    if "glibc.malloc" in environ.get("GLIBC_TUNABLES", "") or not environ.keys().isdisjoint(_GIVEN):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, MAPPED) and mallopt(_TRIM_THRESHOLD, KEPT))
