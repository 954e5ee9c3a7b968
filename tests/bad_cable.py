"""A cable that delays and loses frames: ``-m tests.bad_cable LINK FAR SECONDS SHARE SEED``.

What ``tc netem`` does, for kernels that have none. It makes two TAP devices in its network
namespace: LINK stays there as the node's interface, FAR is moved to the switch by whoever started
it (the descriptor goes along). Each frame that comes in at one goes out at the other after 0.5 to
1.5 times SECONDS, in order, or, with probability SHARE, never. A TAP device hands out whole frames
with their checksums, so nothing is to be turned off. Says ``ready`` when the devices are there.
"""

from __future__ import annotations

import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque
from contextlib import suppress

_SET_NAME = 0x400454CA  # TUNSETIFF
_TAP_WITHOUT_HEADER = 0x0002 | 0x1000  # IFF_TAP | IFF_NO_PI


def tap(name: str) -> int:
    """Make the device; its descriptor. It is gone when that is closed."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _SET_NAME, struct.pack("16sH22x", name.encode(), _TAP_WITHOUT_HEADER))
    return fd


def relay(ends: tuple[int, int], delay: float, lost: float, seed: int) -> None:
    """Pass frames on between the two, until killed."""
    draw = random.Random(seed)
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    queues: dict[int, deque[tuple[float, bytes]]] = {end: deque() for end in ends}  # to where
    poller = select.poll()
    for end in ends:
        poller.register(end, select.POLLIN)
    while True:
        due = min((queue[0][0] for queue in queues.values() if queue), default=None)
        wait = None if due is None else max(due - time.monotonic(), 0) * 1e3
        for end, _ in poller.poll(wait):
            with suppress(BlockingIOError):
                while True:
                    frame = os.read(end, 65536)
                    queue = queues[other[end]]
                    if draw.random() >= lost:
                        at = time.monotonic() + delay * draw.uniform(0.5, 1.5)
                        queue.append((max(at, queue[-1][0] if queue else 0), frame))
        now = time.monotonic()
        for end, queue in queues.items():
            while queue and queue[0][0] <= now:
                with suppress(OSError):  # it is down (the cable is cut), or its queue is full
                    os.write(end, queue[0][1])
                queue.popleft()


def main() -> None:
    link, far, delay, lost, seed = sys.argv[1:]
    ends = tap(link), tap(far)
    print("ready", flush=True)
    relay(ends, float(delay), float(lost), int(seed))


if __name__ == "__main__":
    main()
