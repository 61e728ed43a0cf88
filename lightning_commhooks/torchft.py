"""For training with torchft, where replicas come and go: hooks among those that are there. See [`attach`][]."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore
from torch.nn import parallel

try:
    from torchft import process_group
except ImportError as error:
    raise ImportError(
        "lightning_commhooks.torchft needs torchft: pip install 'lightning-commhooks[torchft]'"
    ) from error

from lightning_commhooks.collectives.process_groups import OwnGroup, group_at
from lightning_commhooks.interface.hook import CommHook
from lightning_commhooks.runtime.attachment import Attachment
from lightning_commhooks.sources.attach import attach


class ProcessGroupGloo(process_group.ProcessGroupGloo):
    """`torchft.ProcessGroupGloo`, with a group for hooks beside that of the manager's own collectives.

    Args:
        timeout: of making groups and of collectives: how long replicas wait for one that neither answers nor closes its
            connections, as behind a network that drops everything. One that ends is noticed at once.

    Attributes:
        members: the group of the present quorum; `None` before the first one.
    """

    members: OwnGroup | None = None

    def _create_pg(self, store: Any, rank: int, world_size: int) -> dist.ProcessGroup:
        group: dist.ProcessGroup = super()._create_pg(store, rank, world_size)
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        own = PrefixStore("lightning_commhooks", store)
        self.members = group_at(own, (rank, world_size), device, self._timeout)
        return group

    @property
    def replica_name(self) -> str:
        """The name that the manager was given, without what tells one start from another."""
        return (self._replica_id or "").partition(":")[0]


class DistributedDataParallel(parallel.DistributedDataParallel):
    """`torchft.DistributedDataParallel`, with a communication hook: averages gradients among the replicas there are.

    Args:
        manager: see [`attach`][].
        module: the model of one replica, which is one process.
        hook: see [`attach`][].
        grad_scaler: see [`attach`][].
        **kwargs: of `torch.nn.parallel.DistributedDataParallel`, but for `process_group` and `find_unused_parameters`.

    Attributes:
        attachment: the hook at work, for `metrics()`.
    """

    def __init__(
        self,
        manager: Any,
        module: nn.Module,
        hook: str | CommHook = "allreduce",
        grad_scaler: torch.amp.GradScaler | None = None,
        **kwargs: Any,
    ) -> None:
        alone = process_group.ProcessGroupDummy(0, 1)
        super().__init__(module, process_group=alone, find_unused_parameters=True, **kwargs)
        self.attachment: Attachment = attach(self, hook, grad_scaler=grad_scaler, manager=manager)
