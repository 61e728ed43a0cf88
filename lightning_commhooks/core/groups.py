"""The process group of the communication thread: made, aborted and destroyed."""

from __future__ import annotations

import functools
import os
import socket
import stat
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from lightning_commhooks.core.collectives import Group

ADDRESS_BYTES = 128


def backend_for(process_group: dist.ProcessGroup, device: torch.device) -> str:
    """Name of the backend that serves tensors on `device`: groups may have one for each device type."""
    configured = dist.get_backend_config(process_group)
    return dist.BackendConfig(dist.Backend(configured)).get_device_backend_map().get(device.type, configured)


def own_group(process_group: dist.ProcessGroup, device: torch.device) -> tuple[dist.ProcessGroup, Callable[[], None]]:
    """A group over the same ranks for the communication thread.

    DDP and users issue collectives from other threads; on one group they would interleave with the hook's
    differently on each rank.

    Returns:
        the group, and a function that aborts it from any thread: collectives under way fail at once, here and
        on the peers that wait for this rank. The function does not keep the group alive.
    """
    timeout = getattr(getattr(process_group._get_backend(device), "options", None), "_timeout", None)
    before = _listening()
    own = _new_group(process_group, device, timeout)
    if backend_for(process_group, device) != dist.Backend.GLOO:
        return own, lambda: None
    opened = _listening() - before
    mine = opened.pop() if len(opened) == 1 else None
    return own, functools.partial(_shut_down, mine, _gather_addresses(own, mine))


def _new_group(process_group: dist.ProcessGroup, device: torch.device, timeout: timedelta | None) -> dist.ProcessGroup:
    if process_group.size() < dist.get_world_size():
        return _own_subgroup(process_group, device, timeout or dist.default_pg_timeout)
    own: dist.ProcessGroup = dist.new_group(
        backend=backend_for(process_group, device), timeout=timeout, group_desc="lightning_commhooks"
    )
    return own


def _own_subgroup(process_group: dist.ProcessGroup, device: torch.device, timeout: timedelta) -> dist.ProcessGroup:
    # `new_group` needs every process of the world; with `use_local_synchronization` only these ranks, but then it
    # names the group by how many others there are, and ranks that belong to different groups disagree on that.
    name = [uuid.uuid4().hex]
    dist.broadcast_object_list(name, src=dist.get_global_rank(process_group, 0), group=process_group)
    store = PrefixStore(f"lightning_commhooks/{name[0]}/", dist.distributed_c10d._get_default_store())
    rank, size = process_group.rank(), process_group.size()
    backend = dist.ProcessGroupGloo(store, rank, size, timeout)
    own = dist.ProcessGroup(store, rank, size)
    own._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    own._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    if device.type == "cuda":
        own._register_backend(device, dist.ProcessGroup.BackendType.GLOO, backend)
    return own


def _gather_addresses(own: dist.ProcessGroup, mine: str | None) -> set[str]:
    """Where the ranks of a gloo group listen for each other; every connection of the group has one such end."""
    text = bytearray((mine or "").encode().ljust(ADDRESS_BYTES))
    gathered = [torch.empty(ADDRESS_BYTES, dtype=torch.uint8) for _ in range(own.size())]
    dist.all_gather(gathered, torch.frombuffer(text, dtype=torch.uint8), group=own)
    return {bytes(part.tolist()).decode().strip() for part in gathered} - {""}


def _shut_down(mine: str | None, listeners: set[str]) -> None:
    # `abort()` and `shutdown()` of gloo groups do nothing (PyTorch 2.13), and a collective that waits for a peer
    # returns for a closed connection only. It is not ours to close, but may be shut down under gloo's hands.
    for connection in _tcp_sockets():
        try:
            if _address(connection.getpeername()) in listeners or _address(connection.getsockname()) == mine:
                connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # listens, and must go on doing so: gloo aborts the process if it cannot
            continue


def _listening() -> set[str]:
    """Addresses on which this process accepts TCP connections."""
    return {_address(s.getsockname()) for s in _tcp_sockets() if s.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)}


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
            os.set_blocking(descriptor, blocking)  # socket.setdefaulttimeout() may have changed it
            if view.type == socket.SOCK_STREAM and view.family in (socket.AF_INET, socket.AF_INET6):
                yield view
        finally:
            view.detach()


def destroy(owned: dist.ProcessGroup | None, group: Group) -> None:
    """Destroy a group made by [`own_group`][], if any, and let the collectives go of it."""
    if owned is not None and dist.is_initialized() and owned in dist.distributed_c10d._world.pg_map:
        dist.destroy_process_group(owned)
    group.release()
