"""Creates and destroys the process groups of the communication threads."""

from __future__ import annotations

import logging
import os
import threading
import uuid
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from lightning_commhooks.collectives.direct import FAR, Direct, measure_latency, num_connections
from lightning_commhooks.collectives.errors import keep_in_forks
from lightning_commhooks.collectives.gloo_abort import Connections, GlooConnections, listening_devices

logger = logging.getLogger(__name__)

# With two, a link is idle between the messages of one collective; with four, many small collectives take a fifth more
# processor time. Near ranks have the same number of connections: with one, a link is idle while a processor encodes.
_COLLECTIVES_AT_ONCE = 3
# The network interfaces that gloo uses, separated by commas; one that is named twice gets two connections.
_INTERFACES = "GLOO_SOCKET_IFNAME"
# Names that backends report. `nccl` gives "nccl2" from PyTorch 2.15 on, and earlier with TORCH_DIST_USE_NCCL2=1;
# `nccl-legacy` gives "nccl". The collectives of "fake" do nothing.
_NCCL = ("nccl", "nccl2", "nccl-lazy")
_ENQUEUED = (*_NCCL, "fake")


@dataclass(frozen=True)
class OwnGroup:
    """A group for communication threads.

    DDP and users issue collectives from other threads; on one group they would interleave with the hook's differently
    on each rank.

    Attributes:
        process_group: the group.
        connections: connections between its ranks. Do not keep the group alive.
        direct: direct messages between the ranks, for CPU tensors over gloo.
    """

    process_group: dist.ProcessGroup
    connections: Connections
    direct: Direct | None = None

    def __post_init__(self) -> None:
        keep_in_forks(self.process_group)


def backend_for(process_group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the name that the backend for tensors on `device` reports, which may differ from the name at creation.

    Groups may have a backend for each device type. For a group implemented in Python, or without a backend for this
    device, return the name at creation.
    """
    try:
        return str(_backend_of(process_group, device).name())
    except RuntimeError:
        return _configured(process_group, device)


def is_enqueued_on_stream(process_group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether a group's collectives are enqueued on the current stream, like NCCL's, and the host does not wait.

    On the CPU there are no streams. Raises a `ValueError` if this is unknown for the backend of the device.
    """
    if device.type == "cpu":
        return False
    name = backend_for(process_group, device)
    if name not in (*_ENQUEUED, dist.Backend.GLOO):
        made_with = _configured(process_group, device)
        alias = "" if name == made_with else f", which calls itself {name!r}"
        raise ValueError(
            f"the backend of the process group for {device.type} is {made_with!r}{alias}: hooks do not know whether "
            "its collectives are enqueued on a CUDA stream; use 'nccl' (also 'nccl2', 'nccl-lazy', 'nccl-legacy'), "
            "as in init_process_group('cpu:gloo,cuda:nccl'), or 'gloo'"
        )
    return name in _ENQUEUED


def _backend_of(process_group: dist.ProcessGroup, device: torch.device) -> Any:
    backend = process_group._get_backend(device)
    return getattr(backend, "wrapped_pg", backend)  # with TORCH_DISTRIBUTED_DEBUG=DETAIL


def _configured(process_group: dist.ProcessGroup, device: torch.device) -> str:
    configured = dist.get_backend_config(process_group)
    return dist.BackendConfig(dist.Backend(configured)).get_device_backend_map().get(device.type, configured)


def own_group(process_group: dist.ProcessGroup, device: torch.device) -> OwnGroup:
    """Create a group over the same ranks. Collective."""
    if backend_for(process_group, device) != dist.Backend.GLOO:
        own = _new_group(process_group, device)
        return OwnGroup(own, BackendConnections(own))
    timeout = timeout_of(process_group, device)
    place = process_group.rank(), process_group.size()
    return group_at(_store(_new_name(process_group)), place, device, timeout)


def group_at(store: Store, place: tuple[int, int], device: torch.device, timeout: timedelta) -> OwnGroup:
    """Create a gloo group of the ranks that share a store. Collective.

    `place` is this rank and the number of ranks. Only this group uses the keys of the store.
    """
    own, connections = _connected_gloo_group(store, place, device, timeout)
    if device.type != "cpu" or own.size() == 1:
        return OwnGroup(own, connections)
    direct = Direct(_backend_of(own, device))
    try:
        latency = measure_latency(direct)
    except ValueError:
        connections.abort()  # or the error's traceback would keep the connections open
        raise
    num = _COLLECTIVES_AT_ONCE if latency <= FAR else num_connections(latency)
    if num > 1 and len(_interfaces()) == 1:
        first = connections
        own, connections = _connected_gloo_group(PrefixStore("several", store), place, device, timeout, num)
        first.abort()
        direct = Direct(_backend_of(own, device))
    direct.latency = latency if latency > FAR else 0.0
    return OwnGroup(own, connections, direct)


def _interfaces() -> list[str]:
    return os.environ.get(_INTERFACES, "").split(",")


def timeout_of(process_group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Return the timeout of a group's collectives."""
    options = getattr(_backend_of(process_group, device), "options", None)
    timeout: timedelta = getattr(options, "_timeout", None) or dist.default_pg_timeout
    return timeout


def _new_name(process_group: dist.ProcessGroup) -> str:
    # `new_group` needs every process of the world, or only these ranks with `use_local_synchronization`. It then names
    # the group by the number of existing groups, which differs between ranks in different groups.
    name = [uuid.uuid4().hex]
    dist.broadcast_object_list(name, src=dist.get_global_rank(process_group, 0), group=process_group)
    return name[0]


def _new_group(process_group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    own: dist.ProcessGroup = dist.new_group(
        ranks=dist.get_process_group_ranks(process_group),
        backend=_configured(process_group, device),
        timeout=timeout_of(process_group, device),
        use_local_synchronization=process_group.size() < dist.get_world_size(),
        group_desc="lightning_commhooks",
    )
    return own


def _connected_gloo_group(
    store: Store, place: tuple[int, int], device: torch.device, timeout: timedelta, num: int = 1
) -> tuple[dist.ProcessGroup, GlooConnections]:
    """Create a group with `num` connections between any two ranks, and return both. Collective."""
    devices, mine = listening_devices(_devices)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [one for one in devices for _ in range(num)]
    options._threads = _COLLECTIVES_AT_ONCE
    backend = gloo(store, *place, options)
    own = dist.ProcessGroup(store, *place)
    own._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    own._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    if device.type == "cuda":
        own._register_backend(device, dist.ProcessGroup.BackendType.GLOO, backend)
    return own, GlooConnections(own, mine, len(devices))


def _nccl_group(
    parent: dist.ProcessGroup, store: Store, members: Sequence[int], device: torch.device, timeout: timedelta
) -> dist.ProcessGroup:
    """Create a group of some ranks of an NCCL group, with the same backend class. Collective among these ranks.

    `new_group` needs every process of the world, or names a group by the number of groups that a rank knows. Splitting
    a communicator needs one that has already communicated.
    """
    backend = _backend_of(parent, device)
    options = type(backend.options)()
    options._timeout = timeout
    place = members.index(parent.rank()), len(members)
    own = dist.ProcessGroup(store, *place)
    own.bound_device_id = parent.bound_device_id  # the NCCL backend of PyTorch 2.15 needs it to connect
    own._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
    own._register_backend(device, dist.ProcessGroup.BackendType.NCCL, type(backend)(store, *place, options))
    return own


def _store(name: str) -> PrefixStore:
    return PrefixStore(f"lightning_commhooks/{name}/", dist.distributed_c10d._get_default_store())


class BackendConnections(Connections):
    """Connections of a group without gloo. Does not keep the group alive.

    The group is aborted in a separate thread, since NCCL may wait for the device. If the backend cannot abort, nothing
    happens, and the remaining ranks wait for their timeout.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(process_group)

    def abort(self) -> None:
        if (group := self._group()) is not None:
            threading.Thread(target=_abort, args=(group,), name="lightning_commhooks abort", daemon=True).start()


def _abort(group: dist.ProcessGroup) -> None:
    try:
        group.abort()
    except RuntimeError as error:  # the backend cannot abort
        logger.info("after a failure here, other ranks wait for the timeout of the process group: %s", error)


def _devices() -> list[dist.ProcessGroupGloo.Device]:
    """Create devices as PyTorch does for a group without options."""
    make = dist.ProcessGroupGloo
    return [make.create_device(interface=name) if name else make.create_default_device() for name in _interfaces()]


def own_subgroup(
    process_group: dist.ProcessGroup, subgroups: Sequence[Sequence[int]], name: str, device: torch.device
) -> OwnGroup:
    """Create a group over the ranks in this rank's subgroup, for CUDA tensors. Collective.

    Each rank of `process_group`, the group of the communication threads, is in one subgroup. The name, which no other
    group has, is rank-uniform.
    """
    rank = process_group.rank()
    timeout = timeout_of(process_group, device)
    backend = backend_for(process_group, device)
    index, members = next((i, members) for i, members in enumerate(subgroups) if rank in members)
    if backend == dist.Backend.GLOO:
        store = PrefixStore(f"{name}/{index}", process_group.get_group_store())
        own, connections = _connected_gloo_group(store, (members.index(rank), len(members)), device, timeout)
        return OwnGroup(own, connections)
    if backend in _NCCL:
        own = _nccl_group(process_group, _store(f"{name}/{index}"), members, device, timeout)
    else:
        world = dist.get_process_group_ranks(process_group)
        is_part = len(world) < dist.get_world_size()
        groups = [
            dist.new_group(
                [world[i] for i in each],
                backend=_configured(process_group, device),
                timeout=timeout,
                use_local_synchronization=is_part,
            )
            for each in subgroups
            if not is_part or rank in each
        ]
        own = next(group for group in groups if group is not dist.GroupMember.NON_GROUP_MEMBER)
    return OwnGroup(own, BackendConnections(own))


def destroy(process_groups: Iterable[dist.ProcessGroup | None]) -> None:
    """Destroy the remaining groups made by [`own_group`][] and [`own_subgroup`][]."""
    for own in process_groups:
        if own is not None and dist.is_initialized() and own in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(own)
        elif own is not None and own.name() == dist.Backend.NCCL:  # made by `_nccl_group`
            own.shutdown()
