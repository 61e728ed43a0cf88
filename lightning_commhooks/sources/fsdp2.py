"""Modules of `fully_shard`, by `set_custom_reduce_scatter` and `set_all_reduce_hook`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_commhooks.runtime.runtime import Runtime
from lightning_commhooks.sources.fsdp import ShardedSource, reduce, shares_of

# The last hook of each unit, and whether it averages over replicas.
_runtimes: WeakKeyDictionary[FSDPModule, tuple[Runtime, bool]] = WeakKeyDictionary()


class _ReduceScatter:
    """Takes the place of FSDP2's own reduce-scatter: a `ReduceScatter` of `torch.distributed.fsdp`."""

    def __init__(self, runtime: Runtime, has_replicas: bool) -> None:
        self._runtime = runtime
        self._has_replicas = has_replicas
        self._has_warned = False

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
        reduce(self._runtime, input_tensor, output_tensor, group, _factor(op, group.size()))
        compresses = self._runtime.counters.numel_compressed > 0
        if self._has_replicas and not self._has_warned and compresses and output_tensor.element_size() > 2:
            self._has_warned = True
            _warn_of_replicas(self._runtime.name, output_tensor.dtype)
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
    """The factor of the sum over `size` ranks."""
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.AVG:
        return 1 / size
    if op == dist.ReduceOp.PREMUL_SUM:
        # Nothing else gives it away.
        return float(op.__getstate__()[1])
    raise ValueError(f"FSDP2 asks for the reduction {op}; communication hooks know AVG, SUM and PREMUL_SUM")


def _warn_of_replicas(hook: str, dtype: torch.dtype) -> None:
    if dist.get_rank() == 0:
        warnings.warn(
            f"hook={hook!r} has shares of gradients reduced in low precision; between replicas FSDP2 averages them by "
            f"itself, in {dtype}. To have both in low precision: attach(replicate_group=...), or in 16 bit "
            "fully_shard(..., mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))",
            stacklevel=2,
        )


def units(model: nn.Module) -> list[FSDPModule]:
    """All modules of a model to which `fully_shard` was applied, `model` included."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


class FSDP2(ShardedSource):
    """All units of a model to which `fully_shard` was applied."""

    kept = ("replicate_group",)

    def __init__(self, model: nn.Module) -> None:
        # Among these ranks one agrees on the hook. In which dimensions of a mesh gradients are reduced, FSDP2 does not
        # say before the first backward.
        meshes = _meshes(model)
        group = meshes[0].get_group(meshes[0].ndim - 1) if meshes else dist.group.WORLD
        assert group is not None
        super().__init__(group)
        self.device = torch.device(meshes[0].device_type if meshes else "cpu")

    def check(self, model: nn.Module) -> None:
        replicas = self.options.get("replicate_group")
        for unit in units(model):
            previous, _ = _runtimes.get(unit, (None, False))
            if previous is not None and not previous.is_closed:
                raise ValueError(
                    f"the FSDP2 model has the communication hook {previous.name!r} already; close it first"
                )
            if replicas is not None and _has_replicas(unit):
                raise ValueError(
                    "replicate_group is for fully_shard on a mesh of one dimension, the ranks of one replica; on two "
                    "dimensions FSDP2 averages over replicas by itself, before a hook sees anything"
                )
        if dist.get_world_size() > 1 and replicas is None and not any(map(_is_sharded, model.parameters())):
            raise ValueError(
                "no parameter of the model is sharded over more than one rank, so FSDP2 reduces no shares by a hook: "
                "wrap the model in DistributedDataParallel, or apply fully_shard on a mesh of more ranks"
            )

    def connect(self, model: nn.Module, runtime: Runtime) -> None:
        replicas = self.options.get("replicate_group")
        groups = [mesh.get_group() for mesh in _meshes(model) if mesh.ndim == 1]
        for group in groups if replicas is None else [*groups, replicas]:
            shares_of(runtime).among(group)
        reduce_scatters = {has_replicas: _ReduceScatter(runtime, has_replicas) for has_replicas in (False, True)}
        for unit in units(model):
            unit.set_custom_reduce_scatter(reduce_scatters[_has_replicas(unit)])  # type: ignore[arg-type]
            if replicas is not None:
                unit.set_all_reduce_hook(_average_over(replicas, runtime))
            elif _runtimes.get(unit, (None, False))[1]:
                unit.set_all_reduce_hook(None)  # type: ignore[arg-type]  # of a closed hook of ours
            _runtimes[unit] = runtime, replicas is not None


def _meshes(model: nn.Module) -> list[DeviceMesh]:
    meshes = {p.device_mesh for p in model.parameters() if isinstance(p, DTensor)}
    return sorted(meshes, key=lambda mesh: (mesh.ndim, mesh.mesh.tolist()))


def _average_over(replicate_group: dist.ProcessGroup, runtime: Runtime) -> Callable[[Tensor], None]:
    """Called by FSDP2 with each reduced share, on its stream for all-reduces."""

    def average(share: Tensor) -> None:
        if share.is_cuda:
            # FSDP2 before PyTorch 2.15 frees it in the order of another stream than this one.
            share.record_stream(torch.cuda.current_stream())
        reduce(runtime, share, None, replicate_group)

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
