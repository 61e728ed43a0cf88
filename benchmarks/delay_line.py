"""A switch whose packets arrive later, or never: for kernels without `sch_netem`. Runs in a network namespace.

    python benchmarks/delay_line.py 10 0.001 port0 port1

Forwards every Ethernet frame from one of the interfaces to the one its destination is behind, so many milliseconds
later, but for such a share of them, taken at random. Frames of up to 64 KB that a (virtual) network card would segment
stay whole, with their header for that (`virtio_net_hdr`), so a few thousand frames per second carry 1 Gbit/s.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import random
import select
import socket
import sys
import time

_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 263, 15, 23
_ETH_P_ALL = 0x0003
_VNET_HEADER = 10  # bytes before each frame
_LARGEST = _VNET_HEADER + 70_000


def port(interface: str) -> socket.socket:
    """Receives what arrives at an interface, and sends from it."""
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
    opened.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    opened.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        with contextlib.suppress(OSError):
            opened.setsockopt(socket.SOL_SOCKET, option + 25, 64 << 20)  # SO_RCVBUFFORCE, SO_SNDBUFFORCE
    opened.bind((interface, 0))
    return opened


def forward(seconds: float, loss: float, interfaces: list[str]) -> None:
    """For ever."""
    ports = [port(interface) for interface in interfaces]
    behind: dict[bytes, socket.socket] = {}
    chance = random.Random(0)
    # All are late by as much, so first in, first out.
    waiting: collections.deque[tuple[float, socket.socket, bytes]] = collections.deque()
    while True:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for source in select.select(ports, [], [], timeout)[0]:
            frame = source.recv(_LARGEST)
            behind[frame[_VNET_HEADER + 6 : _VNET_HEADER + 12]] = source
            if chance.random() >= loss:
                waiting.append((time.monotonic() + seconds, source, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, source, frame = waiting.popleft()
            target = behind.get(frame[_VNET_HEADER : _VNET_HEADER + 6])
            for other in [target] if target is not None else [p for p in ports if p is not source]:
                try:
                    other.send(frame)
                except OSError as error:
                    if error.errno not in (errno.ENETDOWN, errno.ENXIO):  # interfaces go away at the end
                        raise


if __name__ == "__main__":
    forward(float(sys.argv[1]) / 1e3, float(sys.argv[2]), sys.argv[3:])
