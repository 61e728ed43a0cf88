"""Hooks on modules of `fully_shard`, by `set_custom_reduce_scatter` and `set_all_reduce_hook`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_commhooks.fsdp.runtime import ShardedRuntime
from lightning_commhooks.interface.hook import CommHook

_runtimes: WeakKeyDictionary[FSDPModule, ShardedRuntime] = WeakKeyDictionary()


class _ReduceScatter:
    """What FSDP2 calls instead of its own reduce-scatter: a `ReduceScatter` of `torch.distributed.fsdp`."""

    def __init__(self, runtime: ShardedRuntime, has_replicas: bool) -> None:
        self._runtime = runtime
        self._has_replicas = has_replicas

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A new tensor for gradients or a share of them."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce; on CUDA on the current stream, which is FSDP2's stream for this."""
        self._runtime.reduce(input_tensor, output_tensor, group, _factor(op, group.size()))
        compresses = self._runtime.counters.numel_compressed > 0
        if self._has_replicas and compresses and output_tensor.element_size() > 2:
            _warn_of_replicas(self._runtime, output_tensor.dtype)
        return _Finished(output_tensor.device) if async_op else None


class _Finished(dist.Work):
    """A collective whose result is there, in the order of the stream that it was issued on."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._done = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

    def wait(self, timeout: Any = None) -> bool:
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)
        return True

    def is_completed(self) -> bool:
        return self._done is None or self._done.query()


def _factor(op: Any, size: int) -> float:
    """What the sum over `size` ranks is multiplied by."""
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.AVG:
        return 1 / size
    if op == dist.ReduceOp.PREMUL_SUM:
        # Nothing else gives it away.
        return float(op.__getstate__()[1])
    raise ValueError(f"FSDP2 asks for the reduction {op}; communication hooks know AVG, SUM and PREMUL_SUM")


def _warn_of_replicas(runtime: ShardedRuntime, dtype: torch.dtype) -> None:
    if dist.get_rank() == 0 and not runtime.has_warned_of_replicas:
        runtime.has_warned_of_replicas = True
        warnings.warn(
            f"hook={runtime.hook.name!r} has shares of gradients reduced in low precision; between replicas FSDP2 "
            f"averages them by itself, in {dtype}. To have both in low precision: attach_fsdp(replicate_group=...), or "
            "in 16 bit fully_shard(..., mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))",
            stacklevel=2,
        )


def units(model: nn.Module) -> list[FSDPModule]:
    """All modules of a model to which `fully_shard` was applied, `model` included."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def attach(model: nn.Module, hook: CommHook, replicate_group: dist.ProcessGroup | None) -> ShardedRuntime:
    """Have all units of a model reduced by a hook. Collective."""
    sharded = units(model)
    for unit in sharded:
        previous = _runtimes.get(unit)
        if previous is not None and not previous.is_closed:
            raise ValueError(
                f"the FSDP2 model has the communication hook {previous.hook.name!r} already; close it first"
            )
        if replicate_group is not None and _has_replicas(unit):
            raise ValueError(
                "replicate_group is for fully_shard on a mesh of one dimension, the ranks of one replica; on two "
                "dimensions FSDP2 averages over replicas by itself, before a hook sees anything"
            )
    if dist.get_world_size() > 1 and replicate_group is None and not any(map(_is_sharded, model.parameters())):
        raise ValueError(
            "no parameter of the model is sharded over more than one rank, so FSDP2 reduces no shares by a hook: use "
            "DistributedDataParallel with attach(model, hook), or apply fully_shard on a mesh of more ranks"
        )
    meshes = {p.device_mesh for p in model.parameters() if isinstance(p, DTensor)}
    runtime = ShardedRuntime(hook, torch.device(next(iter(meshes)).device_type) if meshes else torch.device("cpu"))
    # Groups of other meshes are made in the first backward: which of their dimensions FSDP2 has, it does not say.
    for mesh in sorted((mesh for mesh in meshes if mesh.ndim == 1), key=lambda mesh: mesh.mesh.tolist()):
        runtime.reduction(mesh.get_group())
    for unit in sharded:
        unit.set_custom_reduce_scatter(_ReduceScatter(runtime, _has_replicas(unit)))  # type: ignore[arg-type]
        if replicate_group is not None:
            unit.set_all_reduce_hook(_average_over(replicate_group, runtime))
        elif unit in _runtimes and _runtimes[unit].averages_replicas:
            unit.set_all_reduce_hook(None)  # type: ignore[arg-type]  # of a closed hook of ours
        _runtimes[unit] = runtime
    runtime.averages_replicas = replicate_group is not None
    return runtime


def _average_over(replicate_group: dist.ProcessGroup, runtime: ShardedRuntime) -> Callable[[Tensor], None]:
    """What FSDP2 calls with each reduced share, on its stream for all-reduces."""
    runtime.reduction(replicate_group)

    def average(share: Tensor) -> None:
        if share.is_cuda:
            # FSDP2 before PyTorch 2.15 frees it in the order of another stream than this one.
            share.record_stream(torch.cuda.current_stream())
        runtime.reduce(share, None, replicate_group, 1 / replicate_group.size())

    return average


def _is_sharded(parameter: Tensor) -> bool:
    if not isinstance(parameter, DTensor):
        return False
    sizes = enumerate(parameter.placements)
    return any(placement.is_shard() and parameter.device_mesh.size(dim) > 1 for dim, placement in sizes)


def _has_replicas(unit: FSDPModule) -> bool:
    """Whether gradients are averaged over a first dimension of the mesh after they were reduced over another."""
    return any(
        isinstance(p, DTensor)
        and p.device_mesh.ndim > 1
        and p.placements[0].is_replicate()
        and p.device_mesh.size(0) > 1
        for p in unit.parameters()  # type: ignore[attr-defined]
    )
