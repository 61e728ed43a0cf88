"""Ends collectives of a gloo group that are under way, which gloo itself offers no way to do.

`ProcessGroupGloo.abort()` and `shutdown()` do nothing (PyTorch 2.13), and a collective that waits for a peer returns
for a closed connection only. Not even then if just that message was on its way: gloo's `Pair::signalException` passes
over the message that it is sending, and over the one that it is receiving, and whoever waits for one of them waits for
the timeout of the group. So connections tell here whether one is lost.
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import stat
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)

ADDRESS_BYTES = 128  # of one of the group's listeners
# In `struct tcp_info`: tcpi_bytes_acked and tcpi_bytes_received.
_TCP_INFO_BYTES, _BYTES_IN_TCP_INFO = 136, slice(120, 136)

# How often devices are made until it is clear which listeners are theirs.
_ATTEMPTS = 10
Devices = list[dist.ProcessGroupGloo.Device]


class Connections:
    """Connections between the ranks of a group, for any thread; does nothing for a backend that tells nothing of it."""

    def abort(self) -> None:
        """Make collectives fail at once, here and on the peers that wait for this rank."""

    def fail(self) -> None:
        """As `abort`, after a failure: collectives may be under way."""
        self.abort()

    def let_go(self) -> None:
        """After `fail`, when nobody waits any more: let go of what was kept because something may be under way."""

    def without_a_peer(self) -> object | None:
        """`None` while all peers are there; then how much the others have sent and received, to be compared."""
        return None


class GlooConnections(Connections):
    """The TCP connections of gloo groups. Does not keep the groups alive.

    Without listeners it cannot tell which connections are the group's, and does nothing; peers then wait for their
    timeout.

    Args:
        groups: which, of the same ranks.
        mine: addresses where this rank listens.
        listeners: addresses where all ranks listen; every connection of the groups has one such end.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup], mine: set[str], listeners: set[str]) -> None:
        self.groups = [weakref.ref(group) for group in groups]
        self.mine, self.listeners = mine, listeners
        self._kept: list[dist.ProcessGroup] = []
        # Descriptors come again for other files, with another number.
        self._files = {(one.fileno(), os.fstat(one.fileno()).st_ino) for one in self._open()} if mine else set()

    def fail(self) -> None:
        for one in self.groups:
            if (group := one()) is not None:
                # At exit too: when gloo destroys a group it waits for its collectives, of which one may never end.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
                self._kept.append(group)
        self.groups.clear()
        self.abort()

    def let_go(self) -> None:
        kept, self._kept = self._kept, []
        for group in kept:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(group))
        # PyTorch destroys groups without holding the interpreter, so that only this thread waits if one does not end.
        threading.Thread(target=kept.clear, name="lightning_commhooks end", daemon=True).start()

    def abort(self) -> None:
        # A connection is not ours to close, but may be shut down under gloo's hands.
        for connection in self._open():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def without_a_peer(self) -> object | None:
        # Gloo closes a connection when the peer has closed it.
        if all(_file_number(descriptor) == number for descriptor, number in self._files):
            return None
        return sorted((one.fileno(), _num_bytes(one)) for one in self._open())

    def _open(self) -> Iterator[socket.socket]:
        for connection in _tcp_sockets():
            try:
                is_ours = _address(connection.getpeername()) in self.listeners
                is_ours = is_ours or _address(connection.getsockname()) in self.mine
            except OSError:  # listens, and must go on doing so: gloo aborts the process if it cannot
                continue
            if is_ours:
                yield connection


class AllConnections(Connections, list[Connections]):
    """Those of several groups."""

    def abort(self) -> None:
        for one in tuple(self):
            one.abort()

    def fail(self) -> None:
        for one in tuple(self):
            one.fail()

    def let_go(self) -> None:
        for one in tuple(self):
            one.let_go()

    def without_a_peer(self) -> object | None:
        states = [one.without_a_peer() for one in tuple(self)]
        return states if any(state is not None for state in states) else None


def with_connections(
    make: Callable[[Devices], list[dist.ProcessGroup]], make_devices: Callable[[], Devices]
) -> tuple[list[dist.ProcessGroup], GlooConnections]:
    """New gloo groups, and their connections. Collective.

    Args:
        make: makes the groups, of the same ranks.
        make_devices: makes gloo's devices for them, one for each network interface, each of which listens.
    """
    devices, mine = _listening_devices(make_devices)
    groups = make(devices)
    return groups, GlooConnections(groups, mine, _gather_addresses(groups[0], mine, len(devices)))


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


def _file_number(descriptor: int) -> int | None:
    try:
        return os.fstat(descriptor).st_ino
    except OSError:
        return None


def _num_bytes(connection: socket.socket) -> bytes:
    """Numbers of bytes that were sent and received, as Linux says."""
    try:
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)[_BYTES_IN_TCP_INFO]
    except (AttributeError, OSError):  # another system; closed meanwhile
        return b""


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
