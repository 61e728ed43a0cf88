"""`FullyShardedDataParallel`, by its `register_comm_hook`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from lightning_commhooks.runtime.runtime import Runtime
from lightning_commhooks.sources.fsdp import ShardedSource, reduce, shares_of

HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


@dataclass
class _State:
    """State that FSDP keeps and gives back with each unit's gradients, for good."""

    runtime: Runtime


def _hook(state: _State, grad: Tensor, output: Tensor | None = None) -> None:
    """Reduce the flat gradient of one unit, as FSDP asks."""
    process_group = state.runtime.source.process_group
    reduce(state.runtime, grad, output, process_group, 1 / process_group.size())


def units(model: nn.Module) -> list[FullyShardedDataParallel]:
    """All modules of a model that are wrapped, `model` included."""
    return [module for module in model.modules() if isinstance(module, FullyShardedDataParallel)]


class FSDP1(ShardedSource):
    """All units of a model in `FullyShardedDataParallel`."""

    refused: ClassVar[Mapping[str, str]] = {
        **ShardedSource.refused,
        "shard_hook": "is for fully_shard on a mesh of two dimensions; hook= is the hook of the reduce-scatter here",
        "gather_hook": "is for fully_shard: FullyShardedDataParallel gathers parameters in its own way",
        "gather_differences": "is for fully_shard: FullyShardedDataParallel gathers parameters in its own way",
        "replicate_group": "is for fully_shard; FullyShardedDataParallel has HYBRID_SHARD, without hooks",
    }

    def __init__(self, model: nn.Module) -> None:
        wrapped = units(model)
        super().__init__(_process_group(wrapped))
        # Ranks agree there before `check`; offloaded parameters are on the CPU.
        assert wrapped[0].compute_device is not None
        self.device = wrapped[0].compute_device

    def check(self, model: nn.Module) -> None:
        wrapped = units(model)
        states = _states(wrapped)
        # FSDP never lets go of a hook; one of ours that was closed can serve another runtime.
        is_free = all(isinstance(state, _State) and state.runtime.is_closed for state in states)
        if states and not (is_free and len(states) == len(wrapped)):
            raise ValueError("the FSDP model has a communication hook already, and FSDP takes one; leave that one out")

    def connect(self, model: nn.Module, runtime: Runtime) -> None:
        shares_of(runtime).among(self.process_group)
        wrapped = units(model)
        states = _states(wrapped)
        for state in states:
            state.runtime = runtime
        if not states:
            for root in FullyShardedDataParallel.fsdp_modules(model, root_only=True):
                root.register_comm_hook(_State(runtime), _hook)
            assert all(unit._comm_hook is _hook for unit in wrapped)


def _states(wrapped: list[FullyShardedDataParallel]) -> list[Any]:
    return [unit._comm_hook_state for unit in wrapped if unit._comm_hook is not None]


def _process_group(wrapped: list[FullyShardedDataParallel]) -> dist.ProcessGroup:
    """The group in which all units are sharded."""
    if any(unit.sharding_strategy in HYBRID for unit in wrapped):
        raise ValueError(
            "FullyShardedDataParallel takes no communication hook with HYBRID_SHARD. What it has for these strategies "
            "is mixed_precision=MixedPrecision(reduce_dtype=torch.bfloat16); FSDP2, with fully_shard on a mesh of two "
            "dimensions, takes hooks"
        )
    groups = {unit.process_group for unit in wrapped}
    if len(groups) > 1:
        raise ValueError(
            f"the FSDP units of the model are sharded in {len(groups)} process groups, and a communication hook is not "
            "told which unit it is called for; wrap all of them with the same process_group"
        )
    (process_group,) = groups
    assert process_group is not None
    if process_group.size() == 1 < dist.get_world_size():
        raise ValueError(
            f"FSDP shards this model in a process group of one rank out of {dist.get_world_size()}, so that gradients "
            "would not be reduced at all; pass process_group=, or with HYBRID_SHARD device_mesh="
        )
    return process_group


def check_reduce_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Refuse a model that FSDP does not reduce in `dtype` by itself."""
    for unit in units(model):
        if (found := unit.mixed_precision.reduce_dtype) != dtype:
            raise ValueError(
                f"an FSDP unit reduces gradients in {found} instead of {dtype}: wrap it with "
                f"mixed_precision=MixedPrecision(reduce_dtype={dtype})"
            )
