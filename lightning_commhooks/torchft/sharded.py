"""Replicas of sharded models that come and go: a process averages its shards with the same shards of other replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch.distributed as dist
from torch import nn

from lightning_commhooks.collectives.errors import HookError
from lightning_commhooks.interface.hook import CommHook
from lightning_commhooks.runtime.engine import CLOSED
from lightning_commhooks.runtime.passes import current_backward
from lightning_commhooks.runtime.runtime import Runtime
from lightning_commhooks.sources.replicas import Replicas, replicas_of
from lightning_commhooks.torchft.quorum import EXACT_STATE, Quorum, check_hook, meet


class ManagedReplicas(Replicas):
    """The units of a model that is sharded over the processes of one replica.

    A process that dies ends its replica, whose other processes fail in FSDP2's own collectives. In the other replicas
    each process notices that for its share, and all vote for the same: a manager asks all processes of a replica.

    Args:
        model: a module in which `fully_shard` was applied to modules.
        manager: see [`Quorum`][]; one in each process of a replica, with its rank in that.
    """

    refused: ClassVar[Mapping[str, str]] = {
        **Replicas.refused,
        "exact_state": EXACT_STATE,
        "replicate_group": "is for replicas that stay; those that come and go are the manager's: leave it out",
        # torchft hands over weights to each process of a replica by itself.
        "gather_differences": "needs ranks that all load weights when one does; with manager= leave it out",
    }

    quorum: Quorum

    def __init__(self, model: nn.Module, manager: Any) -> None:
        if replicas_of(model):
            raise ValueError(
                "with manager= the model is sharded over all processes of a replica, on a mesh of one dimension; "
                "replicas within a replica would die together"
            )
        # A group of this process alone, as long as there is no other replica.
        super().__init__(model, dist.ProcessGroup(0, 1))  # type: ignore[call-arg]  # there is such a one
        self.quorum = Quorum(manager)
        # The number that autograd gave the last backward.
        self._backward = -1

    def resolve_hook(self, hook: object) -> CommHook:
        resolved = super().resolve_hook(hook)
        check_hook(resolved)
        return resolved

    def check(self, model: nn.Module) -> None:
        super().check(model)
        self.quorum.check_manager(dist.get_world_size(), dist.get_rank())

    def connect(self, model: nn.Module, runtime: Runtime) -> None:
        # Otherwise some replicas might commit a step that the rest have lost.
        self.quorum.connect(runtime, lambda group: meet(group, self.device))
        super().connect(model, runtime)

    def average_unit(self, runtime: Runtime, average: Callable[[], None]) -> None:
        if runtime.is_closed:
            raise HookError(CLOSED)
        if runtime.bound.averages_models:
            super().average_unit(runtime, average)
            return
        backward = current_backward()
        if backward != self._backward:
            self.quorum.begin_backward()
        self._backward = backward
        with self.quorum.reporting(), self.quorum.part_of_step():
            average()

    def close(self) -> None:
        # The units keep the hook: without it, replicas would diverge.
        self._units.clear()
        super().close()
