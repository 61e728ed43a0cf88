"""Modules of `fully_shard`, by `set_custom_reduce_scatter` and `set_custom_all_gather`."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import DTensor

from lightning_commhooks.basics.copies import NotCopied
from lightning_commhooks.codecs.codec import Kernels
from lightning_commhooks.collectives.counters import Counters, Timing
from lightning_commhooks.collectives.group import Backend, Group
from lightning_commhooks.hooks import BF16, FP16
from lightning_commhooks.hooks.quantized import CodecConfig, EncodedResidual, gather_encoded
from lightning_commhooks.interface.checks import check_bool
from lightning_commhooks.interface.hook import CommHook
from lightning_commhooks.runtime.passes import StepClock, current_backward
from lightning_commhooks.runtime.runtime import Runtime
from lightning_commhooks.sources.fsdp import Finished, ShardedSource, reduce, resolve_sharded_hook, shares_of

# The last hook of each unit.
_runtimes: WeakKeyDictionary[FSDPModule, Runtime] = WeakKeyDictionary()
# Clocks that follow the backwards of FSDP2's states, in the order of `attach`, which is the same on all ranks.
_clocks: WeakKeyDictionary[Any, WeakKeyDictionary[StepClock, None]] = WeakKeyDictionary()


class _ReduceScatter:
    """Takes the place of FSDP2's own reduce-scatter: a `ReduceScatter` of `torch.distributed.fsdp`.

    Args:
        runtime: of the hook.
        unit: the module whose gradients are reduced.
        block_size: elements with a common scale, if the hook has error feedback.
    """

    def __init__(self, runtime: Runtime, unit: FSDPModule | None = None, block_size: int | None = None) -> None:
        self._runtime, self._block_size = runtime, block_size
        self._unit = None if unit is None else weakref.ref(unit)
        # By the number of the parameter group: its trained parameters, and the residual of their gradients.
        self._residuals: dict[int, tuple[list[int], EncodedResidual]] = {}

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
        residual = None if self._block_size is None else self._residual(input_tensor, group.size(), self._block_size)
        reduce(self._runtime, input_tensor, output_tensor, group, _factor(op, group.size()), residual)
        return Finished(output_tensor.device) if async_op else None

    def _residual(self, flat: Tensor, num_ranks: int, block_size: int) -> EncodedResidual | None:
        """Residual of a parameter group's gradients. None where some are missing: FSDP2 does not say which."""
        unit = None if self._unit is None else self._unit()
        trained = [
            [p for p in group.fsdp_params if p.sharded_param.requires_grad]
            for group in _groups_of([] if unit is None else [unit])
        ]
        # Elements of all gradients that are reduced together, with those that fill up the shares.
        numels = [num_ranks * sum(p.padded_sharded_param_size.numel() for p in parameters) for parameters in trained]
        if numels.count(flat.numel()) != 1:
            return None
        key = numels.index(flat.numel())
        ids = [*map(id, trained[key])]
        if key not in self._residuals or self._residuals[key][0] != ids:
            self._residuals[key] = ids, EncodedResidual(block_size, flat.device)
        return self._residuals[key][1]


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


def gather_hooks(options: Mapping[str, Any]) -> dict[str, CommHook]:
    """Return the resolved `gather_hook` of the options of `attach`, if there is one; raises a `ValueError`."""
    hook, differences = options.get("gather_hook"), options.get("gather_differences", False)
    check_bool("gather_differences", differences)
    if hook is None:
        if differences:
            raise ValueError("gather_differences=True needs a gather_hook: set gather_hook='int4'")
        return {}
    resolved = resolve_sharded_hook(hook, option="gather_hook")
    if not isinstance(resolved, (BF16, FP16, CodecConfig)) or getattr(resolved, "accumulate_dtype", None) is not None:
        raise ValueError(
            f"gather_hook={hook!r} sends parameters as they are: leave it out, or use 'int8', 'fp8', 'bf16'"
        )
    if isinstance(resolved, CodecConfig) and resolved.codec.rounds_at_random:
        raise ValueError(
            f"gather_hook={resolved!r} rounds at random, so that a backward would see other weights than its forward: "
            "set rounding='nearest'"
        )
    if differences and not isinstance(resolved, CodecConfig):
        raise ValueError(f"gather_differences=True is for gather_hook='int4', 'int8' or 'fp8', not for {hook!r}")
    return {"gather_hook": resolved}


class Gather:
    """Gathers the parameters of a model in low precision; each rank's own share stays exact.

    The gathered weights are the weights as sent, on the sending rank too, so that all ranks compute with the same
    weights, in forward and backward.

    Args:
        units: the modules of a model to which `fully_shard` was applied.
        hook: as `gather_hooks` returns it.
        device: of the parameters.
        differences: whether all ranks keep the gathered weights, and ranks send the changes since the last gather.

    Attributes:
        hook: see above.
        differences: see above.
        counters: count the bytes.
    """

    def __init__(
        self, units: Sequence[FSDPModule], hook: CommHook, device: torch.device, differences: bool = False
    ) -> None:
        self.hook, self.differences, self._device = hook, differences, device
        self.counters = Counters()
        self.counters.timing = Timing(every=0)
        self._groups: dict[dist.ProcessGroup, tuple[Group, Kernels | None]] = {}
        self._units = [(weakref.ref(unit), _AllGather(self, weakref.ref(unit))) for unit in units]
        self._has_warned = False
        for unit, (_, all_gather) in zip(units, self._units, strict=True):
            unit.set_custom_all_gather(all_gather)  # type: ignore[arg-type]
        modules = {module for unit in units for module in _modules(unit)} if differences else set()
        self._handles = [
            module.register_load_state_dict_post_hook(NotCopied(self._forget))
            for module in modules
            # Others may load their state on one rank alone.
            if next(module.parameters(), None) is not None
        ]

    def among(self, process_group: dist.ProcessGroup) -> tuple[Group, Kernels | None]:
        """These ranks, and the kernels of the codec, if there is one. Collective when they are asked for first."""
        if process_group not in self._groups:
            group = Group(Backend(process_group), self.counters, self._device, process_group)
            codec = self.hook.codec if isinstance(self.hook, CodecConfig) else None
            kernels = None if codec is None else group.kernels(codec, feedback=False, two_shot=True)
            self._groups[process_group] = group, kernels
        return self._groups[process_group]

    def warn_of_dtypes(self) -> None:
        """Warn, once, of a unit that is gathered as it is."""
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"gather_hook={self.hook.name!r} leaves units with several dtypes or integers as they are, such as "
                "float32 adapters of a bfloat16 model: cast them to one dtype, or set "
                "MixedPrecisionPolicy(param_dtype=torch.bfloat16)",
                stacklevel=2,
            )

    def _forget(self, *args: object) -> None:
        """Gather in full next: weights were loaded, on all ranks, and are far from those that ranks keep."""
        for _, all_gather in self._units:
            all_gather.kept = None

    def metrics(self) -> dict[str, float]:
        """Bytes that were sent of parameters, and that float32 takes."""
        counts = self.counters.as_dict()
        return {f"gather_{name}": counts[name] for name in ("bytes_sent", "bytes_dense", "compression_ratio")}

    def close(self) -> None:
        """Leave the gathering to FSDP2 again."""
        for reference, all_gather in self._units:
            unit = reference()
            if unit is not None and any(group._all_gather_comm is all_gather for group in _groups_of([unit])):
                unit.set_custom_all_gather(DefaultAllGather())
        for handle in self._handles:
            handle.remove()
        self._forget()
        for group, _ in self._groups.values():
            group.release()
        self._groups.clear()


class _AllGather:
    """Takes the place of FSDP2's own all-gather for one unit: an `AllGather` of `torch.distributed.fsdp`.

    Args:
        gather: of the model.
        unit: the module.

    Attributes:
        kept: the weights as all ranks have gathered them last, shape `(w, n)`; `None`: none are kept.
    """

    def __init__(self, gather: Gather, unit: weakref.ref[FSDPModule]) -> None:
        self._gather, self._unit = gather, unit
        self.kept: Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A new tensor for parameters."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather; on CUDA on the current stream, which is FSDP2's stream for this.

        Args:
            output_tensor: shape `(w * n,)`, for the shares of all ranks in turn.
            input_tensor: shape `(n,)`, this rank's share, perhaps in its place in `output_tensor`.
            group: the ranks.
            async_op: whether to return a work.
        """
        ranks, kernels = self._gather.among(group)
        # FSDP2 packs several dtypes into one tensor of bytes.
        is_packed = not input_tensor.is_floating_point()
        size = input_tensor.element_size() if is_packed else max(4, input_tensor.element_size())
        self._gather.counters.bytes_dense += (ranks.size - 1) * input_tensor.numel() * size
        out = output_tensor.view(ranks.size, -1)
        if is_packed:
            self._gather.warn_of_dtypes()
        if is_packed or (kernels is not None and not self._encodes(input_tensor, kernels, group)):
            out.copy_(ranks.finish(ranks.all_gather(input_tensor.clone())))
        elif kernels is None:
            half = input_tensor.to(self._gather.hook.dtype)  # type: ignore[attr-defined]
            out.copy_(ranks.finish(ranks.all_gather(half)))
        elif self._gather.differences:
            self._gather_differences(input_tensor, out, ranks, kernels)
        else:
            ranks.finish(gather_encoded(input_tensor, out, ranks, kernels))
        return Finished(output_tensor.device) if async_op else None

    def _encodes(self, share: Tensor, kernels: Kernels, group: dist.ProcessGroup) -> bool:
        """Return whether to encode a share.

        A share with fewer bytes than a block has elements would become larger. Decoded weights, which ranks keep until
        the backward if `reshard_after_forward` is a number, would change if they were encoded again.
        """
        unit = self._unit()
        parts = [] if unit is None else _groups_of([unit])
        is_large = share.nbytes >= (kernels.codec.block_size or 1)
        return is_large and group in [part.mesh_info.shard_process_group for part in parts]

    def _gather_differences(self, share: Tensor, out: Tensor, ranks: Group, kernels: Kernels) -> None:
        # All ranks take the same branch: they have the same shapes, and load weights and run backwards together.
        if self.kept is None or self.kept.shape != out.shape or self.kept.dtype != out.dtype:
            with torch.inference_mode(False):  # a tensor of that mode could not be changed in training
                self.kept = ranks.finish(ranks.all_gather(share.clone()))
        elif current_backward() < 0:
            ranks.finish(gather_encoded(share, out, ranks, kernels, self.kept))
            return
        # A backward computes with the weights of its forward, which all ranks have.
        out.copy_(self.kept)


def units(model: nn.Module) -> list[FSDPModule]:
    """All modules of a model to which `fully_shard` was applied, `model` included."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _modules(unit: FSDPModule) -> Iterator[nn.Module]:
    assert isinstance(unit, nn.Module)
    return unit.modules()


def param_groups(model: nn.Module) -> list[Any]:
    """FSDP2's `FSDPParamGroup`s, each of parameters that it reduces together."""
    return _groups_of(units(model))


def states(modules: Iterable[FSDPModule]) -> list[Any]:
    """FSDP2's `FSDPState`s, each of one or several modules."""
    return [*{id(state): state for unit in modules if (state := unit._get_fsdp_state())}.values()]


def follow_backwards(model: nn.Module, clock: StepClock) -> None:
    """Tell a clock where FSDP2 notices a backward, inside which reentrant activation checkpointing may run others."""
    for state in states(units(model)):
        if state not in _clocks:
            _clocks[state] = WeakKeyDictionary()
            begin = state._register_root_post_backward_final_callback
            # On the instance, which asks for it by name.
            state._register_root_post_backward_final_callback = functools.partial(
                _begin_backward, begin, _clocks[state]
            )
        _clocks[state][clock] = None


def _begin_backward(begin: Callable[[], None], clocks: WeakKeyDictionary[StepClock, None]) -> None:
    begin()
    for clock in list(clocks):
        clock.enter_backward()


def _groups_of(modules: Iterable[FSDPModule]) -> list[Any]:
    groups: list[Any] = []
    for state in states(modules):
        several = getattr(state, "_fsdp_param_groups", None)  # from PyTorch 2.12 on
        groups += [state._fsdp_param_group] if several is None else several
    return [group for group in groups if group is not None]


def refuse_other_communication(model: nn.Module, *, reduces: bool, gathers: bool, differences: bool = False) -> None:
    """Refuse communication that a hook would silently replace, or cannot follow; raises a `ValueError`.

    Args:
        model: has units.
        reduces: whether the hook replaces the reduce-scatter.
        gathers: whether it replaces the all-gather.
        differences: whether it gathers differences.
    """
    for unit in units(model):
        # From PyTorch 2.15 on. Gradients are reduced after the backward then, when the step of a hook is over.
        if getattr(unit._get_fsdp_state()._state_ctx, "manual_backward_finalization", False):
            raise ValueError(
                "set_manual_backward_finalization(True) reduces gradients outside of a backward, in which hooks know "
                "no step: call set_manual_backward_finalization(False)"
            )
    for group in param_groups(model):
        if differences and group.post_forward_mesh_info not in (None, group.mesh_info):
            raise ValueError(
                "gather_differences=True keeps all weights on each rank, where a number of ranks as "
                "reshard_after_forward saves no memory: set it to True or False"
            )
        reduce_scatter, all_gather = group._reduce_scatter_comm, group._all_gather_comm
        for what, one, ours in (
            ("reduce-scatter", reduce_scatter if reduces else None, (DefaultReduceScatter, _ReduceScatter)),
            ("all-gather", all_gather if gathers else None, (DefaultAllGather, _AllGather)),
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

    kept = ("gather_hook", "gather_differences")
    remembers = True

    def __init__(self, model: nn.Module) -> None:
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

    def resolve_hook(self, hook: object) -> CommHook:
        self.hooks |= gather_hooks(self.options)
        return super().resolve_hook(hook)

    def check(self, model: nn.Module) -> None:
        differences = "gather_differences" in self.options
        refuse_other_communication(model, reduces=True, gathers="gather_hook" in self.hooks, differences=differences)
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
        if "gather_hook" in self.hooks:
            differences = "gather_differences" in self.options
            self._gather = Gather(units(model), self.hooks["gather_hook"], self.device, differences)
        hook = runtime.config
        block_size = hook.codec.block_size if isinstance(hook, CodecConfig) and hook.use_error_feedback else None
        if block_size is not None:
            EncodedResidual(block_size, self.device)  # compiles now, not in the first backward
        follow_backwards(model, runtime.clock)
        self._runtime, self._units = runtime, [weakref.ref(unit) for unit in units(model)]
        for unit in units(model):
            unit.set_custom_reduce_scatter(_ReduceScatter(runtime, unit, block_size))  # type: ignore[arg-type]
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
