"""The manager of a replica, which is `torchft.Manager`, with a group for hooks."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

try:
    from torchft import Manager, process_group
    from torchft.checkpointing import HTTPTransport
except ImportError as error:
    raise ImportError(
        "lightning_commhooks.torchft needs torchft: pip install 'lightning-commhooks[torchft]'"
    ) from error

from lightning_commhooks.collectives.errors import keep_in_forks
from lightning_commhooks.collectives.process_groups import OwnGroup, group_at
from lightning_commhooks.hooks._local_sgd import LocalSGDConfig
from lightning_commhooks.interface.hook import CommHook
from lightning_commhooks.interface.user_function import DDPHook
from lightning_commhooks.sources.attach import source_of_manager
from lightning_commhooks.torchft.ddp import DistributedDataParallel as DistributedDataParallel
from lightning_commhooks.torchft.ddp import managed_source
from lightning_commhooks.torchft.fault_tolerance import FaultTolerance
from lightning_commhooks.torchft.quorum import check_hook
from lightning_commhooks.wrappers.scale import accumulation_of, without_scale

source_of_manager.register(Manager, managed_source)


class ProcessGroupGloo(process_group.ProcessGroupGloo):
    """`torchft.ProcessGroupGloo`, with a group for hooks, apart from the group for the manager's own collectives.

    Args:
        timeout: for making groups and for collectives: how long replicas wait for one that neither answers nor closes
            its connections, as behind a network that drops everything. One that ends is noticed at once.

    Attributes:
        members: the group of the present quorum; `None` before the first one.
    """

    members: OwnGroup | None = None

    def _create_pg(self, store: Any, rank: int, world_size: int) -> dist.ProcessGroup:
        group: dist.ProcessGroup = super()._create_pg(store, rank, world_size)
        keep_in_forks(group)
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        own = PrefixStore("lightning_commhooks", store)
        self.members = group_at(own, (rank, world_size), device, self._timeout)
        return group

    @property
    def replica_name(self) -> str:
        """The name that the manager was given, without what tells one start from another."""
        return (self._replica_id or "").partition(":")[0]


class _Transport(HTTPTransport[Any]):
    """Hands a replica's state over at an address that the other replicas reach."""

    def __init__(self, hostname: str, timeout: timedelta) -> None:
        self._hostname = hostname
        super().__init__(timeout=timeout, num_chunks=0)

    def address(self) -> str:
        address: str = super().address()
        return address.replace(f"//{socket.gethostname()}:", f"//{self._hostname}:")


def start_manager(
    replica_id: str,
    state_dict: Callable[[], Any],
    load_state_dict: Callable[[Any], None],
    *,
    min_replica_size: int = 1,
    timeout: float = 60.0,
    quorum_timeout: float = 60.0,
    lighthouse_addr: str | None = None,
    hostname: str | None = None,
    **kwargs: Any,
) -> Manager:
    """The `torchft.Manager` of a replica, as [`attach`][] requires it.

    The replica is all processes of the default process group, as torchrun starts them, or this process alone without
    such a group. With several, each of them calls this, and the first one talks to the lighthouse.

    Args:
        replica_id: the replica's name, which stays when it comes back.
        state_dict: returns the state that a joining replica receives in addition to the hook's; of a sharded model,
            this process's shards, which go to the process with the same shards.
        load_state_dict: loads it there.
        min_replica_size: with fewer replicas no step is committed.
        timeout: seconds that a replica waits for one that neither answers nor closes its connections, in a collective
            and while it hands over its state. Replicas of several processes wait up to twice as long.
        quorum_timeout: seconds that a replica waits for the rest when a step begins; with [`DiLoCo`][], an average.
        lighthouse_addr: the lighthouse, `"http://host:29510"`. `None`: the environment's `TORCHFT_LIGHTHOUSE`.
        hostname: name or address by which the other replicas reach this process. `None`: the machine's name.
        **kwargs: other arguments of `torchft.Manager`, such as `init_sync`.

    Raises:
        ValueError: there is no lighthouse.
    """
    if not (lighthouse_addr or os.environ.get("TORCHFT_LIGHTHOUSE")):
        raise ValueError(
            "lighthouse_addr= is not given and the variable TORCHFT_LIGHTHOUSE is not set: start torchft_lighthouse, "
            "and set one of them to its address, as http://host:29510"
        )
    seconds, host = timedelta(seconds=timeout), hostname or socket.gethostname()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    place = [(host, store.port if store is not None else 0)]
    if world_size > 1:
        dist.broadcast_object_list(place)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=seconds),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=min_replica_size,
        use_async_quorum=False,
        # A process votes after it has waited for other replicas, while its own replica waits for it: two timeouts.
        timeout=seconds if world_size == 1 else 3 * seconds,
        quorum_timeout=timedelta(seconds=quorum_timeout),
        connect_timeout=seconds,
        replica_id=replica_id,
        rank=rank,
        world_size=world_size,
        # Replicas of a quorum meet at the store of one of them.
        store_addr=place[0][0],
        store_port=place[0][1],
        hostname=host,
        checkpoint_transport=_Transport(host, seconds),
        lighthouse_addr=lighthouse_addr,
        **kwargs,
    )
    # It is a client of the store, which ends with its object.
    manager.store_of_replica = store
    return manager


def check_options(hook: CommHook | DDPHook, options: Mapping[str, Any]) -> None:
    """Refuse hooks, and options of a framework's adapter, that need ranks that stay.

    Raises:
        ValueError: says what to set instead.
    """
    check_hook(hook)
    assert isinstance(hook, CommHook)
    if accumulation_of(hook) != "framework":
        raise ValueError("fault_tolerance= needs accumulation='framework': a step that is repeated has one micro-batch")
    if options.get("resync") and isinstance(without_scale(hook), LocalSGDConfig):
        raise ValueError("resync=True is for averages that ranks make to look at, and replicas make none; leave it out")
    if options.get("exact_state"):
        raise ValueError("exact_state=True keeps differences between ranks, which replicas do not exchange")
    if options.get("static_graph"):
        raise ValueError(
            "fault_tolerance= does not work with static_graph=True: the buckets of a replica that joins later differ"
        )


def start_replica(
    options: FaultTolerance, state_dict: Callable[[], Any], load_state_dict: Callable[[Any], None]
) -> Manager:
    """The manager of a framework's process; the state and what takes it over are those of [`start_manager`][]."""
    names = ("min_replica_size", "timeout", "quorum_timeout", "lighthouse_addr", "hostname")
    given = {name: getattr(options, name) for name in names}
    return start_manager(f"replica_{options.replica_rank}", state_dict, load_state_dict, **given)
