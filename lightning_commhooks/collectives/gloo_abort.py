"""Ends collectives of a gloo group that are under way, which gloo itself offers no way to do.

`ProcessGroupGloo.abort()` and `shutdown()` do nothing (PyTorch 2.13), and a collective that waits for a peer returns
for a closed connection only.
"""

from __future__ import annotations

import functools
import logging
import os
import socket
import stat
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)

ADDRESS_BYTES = 128  # of one of the group's listeners


# How often devices are made until it is clear which listeners are theirs.
_ATTEMPTS = 10
Devices = list[dist.ProcessGroupGloo.Device]


def with_abort(
    make: Callable[[Devices], list[dist.ProcessGroup]], make_devices: Callable[[], Devices]
) -> tuple[list[dist.ProcessGroup], Callable[[], None]]:
    """New gloo groups, and what aborts them from any thread: collectives fail at once, here and on waiting peers.

    Collective. The function that aborts does not keep the groups alive. It does nothing where it cannot tell which
    connections are the groups'; peers then wait for their timeout.

    Args:
        make: makes the groups, of the same ranks.
        make_devices: makes gloo's devices for them, one for each network interface, each of which listens.
    """
    devices, mine = _listening_devices(make_devices)
    groups = make(devices)
    return groups, functools.partial(_shut_down, mine, _gather_addresses(groups[0], mine, len(devices)))


def _listening_devices(make: Callable[[], Devices]) -> tuple[Devices, set[str]]:
    """Devices, and where they listen; again when another thread has begun to listen meanwhile."""
    for _ in range(_ATTEMPTS):
        before = _listening()
        devices = make()
        mine = _listening() - before
        if len(mine) == len(devices):
            return devices, mine
    logger.info("after a failure here, other ranks wait for the timeout of the process group: unknown listeners")
    return devices, set()


def _gather_addresses(own: dist.ProcessGroup, mine: set[str], num_listeners: int) -> set[str]:
    """Where the ranks of a gloo group listen for each other; every connection of the group has one such end."""
    text = bytearray("\n".join(mine).encode().ljust(ADDRESS_BYTES * num_listeners))
    gathered = [torch.empty(len(text), dtype=torch.uint8) for _ in range(own.size())]
    dist.all_gather(gathered, torch.frombuffer(text, dtype=torch.uint8), group=own)
    return {address.strip() for part in gathered for address in bytes(part.tolist()).decode().split("\n")} - {""}


def _shut_down(mine: set[str], listeners: set[str]) -> None:
    # A connection is not ours to close, but may be shut down under gloo's hands.
    for connection in _tcp_sockets():
        try:
            if _address(connection.getpeername()) in listeners or _address(connection.getsockname()) in mine:
                connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # listens, and must go on doing so: gloo aborts the process if it cannot
            continue


def _listening() -> set[str]:
    """Addresses on which this process accepts TCP connections."""
    addresses = set()
    for connection in _tcp_sockets():
        try:
            if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                addresses.add(_address(connection.getsockname()))
        except OSError:  # closed meanwhile
            continue
    return addresses


def _address(name: tuple[str, int]) -> str:
    return f"{name[0]} {name[1]}"


def _tcp_sockets() -> Iterator[socket.socket]:
    """All TCP sockets of this process, whoever opened them; none where the system does not list them."""
    try:
        descriptors = os.listdir("/dev/fd")
    except OSError:
        return
    for descriptor in map(int, descriptors):
        try:
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            blocking = os.get_blocking(descriptor)
            view = socket.socket(fileno=descriptor)
        except OSError:  # closed meanwhile
            continue
        try:
            if socket.getdefaulttimeout() is not None:
                os.set_blocking(descriptor, blocking)  # the view has changed it
            if view.type == socket.SOCK_STREAM and view.family in (socket.AF_INET, socket.AF_INET6):
                yield view
        finally:
            view.detach()
