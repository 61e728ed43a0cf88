"""Modules of `fully_shard`, by `set_custom_reduce_scatter`."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import DTensor

from lightning_commhooks.hooks.quantized import CodecConfig, EncodedResidual
from lightning_commhooks.interface.hook import CommHook
from lightning_commhooks.runtime.runtime import Runtime
from lightning_commhooks.sources.finished import Finished
from lightning_commhooks.sources.fsdp import ShardedSource, reduce, shares_of
from lightning_commhooks.sources.gather import Gather, resolve_gather_hook

# The last hook of each unit.
_runtimes: WeakKeyDictionary[FSDPModule, Runtime] = WeakKeyDictionary()


class _ReduceScatter:
    """Takes the place of FSDP2's own reduce-scatter: a `ReduceScatter` of `torch.distributed.fsdp`.

    Args:
        runtime: of the hook.
        residuals: of the unit whose gradients are reduced; `None`: there is no error feedback.
    """

    def __init__(self, runtime: Runtime, residuals: _Residuals | None = None) -> None:
        self._runtime, self._residuals = runtime, residuals

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
        residual = None if self._residuals is None else self._residuals.of(input_tensor, group.size())
        reduce(self._runtime, input_tensor, output_tensor, group, _factor(op, group.size()), residual)
        return Finished(output_tensor.device) if async_op else None


class _Residuals:
    """The residuals of a unit's gradients.

    Args:
        unit: the module.
        block_size: elements with a common scale.
    """

    def __init__(self, unit: FSDPModule, block_size: int) -> None:
        self._unit, self._block_size = weakref.ref(unit), block_size
        # By the number of the parameter group: its trained parameters, and the residual.
        self._residuals: dict[int, tuple[list[int], EncodedResidual]] = {}

    def of(self, flat: Tensor, num_ranks: int) -> EncodedResidual | None:
        """Residual of a parameter group's gradients. None where some are missing: FSDP2 does not say which."""
        unit = self._unit()
        groups = _groups_of([unit] if unit is not None else [])
        numels = [_numel(group) * num_ranks for group in groups]
        if numels.count(flat.numel()) != 1:
            return None
        key = numels.index(flat.numel())
        trained = [id(p) for p in groups[key].fsdp_params if p.sharded_param.requires_grad]
        if key not in self._residuals or self._residuals[key][0] != trained:
            self._residuals[key] = trained, EncodedResidual(self._block_size, flat.device)
        return self._residuals[key][1]


def _numel(group: Any) -> int:
    """Elements of a share of all gradients that are reduced together, with what fills it up."""
    return sum(p.padded_sharded_param_size.numel() for p in group.fsdp_params if p.sharded_param.requires_grad)


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


def units(model: nn.Module) -> list[FSDPModule]:
    """All modules of a model to which `fully_shard` was applied, `model` included."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def param_groups(model: nn.Module) -> list[Any]:
    """FSDP2's `FSDPParamGroup`s, each of parameters that it reduces together."""
    return _groups_of(units(model))


def _groups_of(modules: Iterable[FSDPModule]) -> list[Any]:
    states = {id(state): state for unit in modules if (state := unit._get_fsdp_state())}
    groups: list[Any] = []
    for state in states.values():
        several = getattr(state, "_fsdp_param_groups", None)  # from PyTorch 2.12 on
        groups += [state._fsdp_param_group] if several is None else several
    return [group for group in groups if group is not None]


def refuse_other_communication(model: nn.Module, *, reduces: bool, gathers: bool) -> None:
    """Refuse communication that a hook would silently replace, or cannot follow; raises a `ValueError`.

    Args:
        model: has units.
        reduces: whether the hook replaces the reduce-scatter.
        gathers: whether it replaces the all-gather.
    """
    for unit in units(model):
        # From PyTorch 2.15 on. Gradients are reduced after the backward then, when the step of a hook is over.
        if getattr(unit._get_fsdp_state()._state_ctx, "manual_backward_finalization", False):
            raise ValueError(
                "set_manual_backward_finalization(True) reduces gradients outside of a backward, in which hooks know "
                "no step: call set_manual_backward_finalization(False)"
            )
    for group in param_groups(model):
        reduce_scatter, all_gather = group._reduce_scatter_comm, group._all_gather_comm
        for what, one, ours in (
            ("reduce-scatter", reduce_scatter if reduces else None, (DefaultReduceScatter, _ReduceScatter)),
            ("all-gather", all_gather if gathers else None, (DefaultAllGather, Gather)),
        ):
            if one is not None and not isinstance(one, ours):
                raise ValueError(
                    f"the FSDP2 model has a {what} of its own, {type(one).__name__}, which the hook would replace: "
                    f"leave out the hook, or set_symm_mem_for_comm, set_allocate_memory_from_process_group_for_comm "
                    f"or set_custom_{what.replace('-', '_')}, whichever set it"
                )


class FSDP2(ShardedSource):
    """All units of a model to which `fully_shard` was applied."""

    refused: ClassVar[Mapping[str, str]] = {
        **ShardedSource.refused,
        "shard_hook": "is for models with replicas; without, hook= is the hook of the reduce-scatter: leave it out",
    }

    kept = ("gather_hook",)

    def __init__(self, model: nn.Module) -> None:
        self._gather_hook: CommHook | None = None
        self._gather: Gather | None = None
        self._runtime: Runtime | None = None
        self._units: list[weakref.ref[FSDPModule]] = []
        # Among these ranks one agrees on the hook. In which dimensions of a mesh gradients are reduced, FSDP2 does not
        # say before the first backward.
        meshes = _meshes(model)
        group = meshes[0].get_group(meshes[0].ndim - 1) if meshes else dist.group.WORLD
        assert group is not None
        super().__init__(group)
        self.device = torch.device(meshes[0].device_type if meshes else "cpu")

    remembers: ClassVar[bool] = True

    def resolve_hook(self, hook: object) -> CommHook:
        if (gather_hook := self.options.get("gather_hook")) is not None:
            self._gather_hook = resolve_gather_hook(gather_hook)
        return super().resolve_hook(hook)

    @contextmanager
    def agreeing(self, what: str) -> Iterator[dict[str, object]]:
        with super().agreeing(what) as same:
            yield same
            same["gather_hook"] = self._gather_hook

    def check(self, model: nn.Module) -> None:
        refuse_other_communication(model, reduces=True, gathers=self._gather_hook is not None)
        for unit in units(model):
            previous = _runtimes.get(unit)
            if previous is not None and not previous.is_closed:
                raise ValueError(
                    f"the FSDP2 model has the communication hook {previous.name!r} already; close it first"
                )
        if dist.get_world_size() > 1 and not any(map(_is_sharded, model.parameters())):
            raise ValueError(
                "no parameter of the model is sharded over more than one rank, so FSDP2 reduces no shares by a hook: "
                "wrap the model in DistributedDataParallel, or apply fully_shard on a mesh of more ranks"
            )

    def connect(self, model: nn.Module, runtime: Runtime) -> None:
        for mesh in _meshes(model):
            if mesh.ndim == 1:
                shares_of(runtime).among(mesh.get_group())
        if self._gather_hook is not None:
            self._gather = Gather(units(model), self._gather_hook, self.device)
        hook = runtime.config
        block_size = hook.codec.block_size if isinstance(hook, CodecConfig) and hook.use_error_feedback else None
        if block_size is not None:
            EncodedResidual(block_size, self.device)  # compiles now, not in the first backward
        self._runtime, self._units = runtime, [weakref.ref(unit) for unit in units(model)]
        for unit in units(model):
            residuals = None if block_size is None else _Residuals(unit, block_size)
            unit.set_custom_reduce_scatter(_ReduceScatter(runtime, residuals))  # type: ignore[arg-type]
            _runtimes[unit] = runtime

    def metrics(self) -> dict[str, float]:
        return self._gather.metrics() if self._gather is not None else {}

    def close(self) -> None:
        """Leave the average to FSDP2 again; a failure stays one, since ranks have other gradients after it."""
        if self._gather is not None:
            self._gather.close()
        for unit in self._units:
            if (module := unit()) is not None and self._runtime is not None and not self._runtime.has_failed:
                module.set_custom_reduce_scatter(DefaultReduceScatter())


def _meshes(model: nn.Module) -> list[DeviceMesh]:
    meshes = {p.device_mesh for p in model.parameters() if isinstance(p, DTensor)}
    return sorted(meshes, key=lambda mesh: (mesh.ndim, mesh.mesh.tolist()))


def _is_sharded(parameter: Tensor) -> bool:
    if not isinstance(parameter, DTensor):
        return False
    sizes = enumerate(parameter.placements)
    return any(placement.is_shard() and parameter.device_mesh.size(dim) > 1 for dim, placement in sizes)
