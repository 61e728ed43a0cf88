"""`attach_fsdp(model, hook)`: hooks for models that are sharded by FSDP, version 1 or 2."""

from __future__ import annotations

import warnings
import weakref

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_commhooks.fsdp import fsdp1, fsdp2
from lightning_commhooks.fsdp.runtime import ShardedRuntime
from lightning_commhooks.fsdp.supported import resolve_sharded_hook
from lightning_commhooks.interface.hook import CommHook

# Metrics that need several steps, whole gradients, or to know the nodes of each group of FSDP's.
_NOT_OF_SHARDS = (
    "averagings",
    "bytes_evaluation",
    "bytes_evaluation_between_nodes",
    "nonfinite_steps",
    "bytes_sent_between_nodes",
    "bytes_dense_between_nodes",
    "compression_ratio_between_nodes",
)


class FSDPAttachment:
    """A hook at work on one sharded model; made by [`attach_fsdp`][].

    Has no state to save: hooks keep no memory of sharded gradients.
    """

    def __init__(self, runtime: ShardedRuntime, model: nn.Module) -> None:
        self._runtime = runtime
        self._finalizer = weakref.finalize(model, runtime.close)

    def __repr__(self) -> str:
        return f"FSDPAttachment(hook={self.hook!r}, steps={self.num_steps}{', closed' if self.is_closed else ''})"

    @property
    def hook(self) -> CommHook:
        """The configuration."""
        return self._runtime.hook

    @property
    def name(self) -> str:
        """Name of the hook."""
        return self._runtime.hook.name

    @property
    def num_steps(self) -> int:
        """Backwards that reduced gradients; unlike `metrics()`, this never waits for a device."""
        return self._runtime.counters.steps

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called or the model has gone."""
        return self._runtime.is_closed

    def metrics(self) -> dict[str, float]:
        """Cumulative counts of this rank, of gradients alone: parameters are gathered by FSDP itself.

        Returns:
            `steps` (backwards that reduced gradients; with FSDP 1 and reentrant activation checkpointing, each of those
            inside of another counts too), `bytes_sent` and `bytes_dense` (payload bytes this rank sent for
            gradients, and would have sent in float32), `compression_ratio` (dense over sent), `collectives`,
            `numel_compressed` and `numel_uncompressed` (gradient elements that were and were not sent in another form
            than FSDP handed them over), `numel_overflowed` (gradient elements of this rank that are finite, but not in
            the float16 they were sent in). What FSDP2 sends between replicas by itself is not among them.
        """
        metrics = self._runtime.counters.as_dict()
        return {key: value for key, value in metrics.items() if key not in _NOT_OF_SHARDS}

    def close(self) -> None:
        """Let go of the process groups; metrics stay readable, a later backward raises `HookError`.

        Warns when a hook compressed nothing. Closing twice does nothing. Then another hook may be attached.
        """
        if not self._finalizer.detach():
            return
        is_first = any(reduction.group.global_rank == 0 for reduction in self._runtime.reductions.values())
        text = self._runtime.closing_warning() if is_first else ""
        self._runtime.close()
        if text:
            warnings.warn(text, stacklevel=2)


def attach_fsdp(
    model: nn.Module, hook: str | CommHook, *, replicate_group: dist.ProcessGroup | None = None
) -> FSDPAttachment:
    """Let a communication hook reduce the gradients of a model that FSDP shards.

    Collective: every rank calls it, after the model was sharded and before the first forward.

    Args:
        model: a `FullyShardedDataParallel`, a module to which `fully_shard` was applied, or one that has such modules
            inside, all of one kind.
        hook: `"fp16"`, `"bf16"`, `"allreduce"` or `"reduce_scatter"` (the same: which of the two is sent is up to the
            sharding strategy), `"int8"`, `"int4"`, `"fp8"`, or one of them configured.
        replicate_group: of FSDP2, ranks that hold the same shares of replicas of the model, each of which
            `fully_shard` was applied to on a mesh of its own, with equal weights. The hook averages shares over them
            too, in low precision; what FSDP2 does by itself on a mesh of two dimensions it does in `reduce_dtype`.

    Returns:
        a handle to metrics and the end of the hook.

    Raises:
        ValueError: unknown name; a hook or options that do not work with FSDP; a model that is not sharded, that FSDP
            takes no hook for, or that has one; `replicate_group` with FSDP 1, or where FSDP2 averages over replicas.
    """
    resolved = resolve_sharded_hook(hook)
    version1, version2 = fsdp1.units(model), fsdp2.units(model)
    if version1 and version2:
        raise ValueError("the model has FullyShardedDataParallel and fully_shard modules; shard it with one of them")
    if not version1 and not version2:
        if isinstance(model, DistributedDataParallel):
            raise ValueError("the model is DistributedDataParallel, not FSDP: use attach(model, hook)")
        raise ValueError(
            f"no module of {type(model).__name__} is sharded by FSDP: wrap it with FullyShardedDataParallel, or apply "
            "fully_shard to it, before attach_fsdp(model, hook)"
        )
    if version1 and replicate_group is not None:
        raise ValueError("replicate_group is for fully_shard; FullyShardedDataParallel has HYBRID_SHARD, without hooks")
    runtime = fsdp1.attach(model, resolved) if version1 else fsdp2.attach(model, resolved, replicate_group)
    return FSDPAttachment(runtime, model)
