"""`CompressedFSDPStrategy` and `CompressedModelParallelStrategy` for the `lightning` package."""

from __future__ import annotations

try:
    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
except ImportError as error:
    raise ImportError("CompressedFSDPStrategy needs Lightning: pip install 'lightning-commhooks[lightning]'") from error

from lightning_commhooks.fsdp_mixin import CompressedFSDPMixin, ShardedHookMixin


class CompressedFSDPStrategy(CompressedFSDPMixin, FSDPStrategy):
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

    _misconfiguration = MisconfigurationException


class CompressedModelParallelStrategy(ShardedHookMixin, ModelParallelStrategy):
    """Lightning's `ModelParallelStrategy`, for FSDP2, with gradients communicated in low precision.

    `Trainer(strategy=CompressedModelParallelStrategy(hook="int8"))`. Apply `fully_shard` in the module's
    `configure_model`.

    Args:
        hook: as of [`CompressedFSDPStrategy`][], with hooks for all meshes.
        **kwargs: arguments of `ModelParallelStrategy`.

    Raises:
        MisconfigurationException: unknown hook, or one that does not work with FSDP2.
    """

    _misconfiguration = MisconfigurationException
