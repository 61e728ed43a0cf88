"""Replicas of sharded models: the all-reduce of `fully_shard` and of `replicate` between them."""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, HSDPMeshInfo
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from lightning_commhooks.basics.copies import NotCopied
from lightning_commhooks.collectives.averaging import own_part
from lightning_commhooks.collectives.errors import HookError
from lightning_commhooks.interface.bucket import Slot
from lightning_commhooks.interface.hook import CommHook
from lightning_commhooks.interface.layout import Layout
from lightning_commhooks.interface.registry import get_hook
from lightning_commhooks.interface.user_function import UserFunction
from lightning_commhooks.runtime.attachment import Attachment
from lightning_commhooks.runtime.local_steps import LocalSteps
from lightning_commhooks.runtime.runtime import Runtime
from lightning_commhooks.runtime.source import Source
from lightning_commhooks.sources.fsdp import Finished, resolve_sharded_hook
from lightning_commhooks.sources.fsdp2 import (
    FSDP2,
    Gather,
    follow_backwards,
    gather_hooks,
    param_groups,
    refuse_other_communication,
    states,
    units,
)
from lightning_commhooks.wrappers.scale import accumulation_of, without_scale

logger = logging.getLogger(__name__)

_FACTOR = "is for DistributedDataParallel; leave it out and call set_gradient_divide_factor() of the sharded modules"


class _HookedGroup(dist.ProcessGroup):
    """The ranks of other replicas for one unit: its all-reduce is the hook's."""

    def __init__(self, unit: _Unit, process_group: dist.ProcessGroup) -> None:
        super().__init__(process_group.rank(), process_group.size())  # type: ignore[call-arg]  # there is such a one
        self._unit = unit
        self.real = process_group

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        (share,), op = tensors, opts.reduceOp
        try:
            if not (op == dist.ReduceOp.AVG or op == dist.ReduceOp.SUM):
                raise HookError(f"FSDP2 asks for {op} between replicas; communication hooks know AVG and SUM")
            if share.is_cuda:
                # Before PyTorch 2.15 FSDP2 frees it in the order of another stream than this one.
                share.record_stream(torch.cuda.current_stream())
            # With a sum, for float16, float64, a divide factor, or forced, FSDP2 divides the result. The hook gets
            # gradients in units of the loss all the same: its memory may be loaded with another number of shards.
            divisor = self._unit.divisor(share) if op == dist.ReduceOp.SUM else None
            _multiply_(share, self.size() / divisor if divisor else 1)
            self._unit.average_(share)
            _multiply_(share, divisor or 1)
        except Exception as failure:
            # PyTorch would log an exception from here, and fail at that, since it does not know this group.
            self._unit.failure = failure
        return Finished(share.device)

    def getBackendName(self) -> str:
        return "lightning_commhooks"


class _Unit:
    """The parameters that FSDP2 reduces together, and their hook.

    Args:
        group: FSDP2's `FSDPParamGroup`.
        source: of the model.
        names: of its parameters, by the `id` of FSDP2's `FSDPParam`.
    """

    def __init__(self, group: Any, source: Replicas, names: Mapping[int, str]) -> None:
        # A weak reference: the group holds modules, and the attachment holds this unit.
        self._group = weakref.ref(group)
        self._source = source
        self._names = names
        self._original = group.mesh_info
        self._reduced: tuple[Any, ...] = ()
        self._layouts: dict[tuple[int, ...], tuple[tuple[Slot, ...], list[int]]] = {}
        self._runtime: Runtime | None = None
        self.failure: Exception | None = None

    def connect(self, runtime: Runtime) -> None:
        """Average these parameters' gradients with the hook from now on."""
        group = self._group()
        assert group is not None
        mesh_info = _with_replicas(group.mesh_info)
        # On a mesh of one dimension, ranks that the user named.
        mesh_info.replicate_process_group = _HookedGroup(self, self._source.process_group)
        if group.post_forward_mesh_info is group.mesh_info:
            group.post_forward_mesh_info = mesh_info
        group.mesh_info, self._runtime = mesh_info, runtime
        post_backward = group.post_backward

        def noting(*args: Any) -> None:
            # FSDP2 does not report which parameters are in the share.
            self._reduced = tuple(p for p in group.fsdp_params if _is_reduced(p, group))
            post_backward(*args)
            self._reduced = ()
            if self.failure is not None:
                failure, self.failure = self.failure, None
                raise failure

        group.post_backward = noting  # on the instance: autograd asks it by name

    def divisor(self, share: Tensor) -> float:
        """Return the number by which FSDP2 divides the sum over replicas."""
        group = self._group()
        assert group is not None
        mesh_info = group.mesh_info
        shards, replicas = getattr(mesh_info, "shard_process_group", None), mesh_info.replicate_process_group
        options = group.gradient_divide_factor, group.force_sum_reduction_for_comms
        _, afterwards, *_ = _get_gradient_divide_factors(shards, replicas, share.dtype, share.device.type, *options)
        return afterwards or 1.0

    def average_(self, share: Tensor) -> None:
        """Average this rank's share of the gradients over replicas, on CUDA on the current stream."""
        runtime, (slots, parts) = self._runtime, self._layout_of(share)
        assert runtime is not None

        def average() -> None:
            if runtime.bound.averages_models:
                self._check_parameters(runtime.name)
            # Rows that fill shares up to the same size are in no bucket.
            flat = share if parts[0].numel() == share.numel() else torch.cat(parts)
            step, index = runtime.clock.place_in_backward(ends=True)
            self._source.note((p.sharded_param for p in self._reduced), is_first=index == 0)
            bucket = runtime.bucket(flat, slots, index, True, step, None)
            runtime.wait_for(runtime.submit(bucket, is_late=False))
            if flat is not share:
                torch._foreach_copy_(parts, list(flat.split([part.numel() for part in parts])))

        self._source.average_unit(runtime, average)

    def _layout_of(self, share: Tensor) -> tuple[tuple[Slot, ...], list[Tensor]]:
        """The parameters in a share, and the stretches of it that are theirs."""
        reduced = tuple(map(id, self._reduced))
        if reduced not in self._layouts:
            slots, sizes, numel = [], [], 0
            for p in self._reduced:
                own = own_part(p.sharded_param)
                if own.numel():  # there may be fewer rows than ranks
                    slots.append(Slot(self._names[id(p)], tuple(p.sharded_size), numel, own))
                    numel += own.numel()
                sizes += [own.numel(), p.padded_sharded_param_size.numel() - own.numel()]
            self._layouts[reduced] = tuple(slots), sizes
        slots_there, sizes = self._layouts[reduced]
        if sum(sizes) != share.numel():
            raise HookError(
                f"FSDP2 reduces {share.numel()} elements, its {len(self._reduced)} parameters with gradients have "
                f"{sum(sizes)}"
            )
        return slots_there, [share] if not any(sizes[1::2]) else list(share.split(sizes)[::2])

    def _check_parameters(self, hook: str) -> None:
        """Refuse parameters that have been replaced since the hook was attached."""
        name_of = self._source.layout.name_of
        replaced = [self._names[id(p)] for p in self._reduced if name_of(p.sharded_param) is None]
        if replaced:
            raise HookError(
                f"hook {hook!r} averages models, and parameter {replaced[0]!r} is another tensor than when the hook "
                "was attached, as after load_state_dict(assign=True): leave assign out, or attach the hook after it"
            )

    def reshard(self) -> None:
        """Drop gathered parameters, if FSDP2 has kept them after a forward."""
        if (group := self._group()) is not None:
            group.reshard()

    def close(self) -> None:
        """Leave the average to FSDP2 again; a failure stays one, since ranks have other gradients after it."""
        group = self._group()
        if group is not None and self._runtime is not None and not self._runtime.has_failed:
            # FSDP2 may have set the other one to None meanwhile.
            if group.post_forward_mesh_info is group.mesh_info:
                group.post_forward_mesh_info = self._original
            group.mesh_info = self._original
            del group.post_backward
            self._runtime = None


def _restore_before_forward(state: Any, local: LocalSteps) -> None:
    """Restore own models where FSDP2 begins a forward that a hook of the model does not see.

    That is of a part of the model, or by `register_fsdp_forward_method`.
    """
    begin = state._root_pre_forward

    def restoring(*args: Any) -> Any:
        if state._state_ctx.iter_forward_root is None and torch.is_grad_enabled():
            local.hide_average()
        return begin(*args)

    state._root_pre_forward = restoring  # on the instance, which asks for it by name


def _multiply_(share: Tensor, factor: float) -> None:
    if factor != 1:
        share.mul_(factor)


def _with_replicas(mesh_info: Any) -> Any:
    """A copy, since units share them; one that averages over replicas, whatever mesh it is of."""
    if isinstance(mesh_info, DDPMeshInfo):
        return copy.copy(mesh_info)
    both = object.__new__(HSDPMeshInfo)
    both.__dict__.update(mesh_info.__dict__)
    return both


def _is_reduced(p: Any, group: Any) -> bool:
    """Whether `post_backward` is about to find a gradient."""
    if not hasattr(p, "_unsharded_param"):
        return False
    if p.unsharded_accumulated_grad is not None or p.unsharded_param.grad is not None:
        return True
    return bool(getattr(group, "reduce_scatter_unused_params", False)) and p.unsharded_param.requires_grad


def _replicas_of_group(group: Any) -> dist.ProcessGroup | None:
    """The ranks between which FSDP2 averages shares of a parameter group; `None` where there is only one replica."""
    given = getattr(group.mesh_info, "replicate_process_group", None)
    found = given.real if isinstance(given, _HookedGroup) else given
    return found if found is not None and found.size() > 1 else None


def replicas_of(model: nn.Module) -> list[dist.ProcessGroup]:
    """The groups of ranks between which FSDP2 averages shares of a model, each once."""
    found = map(_replicas_of_group, param_groups(model))
    return [*{id(one): one for one in found if one is not None}.values()]


def _shards_of(groups: Iterable[Any]) -> list[dist.ProcessGroup]:
    """The groups of ranks that have shards of parameter groups."""
    found = dict.fromkeys(getattr(group.mesh_info, "shard_process_group", None) for group in groups)
    return [one for one in found if one is not None and one.size() > 1]


def _tensor_parallel(groups: Iterable[Any]) -> list[dist.ProcessGroup]:
    """The groups of ranks that have the other parts of tensor-parallel parameters."""
    found: dict[dist.ProcessGroup, None] = {}
    for group in groups:
        of_fsdp = group.mesh_info.mesh.mesh_dim_names or ()
        for p in group.fsdp_params:
            mesh: Any = p.sharded_param.device_mesh if isinstance(p.sharded_param, DTensor) else None
            others = [name for name in (mesh and mesh.mesh_dim_names) or () if name not in of_fsdp]
            found |= dict.fromkeys(map(mesh.get_group, others)) if others else {}
    return [one for one in found if one.size() > 1]


def resolve_hook_of_replicas(hook: object) -> CommHook:
    """Check the hook between replicas of sharded models, without a model; raises a `ValueError`."""
    resolved = get_hook(hook)  # type: ignore[arg-type]  # refuses what is no hook of this library
    if isinstance(without_scale(resolved), UserFunction):
        raise ValueError(f"hook={hook!r} is a function for DistributedDataParallel; sharded models take a CommHook")
    if accumulation_of(resolved) != "framework":
        raise ValueError(f"{type(resolved).__name__} {_FACTOR}")
    return resolved


class Replicas(Source):
    """The ranks that hold the same shares of replicas of a model. FSDP2 does everything else.

    The seam is the process group to which FSDP2 gives each reduced share.

    Args:
        model: a module in which `fully_shard` or `replicate` was applied to modules.
        replicate_group: the ranks, if FSDP2 does not average over replicas by itself, or averages some parameters over
            different ranks; the hook averages the parameters whose replicas these ranks hold.
    """

    refused: ClassVar[Mapping[str, str]] = {
        "hook_state": "belongs to hook functions (state, bucket), which are for DistributedDataParallel",
        "accumulation": _FACTOR,
        "loss_divided_by": _FACTOR,
    }
    kept = ("replicate_group", "shard_hook", "gather_hook", "gather_differences")

    def __init__(self, model: nn.Module, replicate_group: dist.ProcessGroup | None = None) -> None:
        groups = replicas_of(model)
        if groups and replicate_group is not None and (len(groups) == 1 or replicate_group not in groups):
            raise ValueError(
                "replicate_group is for fully_shard on a mesh of one dimension, the ranks of one replica; on two "
                "dimensions FSDP2 knows the replicas by itself: leave it out, or where there are several groups of "
                "them name one"
            )
        if len(groups) > 1 and replicate_group is None:
            raise ValueError(
                f"parameters of the model have replicas in {len(groups)} process groups, and a hook averages over one: "
                "attach a hook for each, attach(..., replicate_group=mesh.get_group(0)) with the mesh of its parameters"
            )
        super().__init__(groups[0] if replicate_group is None else replicate_group)
        self._are_known = bool(groups)
        # All ranks of this replica; the hook's state has the shards of its own parameters only.
        everything = param_groups(model)
        shards = _shards_of(everything)
        self._is_sharded, self.shard_groups = bool(shards), [*shards, *_tensor_parallel(everything)]
        own = [group for group in everything if self._has_replicas(group)]
        self.shard = [[group.rank(), group.size()] for group in _shards_of(own)]
        if parts := _tensor_parallel(own):
            # Parts are not put together like shards: there are always two numbers then.
            self.shard = [*(self.shard or [[0, 1]]), *([group.rank(), group.size()] for group in parts)]
        self._gather: Gather | None = None
        # Of that hook.
        self._within: Runtime | None = None
        self._units: list[_Unit] = []
        self._states: list[weakref.ref[Any]] = []
        self._handle: RemovableHandle | None = None
        self._reduced: list[Tensor] = []
        self._stream: torch.cuda.Stream | None = None

    def average_unit(self, runtime: Runtime, average: Callable[[], None]) -> None:
        """Average the gradients of a unit."""
        with runtime.aborting():
            average()

    def _has_replicas(self, group: Any) -> bool:
        """Whether these parameters are averaged over the ranks of the hook, and not sharded over all ranks."""
        return not self._are_known or _replicas_of_group(group) is self.process_group

    def resolve_hook(self, hook: object) -> CommHook:
        resolved = resolve_hook_of_replicas(hook)
        for name in ("shard_hook", "gather_hook", "gather_differences"):
            if name in self.options and not self._is_sharded:
                raise ValueError(f"{name} is for models that are sharded within a replica: leave it out here")
        if "shard_hook" in self.options:
            # The hook within a replica does not hear of votes, and would remember gradients of a step that was lost.
            remembers = not self.ranks_change
            self.hooks["shard_hook"] = resolve_sharded_hook(self.options["shard_hook"], remembers, "shard_hook")
        self.hooks |= gather_hooks(self.options)
        return resolved

    def check(self, model: nn.Module) -> None:
        refuse_other_communication(
            model,
            reduces="shard_hook" in self.hooks,
            gathers="gather_hook" in self.hooks,
            differences="gather_differences" in self.options,
        )
        for group in filter(self._has_replicas, param_groups(model)):
            if isinstance(getattr(group.mesh_info, "replicate_process_group", None), _HookedGroup):
                raise ValueError("the sharded model has a communication hook between its replicas already; close it")
        devices = {group.device for group in param_groups(model)}
        (self.device,) = devices
        # Without those of other replicas, and `ignored_params` of FSDP2, which may be each rank's own.
        own = {p.sharded_param for group in filter(self._has_replicas, param_groups(model)) for p in group.fsdp_params}
        others = {name for name, p in nn.Module.named_parameters(model) if p not in own}
        self.layout = Layout(model, others, ignores_root=True)

    def connect(self, model: nn.Module, runtime: Runtime) -> None:
        if runtime.bound.averages_models and not all(map(self._has_replicas, param_groups(model))):
            raise ValueError(
                f"hook={runtime.name!r} averages models, and some parameters have replicas among other ranks, or "
                "none: use a hook of gradients"
            )
        groups = [group for group in param_groups(model) if self._has_replicas(group)]
        names = {id(p): str(self.layout.name_of(p.sharded_param)) for group in groups for p in group.fsdp_params}
        self._units = [_Unit(group, self, names) for group in groups]
        if "gather_hook" in self.hooks:
            differences = "gather_differences" in self.options
            self._gather = Gather(units(model), self.hooks["gather_hook"], self.device, differences)
        if "shard_hook" in self.hooks:
            shards = FSDP2(model)
            shards.check(model)
            self._within = Runtime(self.hooks["shard_hook"], shards)
            self._within.connect(model)
        follow_backwards(model, runtime.clock)
        for unit in self._units:
            unit.connect(runtime)
        if runtime.bound.averages_models:
            local = runtime.local
            before = torch.compiler.disable(lambda model, inputs: local.before_forward(model.training))
            # Before FSDP2's own, which gathers the parameters.
            self._handle = model.register_forward_pre_hook(NotCopied(before), prepend=True)
            for state in states(units(model)):
                _restore_before_forward(state, local)
                self._states.append(weakref.ref(state))

    def metrics(self) -> dict[str, float]:
        found = self._gather.metrics() if self._gather is not None else {}
        within = self._within.metrics() if self._within is not None else {}
        names = ("bytes_sent", "bytes_dense", "compression_ratio")
        return {**found, **{f"shard_{name}": within[name] for name in names if name in within}}

    def weights_replaced(self) -> None:
        # FSDP2 keeps the gathered parameters of its root after a forward without gradients.
        for unit in self._units:
            unit.reshard()

    def gradients(self, reduced: Sequence[Tensor]) -> Sequence[Tensor]:
        # FSDP2 may have cast, added or offloaded the reduced gradients, on its own stream. It waits for that at the end
        # of a backward, unless `set_is_last_backward(False)` puts it off.
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
        grads = [p.grad for p in self._reduced if p.grad is not None]
        return [own for grad in grads if (own := own_part(grad)).numel()]

    def note(self, parameters: Iterable[Tensor], is_first: bool) -> None:
        """Note whose gradients are reduced in this step, on CUDA on the current stream."""
        if self.device.type == "cuda":
            self._stream = torch.cuda.current_stream(self.device)
        if is_first:
            self._reduced.clear()
        self._reduced.extend(parameters)

    def close(self) -> None:
        for unit in self._units:
            unit.close()
        self._units.clear()
        if self._handle is not None:
            self._handle.remove()
        for state in filter(None, (one() for one in self._states)):
            vars(state).pop("_root_pre_forward", None)
        self._reduced.clear()
        super().close()
        for part in (self._within, self._gather):
            if part is not None:
                part.close()


def shard_file(attachment: Attachment, folder: str | Path, name: str) -> Path:
    """The file for the shard that this rank has."""
    index, size = attachment.shard
    return Path(folder, f"{name}-{index}-of-{size}.pt")


def save_shard(attachment: Attachment, file: Path) -> None:
    """Write the state on one of the ranks with the same shard; raises on all if that fails. Collective."""
    state = attachment.state_dict()
    with attachment.runtime.source.agreeing("saving the state of the hook"):
        if attachment.is_first_replica:
            torch.save(state, file)


def load_shard(attachment: Attachment, file: Path) -> str | None:
    """Load the state that [`save_shard`][] has written, on this or another number of shards. Collective.

    Returns:
        a message that the hook's state is reset, if no rank has a file; otherwise `None`.

    Raises:
        HookError: the file of another rank cannot be read.
        ValueError: some ranks have a file, and some do not.
    """
    _, size = attachment.shard
    states: list[dict[str, Any]] = []
    with attachment.runtime.source.agreeing("loading the state of the hook") as same:
        files = [file] if file.exists() else _files_of_other_shards(file)
        same["the number of files with the state"] = len(files)
        states = [torch.load(path, weights_only=True, mmap=True) for path in files]
    if not states:
        return f"hook {attachment.name!r} is reset: the checkpoint has no state of these shards, {file}"
    is_whole = files == [file]
    if not is_whole and attachment.is_first_replica:
        logger.info("state of hook %r: saved on %d shards, resharded for %d", attachment.name, len(files), size)
    attachment.load_state_dict(states[0] if is_whole else states, strict_state=is_whole)
    return None


def _files_of_other_shards(file: Path) -> list[Path]:
    """Those of all shards of another number, in order; the newest if there are several."""
    name = file.name.rsplit("-", 3)[0]
    first_files = sorted(file.parent.glob(f"{name}-0-of-*.pt"), key=lambda path: path.stat().st_mtime, reverse=True)
    for count in (int(path.stem.rpartition("-")[2]) for path in first_files):
        files = [file.with_name(f"{name}-{i}-of-{count}.pt") for i in range(count)]
        if all(path.exists() for path in files):
            return files
    return []
