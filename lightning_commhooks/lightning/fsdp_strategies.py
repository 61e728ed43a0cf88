"""The part that the FSDP strategies of `lightning` and `pytorch_lightning` share."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

from lightning_commhooks.hooks import BF16, FP16, AllReduce
from lightning_commhooks.interface.checks import check_integer
from lightning_commhooks.interface.hook import CommHook
from lightning_commhooks.lightning.averaging import AveragesModelsMixin
from lightning_commhooks.lightning.refusals import check_options, misconfigured, needs_hook, refusals_of
from lightning_commhooks.runtime.attachment import Attachment
from lightning_commhooks.sources import fsdp1
from lightning_commhooks.sources.attach import attach, check_values
from lightning_commhooks.sources.ddp import check_even
from lightning_commhooks.sources.fsdp import resolve_sharded_hook
from lightning_commhooks.sources.fsdp2 import gather_hooks
from lightning_commhooks.sources.replicas import load_shard, resolve_hook_of_replicas, save_shard, shard_file
from lightning_commhooks.wrappers.hook_name import NoHook

ShardedHookName = Literal["allreduce", "reduce_scatter", "fp16", "bf16", "int8", "int4", "fp8"]


class ShardedHookMixin(AveragesModelsMixin):
    """Attaches a communication hook when the model of a strategy is set up for training."""

    # Names of options that Lightning hands over to FSDP when training begins.
    _options_of_fsdp: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, hook: CommHook | str, **kwargs: Any) -> None:
        self._init_averaging(resync=False)
        with refusals_of(self):
            self._hook = self._resolve(hook)
        known = {*inspect.signature(super().__init__).parameters, *self._options_of_fsdp}
        check_options(self, kwargs, known, self._hook, "FSDP")
        super().__init__(**kwargs)

    def _resolve(self, hook: CommHook | str) -> CommHook:
        return resolve_sharded_hook(hook)

    @property
    def hook(self) -> CommHook:
        """The hook's configuration, with a name resolved."""
        return self._hook

    @property
    def attachment(self) -> Attachment | None:
        """The hook at work in the last `fit` of this process, for `metrics()`; `None` before the first."""
        return self._attachment

    def setup(self, trainer: Any) -> None:
        """Set the model up; attach the hook for training."""
        super().setup(trainer)
        if trainer.state.fn == "fit":
            with refusals_of(self):
                self._attach()
            self._watch_optimizers(trainer)

    def _attach(self) -> None:
        self._attachment = attach(self.model, self._hook)


class CompressedFSDPMixin(ShardedHookMixin):
    """Lightning's `FSDPStrategy` with gradients communicated in low precision, on CPU and GPU.

    `Trainer(strategy=CompressedFSDPStrategy(hook="bf16"))`.

    Args:
        hook: `"fp16"`, `"bf16"`, `"int8"`, `"int4"` or `"fp8"`; `"allreduce"` or `"reduce_scatter"` for gradients as
            they are; or one of them configured. With hybrid strategies, `"fp16"` or `"bf16"`, by
            `MixedPrecision(reduce_dtype=...)`: FSDP takes no hook there, and `attachment` stays `None`.
        **kwargs: arguments of `FSDPStrategy` and `torch.distributed.fsdp.FullyShardedDataParallel`.

    Raises:
        MisconfigurationException: unknown hook, or one that does not work with FSDP or the sharding strategy.
    """

    _options_of_fsdp = frozenset(inspect.signature(FullyShardedDataParallel).parameters)
    kwargs: dict[str, Any]

    @needs_hook("bf16")
    def __init__(self, hook: CommHook | ShardedHookName | NoHook, **kwargs: Any) -> None:
        super().__init__(hook, **kwargs)
        self._root: FullyShardedDataParallel | None = None
        self._is_hybrid = self.sharding_strategy in fsdp1.HYBRID
        if self._is_hybrid:
            with refusals_of(self):
                self._check_hybrid()

    def _check_hybrid(self) -> None:
        accumulates = getattr(self._hook, "accumulate_dtype", None) is not None
        if not isinstance(self._hook, (AllReduce, BF16, FP16)) or accumulates:
            raise ValueError(
                f"FullyShardedDataParallel takes no communication hook with {self.sharding_strategy}, so "
                f"hook={self._hook!r} cannot work; 'bf16', 'fp16' and 'allreduce' do, by MixedPrecision(reduce_dtype)"
            )
        wanted, given = self._reduce_dtype, self.mixed_precision and self.mixed_precision.reduce_dtype
        if None not in (wanted, given) and wanted != given:
            raise ValueError(f"hook={self._hook.name!r} and mixed_precision with reduce_dtype={given} contradict")

    @property
    def _reduce_dtype(self) -> torch.dtype | None:
        """The dtype in which FSDP reduces by itself, where it takes no hook; `None`: its own choice."""
        return getattr(self._hook, "dtype", None) if self._is_hybrid else None

    @property
    def mixed_precision_config(self) -> MixedPrecision | None:
        """The `mixed_precision` of FSDP; with hybrid strategies it has the dtype of the hook."""
        config: MixedPrecision | None = super().mixed_precision_config
        if self._reduce_dtype is None:
            return config
        return dataclasses.replace(config or MixedPrecision(), reduce_dtype=self._reduce_dtype)

    def _attach(self) -> None:
        if not self._is_hybrid:
            self._attachment = attach(self.model, self._hook)
        elif self._reduce_dtype is not None:
            fsdp1.check_reduce_dtype(self.model, self._reduce_dtype)

    def setup_environment(self) -> None:
        """Start communication; on CPU, make the device mesh there."""
        mesh = self.kwargs.get("device_mesh")
        if self.root_device.type != "cpu" or not isinstance(mesh, tuple):
            super().setup_environment()
            return
        del self.kwargs["device_mesh"]
        super().setup_environment()
        self.kwargs["device_mesh"] = init_device_mesh("cpu", mesh)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights, as `state_dict_type` says."""
        is_sharded = any(unit.sharding_strategy.name != "NO_SHARD" for unit in fsdp1.units(self.model))
        if self.root_device.type == "cpu" and self._state_dict_type == "full" and is_sharded:
            raise misconfigured(
                self,
                f"{type(self).__name__}: on CPU, PyTorch's FSDP crashes when it gathers a full state dict (it "
                "frees gathered weights, not copies); set state_dict_type='sharded', or enable_checkpointing=False",
            )
        return super().lightning_module_state_dict()

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        # In a second fit Lightning would train units without their root, which get no gradients.
        if self._root is None or self._root.module is not model:
            wrapped = self._wrap(model)
            self._root = wrapped if isinstance(wrapped, FullyShardedDataParallel) else None
            return wrapped
        return self._root

    def _wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        if self.root_device.type != "cpu" or fsdp1.units(model):
            return super()._setup_model(model)
        # Lightning does not say on which device, and FSDP looks for another one than the CPU.
        model = FullyShardedDataParallel(
            model,
            cpu_offload=self.cpu_offload,
            mixed_precision=self.mixed_precision_config,
            sharding_strategy=self.sharding_strategy,
            device_id=self.root_device,
            **self.kwargs,
        )
        kwargs, self.kwargs = self.kwargs, {}  # or Lightning would warn that the policy in it is not used
        try:
            return super()._setup_model(model)
        finally:
            self.kwargs = kwargs


class CompressedModelParallelMixin(ShardedHookMixin):
    """Lightning's `ModelParallelStrategy`, for FSDP2, with a communication hook.

    `Trainer(strategy=CompressedModelParallelStrategy(hook="powersgd", replicas=4, data_parallel_size=32))`. Apply
    `fully_shard` in the module's `configure_model`, with replicas over
    `mesh=self.device_mesh["replicas", "data_parallel"]`. Each rank then has a share of the hook's state, which is saved
    in sharded checkpoints, and can be loaded on any number of shards and replicas.

    Args:
        hook: with replicas, any hook, between them; a rank that steps alone is a replica then. Otherwise the hook of
            the reduce-scatter: see [`CompressedFSDPStrategy`][], with hooks for all meshes.
        replicas: number of replicas of the model, each sharded over `data_parallel_size / replicas` ranks, as on a
            node. With more than one the device mesh has a first dimension `"replicas"`, and `"data_parallel"` is the
            dimension of the shards.
        shard_hook: with replicas, the hook of the reduce-scatter within one. `None`: FSDP2's own.
        gather_hook: the format in which parameters are gathered, as in [`attach`][]. `None`: as they are.
        gather_differences: whether ranks gather changes of weights: see there.
        exact_state: save state that differs between replicas for every replica: see [`CompressedDDPStrategy`][].
        resync: with replicas, and hooks that let them step alone, whether they continue from the average after
            validation and checkpoints: see [`CompressedDDPStrategy`][].
        **kwargs: arguments of `ModelParallelStrategy`.

    Raises:
        MisconfigurationException: unknown hook, or one that does not work with FSDP2; `replicas` do not divide
            `data_parallel_size`; an option for replicas without them; `DiLoCo(period_seconds=...)`.
    """

    _device_mesh: Any
    _averages_each_batch = True

    @needs_hook("bf16")
    def __init__(
        self,
        hook: CommHook | NoHook | str,
        replicas: int = 1,
        shard_hook: CommHook | ShardedHookName | None = None,
        gather_hook: CommHook | ShardedHookName | None = None,
        gather_differences: bool = False,
        exact_state: bool = False,
        resync: bool = False,
        **kwargs: Any,
    ) -> None:
        self._replicas = replicas
        self._options: dict[str, Any] = {"shard_hook": shard_hook, "exact_state": exact_state}
        self._of_replicas = {**self._options, "resync": resync}
        self._gathers: dict[str, Any] = {"gather_hook": gather_hook, "gather_differences": gather_differences}
        super().__init__(hook, **kwargs)
        self._resync = resync
        if isinstance(size := kwargs.get("data_parallel_size"), int):
            self._check_divides(size)

    def _resolve(self, hook: CommHook | str) -> CommHook:
        check_integer("replicas", self._replicas, 1)
        check_values(exact_state=self._options["exact_state"], resync=self._of_replicas["resync"])
        gather_hooks(self._gathers)
        if self._replicas == 1:
            if given := [name for name, value in self._of_replicas.items() if value]:
                raise ValueError(f"{given[0]} is for replicas=2 or more; here hook= is the hook of the reduce-scatter")
            return resolve_sharded_hook(hook, remembers=True)
        if self._options["shard_hook"] is not None:
            resolve_sharded_hook(self._options["shard_hook"], remembers=True, option="shard_hook")
        resolved = resolve_hook_of_replicas(hook)
        check_even(resolved, "the Trainer")
        return resolved

    def _check_divides(self, num_ranks: int) -> None:
        if num_ranks % self._replicas:
            raise misconfigured(
                self, f"{type(self).__name__}: replicas={self._replicas} do not divide data_parallel_size={num_ranks}"
            )

    def _attach(self) -> None:
        # Only hooks for replicas average models.
        optimizers = (lambda: self.optimizers) if self._replicas > 1 else None
        self._attachment = attach(self.model, self._hook, optimizers=optimizers, **self._options, **self._gathers)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Make a step. Before it, once the first steps are over, report the hook's expected effect on this run."""
        if self._replicas > 1 and self._attachment is not None and not self._attachment.is_closed:
            self._show_forecast(self._attachment)
        return super().training_step(*args, **kwargs)

    def setup_environment(self) -> None:
        """Start communication, and make the device mesh; with replicas one of three dimensions."""
        super().setup_environment()
        if self._replicas > 1:
            num_ranks, num_parts = (self._device_mesh[name].size() for name in ("data_parallel", "tensor_parallel"))
            self._check_divides(num_ranks)
            sizes = {"replicas": self._replicas, "data_parallel": num_ranks // self._replicas}
            names = {**sizes, "tensor_parallel": num_parts}
            mesh = init_device_mesh(self.root_device.type, tuple(names.values()), mesh_dim_names=tuple(names))
            self._device_mesh = self.lightning_module._device_mesh = mesh

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The ranks that have different batches."""
        kwargs: dict[str, Any] = super().distributed_sampler_kwargs
        if self._replicas > 1:
            kwargs["rank"] += self._device_mesh.get_local_rank("replicas") * kwargs["num_replicas"]
            kwargs["num_replicas"] *= self._replicas
        return kwargs

    def _state_of_hook(self, path: Path) -> Path | None:
        """The file for this rank's share of the hook's state, in a sharded checkpoint; `None` if there is no state."""
        if self._replicas == 1 or self._attachment is None or not self._attachment.has_state:
            return None
        return shard_file(self._attachment, path, "comm_hook")

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save the checkpoint, and if it is a sharded one this rank's share of the hook's state."""
        super().save_checkpoint(checkpoint, filepath, storage_options)
        path = Path(self.broadcast(filepath))
        file = self._state_of_hook(path)
        if file is None or self._attachment is None:
            return
        if self._attachment.is_closed or not path.is_dir():
            why = "is gone after fit()" if self._attachment.is_closed else "is in sharded checkpoints only"
            self._tell(
                f"the state of hook {self._hook.name!r} {why}, and not in {path}: save it by ModelCheckpoint, while "
                "the model is trained, with save_distributed_checkpoint=True"
            )
            return
        save_shard(self._attachment, file)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load the checkpoint, and the hook's state if there is one of this share."""
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        file = self._state_of_hook(Path(self.broadcast(checkpoint_path)))
        if file is not None and self._attachment is not None:
            text = load_shard(self._attachment, file)
            if text is not None:
                self._tell(text)
        return checkpoint

    def _tell(self, text: str) -> None:
        if self.global_rank == 0:
            warnings.warn(text, stacklevel=3)
