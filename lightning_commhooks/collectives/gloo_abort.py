"""Aborts collectives of a gloo group in flight, which gloo itself cannot do.

`ProcessGroupGloo.abort()` and `shutdown()` do nothing (PyTorch 2.13), and a collective that waits for a peer returns
only if the connection is closed. It does not even return then if its own message was in transit: gloo's
`Pair::signalException` skips the message that it is sending and the message that it is receiving, and a thread that
waits for either waits for the timeout of the group. `Connections` therefore reports whether a connection is lost.
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import stat
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)

_ADDRESS_BYTES = 128  # size of a listener's address
# Positions in `struct tcp_info`: tcpi_bytes_acked and tcpi_bytes_received.
_TCP_INFO_BYTES, _BYTES_IN_TCP_INFO = 136, slice(120, 136)

# Attempts to create devices until it is clear which listeners belong to them.
_ATTEMPTS = 10
Devices = list[dist.ProcessGroupGloo.Device]


class Connections:
    """Connections between the ranks of a group, for any thread; does nothing if the backend does not expose them."""

    def abort(self) -> None:
        """Make collectives fail at once, here and on the peers that wait for this rank."""

    def fail(self) -> None:
        """Abort after a failure: collectives may be in flight."""
        self.abort()

    def let_go(self) -> None:
        """Release the objects that `fail` kept alive for collectives in flight, once no thread waits for them."""

    def without_a_peer(self) -> object | None:
        """Return `None` while all peers are connected, and then the remaining peers' byte counts, to compare."""
        return None


class GlooConnections(Connections):
    """The TCP connections of a gloo group. Does not keep the group alive.

    Without listeners it cannot identify the group's connections and does nothing; peers then wait for their timeout.
    `mine` are the addresses on which this rank listens, as many as each other rank.
    """

    def __init__(self, group: dist.ProcessGroup, mine: set[str], num_listeners: int) -> None:
        self._group: Callable[[], dist.ProcessGroup | None] = weakref.ref(group)
        # Every connection of the group has a listener of one of its ranks as an end.
        self._mine, self._listeners = mine, _gather_addresses(group, mine, num_listeners)
        self._kept: list[dist.ProcessGroup] = []
        # Descriptors are reused for other files, which have other inode numbers.
        self._files = {(one.fileno(), os.fstat(one.fileno()).st_ino) for one in self._open()} if mine else set()

    def fail(self) -> None:
        group, self._group = self._group(), lambda: None
        if group is not None:
            # Kept even at exit: gloo waits for a group's collectives when it destroys it, and one may never end.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
            self._kept.append(group)
        self.abort()

    def let_go(self) -> None:
        kept, self._kept = self._kept, []
        for group in kept:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(group))
        # PyTorch releases the GIL while it destroys a group, so a collective that never ends blocks only this thread.
        threading.Thread(target=kept.clear, name="lightning_commhooks end", daemon=True).start()

    def abort(self) -> None:
        # Gloo owns the sockets and has to close them, but they can be shut down here.
        for connection in self._open():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def without_a_peer(self) -> object | None:
        # Gloo closes its connection once the peer has closed it.
        if all(_file_number(descriptor) == number for descriptor, number in self._files):
            return None
        return sorted((one.fileno(), _num_bytes(one)) for one in self._open())

    def _open(self) -> Iterator[socket.socket]:
        for connection in _tcp_sockets():
            try:
                is_ours = _address(connection.getpeername()) in self._listeners
                is_ours = is_ours or _address(connection.getsockname()) in self._mine
            except OSError:  # a listener, which has to stay open: gloo aborts the process if it cannot listen
                continue
            if is_ours:
                yield connection


class AllConnections(Connections, list[Connections]):
    """The connections of several groups."""

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


def listening_devices(make: Callable[[], Devices]) -> tuple[Devices, set[str]]:
    """Create devices and return them with their addresses; retry if another thread has begun to listen meanwhile."""
    for _ in range(_ATTEMPTS):
        before = _listening()
        devices = make()
        mine = _listening() - before
        if len(mine) == len(devices):
            return devices, mine
    logger.info("after a failure here, other ranks wait for the timeout of the process group: unknown listeners")
    return devices, set()


def _gather_addresses(own: dist.ProcessGroup, mine: set[str], num_listeners: int) -> set[str]:
    """Return the addresses of all ranks' listeners."""
    text = bytearray("\n".join(mine).encode().ljust(_ADDRESS_BYTES * num_listeners))
    gathered = [torch.empty(len(text), dtype=torch.uint8, device="cpu") for _ in range(own.size())]
    dist.all_gather(gathered, torch.frombuffer(text, dtype=torch.uint8), group=own)
    return {address.strip() for part in gathered for address in bytes(part.tolist()).decode().split("\n")} - {""}


def _file_number(descriptor: int) -> int | None:
    try:
        return os.fstat(descriptor).st_ino
    except OSError:
        return None


def _num_bytes(connection: socket.socket) -> bytes:
    """Return the numbers of bytes sent and received, as reported by Linux."""
    try:
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)[_BYTES_IN_TCP_INFO]
    except (AttributeError, OSError):  # another system; closed meanwhile
        return b""


def _listening() -> set[str]:
    """Return the addresses on which this process accepts TCP connections."""
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
    """Yield all TCP sockets of this process, including other libraries'; none if the system does not list them."""
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
