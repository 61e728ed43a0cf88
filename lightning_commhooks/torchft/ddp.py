"""`DistributedDataParallel` among replicas that come and go."""

# No `from __future__ import annotations`: DDP compares the annotations of the hooks that are made here.

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn import parallel
from torchft.process_group import ProcessGroupDummy

from lightning_commhooks.collectives.averaging import flat_view
from lightning_commhooks.collectives.group import Group
from lightning_commhooks.interface.hook import CommHook
from lightning_commhooks.interface.user_function import DDPHook
from lightning_commhooks.runtime.attachment import Attachment
from lightning_commhooks.runtime.runtime import Runtime
from lightning_commhooks.runtime.source import Source
from lightning_commhooks.sources.attach import attach, source_of
from lightning_commhooks.sources.ddp import DDPSource
from lightning_commhooks.sources.ddp_model import Trampoline
from lightning_commhooks.torchft.quorum import EXACT_STATE, Quorum, check_hook


class ManagedDDP(DDPSource):
    """The reducer of a DDP model that is alone in its process group; its gradients are averaged among replicas.

    Args:
        process_group: DDP's own, of one process.
        manager: see [`Quorum`][].
    """

    refused: ClassVar[Mapping[str, str]] = {**DDPSource.refused, "exact_state": EXACT_STATE}
    quorum: Quorum

    def __init__(self, process_group: dist.ProcessGroup, manager: Any) -> None:
        super().__init__(process_group)
        self.quorum = Quorum(manager)
        # Parameters without gradients here in this step, and the means of their gradients.
        self._unused: dict[str, Tensor] = {}

    def resolve_hook(self, hook: object) -> CommHook | DDPHook:
        resolved = super().resolve_hook(hook)
        check_hook(resolved)
        return resolved

    def check(self, model: nn.Module) -> None:
        super().check(model)
        assert isinstance(model, parallel.DistributedDataParallel)
        if (size := self.process_group.size()) != 1:
            raise ValueError(
                f"with manager= a DistributedDataParallel is of one process, and the process group of this one has "
                f"{size}, of which each would send all gradients to other replicas: apply fully_shard to the model "
                "instead, so that each sends its share"
            )
        if model.static_graph or not model.find_unused_parameters:
            raise ValueError(
                "with manager= the model needs find_unused_parameters=True and no static_graph: otherwise DDP rebuilds "
                "its buckets after the first step, and a joining replica has different buckets. See "
                "lightning_commhooks.torchft.DistributedDataParallel"
            )
        self.quorum.check_manager(1, 0)

    def connect(self, model: nn.Module, runtime: Runtime) -> None:
        self.quorum.connect(runtime, self._give_unused)
        super().connect(model, runtime)

    def trampoline(self, runtime: Runtime, model: parallel.DistributedDataParallel) -> Trampoline:
        plainly, quorum = super().trampoline(runtime, model), self.quorum
        if runtime.bound.averages_models:
            return plainly

        def trampoline(state: object, bucket: GradBucket) -> Future[Tensor]:
            flat = bucket.buffer()
            averaged: list[Future[Tensor]] = []

            def survived(done: Future[Tensor]) -> Tensor:
                # DDP ends the process if its future has failed.
                gradients = [flat]
                with quorum.reporting():
                    gradients.append(done.value())
                return gradients[-1]

            if bucket.index() == 0:
                self._unused = {}
                quorum.begin_backward()
            with quorum.reporting(), quorum.part_of_step():
                plain = self._make_bucket(bucket, runtime)
                unused = [] if flat.is_sparse else [one for one in plain.slots if one.name in (plain.unused or ())]
                self._unused |= {slot.name: slot.view(flat) for slot in unused}
                averaged.append(runtime.submit(plain, is_late=False))
            if averaged:
                return averaged[0].then(survived)
            given_up: Future[Tensor] = Future()
            given_up.set_result(flat)
            return given_up

        return trampoline

    def _give_unused(self, group: Group) -> None:
        """Give parameters that got gradients on other replicas only their mean, as DDP does for its own ranks."""
        names = list(self.layout.trained)
        used = torch.tensor([float(name not in self._unused) for name in names], device=self.device)
        group.finish(group.quiet().all_reduce_(used))
        for name, num in zip(names, used.tolist(), strict=True):
            if num and name in self._unused:
                parameter = self.layout.trained[name]
                parameter.grad = torch.empty_like(parameter)
                own = flat_view(parameter.grad)
                own.copy_(self._unused[name].reshape(own.shape))


def managed_source(manager: Any, model: nn.Module) -> Source:
    """The source of a model among the replicas of a manager."""
    source = source_of(model)
    if isinstance(source, DDPSource):
        return ManagedDDP(source.process_group, manager)
    # Importing FSDP takes half a second.
    from lightning_commhooks.sources.fsdp1 import FSDP1
    from lightning_commhooks.torchft.sharded import ManagedReplicas

    if isinstance(source, FSDP1):
        raise ValueError(
            "manager= is for DistributedDataParallel and fully_shard; of FullyShardedDataParallel no replicas can "
            "come and go: apply fully_shard instead"
        )
    return ManagedReplicas(model, manager)


class DistributedDataParallel(parallel.DistributedDataParallel):
    """`torchft.DistributedDataParallel`, with a communication hook: averages gradients among the replicas there are.

    Args:
        manager: see [`attach`][].
        module: the model of one replica, which is one process.
        hook: see [`attach`][].
        grad_scaler: see [`attach`][].
        num_steps: see [`attach`][].
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
        num_steps: int | None = None,
        **kwargs: Any,
    ) -> None:
        alone = ProcessGroupDummy(0, 1)
        super().__init__(module, process_group=alone, find_unused_parameters=True, **kwargs)
        self.attachment: Attachment = attach(self, hook, grad_scaler=grad_scaler, num_steps=num_steps, manager=manager)
