"""The part that the FSDP strategies of `lightning` and `pytorch_lightning` share."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, ClassVar, Literal

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy

from lightning_commhooks.hooks import BF16, FP16, AllReduce
from lightning_commhooks.interface.hook import CommHook
from lightning_commhooks.lightning.refusals import refusals_as
from lightning_commhooks.runtime.attachment import Attachment
from lightning_commhooks.sources import fsdp1
from lightning_commhooks.sources.attach import attach
from lightning_commhooks.sources.sharded_hooks import resolve_sharded_hook

ShardedHookName = Literal["allreduce", "reduce_scatter", "fp16", "bf16", "int8", "int4", "fp8"]


class ShardedHookMixin:
    """Attaches a communication hook when the model of a strategy is set up for training."""

    _misconfiguration: ClassVar[type[Exception]]
    # Names of options that Lightning hands over to FSDP when training begins.
    _options_of_fsdp: ClassVar[frozenset[str]] = frozenset()
    model: Any

    def __init__(self, hook: CommHook | ShardedHookName, **kwargs: Any) -> None:
        known = {*inspect.signature(super().__init__).parameters, *self._options_of_fsdp}
        if unknown := sorted(kwargs.keys() - known):
            raise self._misconfiguration(f"{type(self).__name__} has no option {unknown[0]!r}, and neither has FSDP")
        with refusals_as(self._misconfiguration, self):
            self._hook = resolve_sharded_hook(hook)
        self._attachment: Attachment | None = None
        super().__init__(**kwargs)

    @property
    def hook(self) -> CommHook:
        """The configuration: what a name stands for."""
        return self._hook

    @property
    def attachment(self) -> Attachment | None:
        """The hook at work in the last `fit` of this process, for `metrics()`; `None` before the first."""
        return self._attachment

    def setup(self, trainer: Any) -> None:
        """Set the model up; attach the hook if it is to be trained."""
        super().setup(trainer)  # type: ignore[misc]
        if trainer.state.fn == "fit":
            with refusals_as(self._misconfiguration, self):
                self._attach()

    def _attach(self) -> None:
        self._attachment = attach(self.model, self._hook)

    def teardown(self) -> None:
        """Close the hook, then tear the strategy down."""
        try:
            if self._attachment is not None:
                self._attachment.close()
        finally:
            super().teardown()  # type: ignore[misc]


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
    mixed_precision: MixedPrecision | None
    root_device: torch.device
    sharding_strategy: ShardingStrategy

    def __init__(self, hook: CommHook | ShardedHookName, **kwargs: Any) -> None:
        super().__init__(hook, **kwargs)
        self._root: FullyShardedDataParallel | None = None
        self._is_hybrid = self.sharding_strategy in fsdp1.HYBRID
        if self._is_hybrid:
            with refusals_as(self._misconfiguration, self):
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
        config: MixedPrecision | None = super().mixed_precision_config  # type: ignore[misc]
        if self._reduce_dtype is None:
            return config
        return dataclasses.replace(config or MixedPrecision(), reduce_dtype=self._reduce_dtype)

    def _attach(self) -> None:
        if not self._is_hybrid:
            super()._attach()
        elif self._reduce_dtype is not None:
            fsdp1.check_reduce_dtype(self.model, self._reduce_dtype)

    def setup_environment(self) -> None:
        """Start communication; on CPU, make the device mesh there."""
        mesh = self.kwargs.get("device_mesh")
        if self.root_device.type != "cpu" or not isinstance(mesh, tuple):
            super().setup_environment()  # type: ignore[misc]
            return
        del self.kwargs["device_mesh"]
        super().setup_environment()  # type: ignore[misc]
        self.kwargs["device_mesh"] = init_device_mesh("cpu", mesh)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights, as `state_dict_type` says."""
        is_sharded = any(unit.sharding_strategy.name != "NO_SHARD" for unit in fsdp1.units(self.model))
        if self.root_device.type == "cpu" and self._state_dict_type == "full" and is_sharded:  # type: ignore[attr-defined]
            raise self._misconfiguration(
                f"{type(self).__name__}: on CPU, PyTorch's FSDP crashes when it gathers a full state dict (it "
                "frees gathered weights, not copies); set state_dict_type='sharded', or enable_checkpointing=False"
            )
        return super().lightning_module_state_dict()  # type: ignore[misc, no-any-return]

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        # In a second fit Lightning would train units without their root, which get no gradients.
        if self._root is None or self._root.module is not model:
            wrapped = self._wrap(model)
            self._root = wrapped if isinstance(wrapped, FullyShardedDataParallel) else None
            return wrapped
        return self._root

    def _wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        if self.root_device.type != "cpu" or fsdp1.units(model):
            return super()._setup_model(model)  # type: ignore[misc, no-any-return]
        # Lightning does not say on which device, and FSDP looks for another one than the CPU.
        model = FullyShardedDataParallel(
            model,
            cpu_offload=self.cpu_offload,  # type: ignore[attr-defined]
            mixed_precision=self.mixed_precision_config,
            sharding_strategy=self.sharding_strategy,
            device_id=self.root_device,
            **self.kwargs,
        )
        kwargs, self.kwargs = self.kwargs, {}  # or Lightning would warn that the policy in it is not used
        try:
            return super()._setup_model(model)  # type: ignore[misc, no-any-return]
        finally:
            self.kwargs = kwargs


class CompressedModelParallelMixin(ShardedHookMixin):
    """Lightning's `ModelParallelStrategy`, for FSDP2, with gradients communicated in low precision.

    `Trainer(strategy=CompressedModelParallelStrategy(hook="int8"))`. Apply `fully_shard` in the module's
    `configure_model`.

    Args:
        hook: as of [`CompressedFSDPStrategy`][], with hooks for all meshes.
        **kwargs: arguments of `ModelParallelStrategy`.

    Raises:
        MisconfigurationException: unknown hook, or one that does not work with FSDP2.
    """
