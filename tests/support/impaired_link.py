"""A cable that delays and loses Ethernet frames, for `Cluster.impair`: two TAP devices and this process between them.

A kernel's netem would do the same; the kernels of small virtual machines are built without it.
Run as `python impaired_link.py DEVICE DEVICE DELAY_MS LOSS`; it says "ready" when the devices are there.
"""

import fcntl
import heapq
import os
import random
import select
import struct
import sys
import time
from contextlib import suppress

TUNSETIFF = 0x400454CA
IFF_TAP = 0x0002
IFF_NO_PI = 0x1000


def tap(name: str) -> int:
    """A descriptor that reads what leaves through a new device of this name, and writes what arrives there."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    # No offloads are asked for, so the kernel cuts and sums packets before they come here.
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TAP | IFF_NO_PI))
    return device


def relay(one: int, other: int, delay: float, loss: float) -> None:
    """Pass frames both ways, each after `delay` seconds or, with probability `loss`, never."""
    chance = random.Random(7)
    across = {one: other, other: one}
    waiting: list[tuple[float, int, int, bytes]] = []
    count = 0
    while True:
        limit = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for device in select.select([one, other], [], [], limit)[0]:
            frame = os.read(device, 65536)
            if chance.random() >= loss:
                count += 1
                heapq.heappush(waiting, (time.monotonic() + delay, count, across[device], frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, device, frame = heapq.heappop(waiting)
            with suppress(OSError):  # a device that is down, or full, loses frames as a real one does
                os.write(device, frame)


if __name__ == "__main__":
    ends = tap(sys.argv[1]), tap(sys.argv[2])
    print("ready", flush=True)
    relay(*ends, float(sys.argv[3]) / 1000, float(sys.argv[4]))
