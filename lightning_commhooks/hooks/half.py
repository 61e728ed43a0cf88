"""Gradients in 16 bit: half the bytes of float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.steps import Steps
from lightning_commhooks.hooks.allreduce import reduce_scatter
from lightning_commhooks.interface.bucket import Bucket
from lightning_commhooks.interface.hierarchy import Hierarchy, bind_by_node, check_hierarchy
from lightning_commhooks.interface.hook import BoundHook, CommHook
from lightning_commhooks.interface.precision import num_overflowed
from lightning_commhooks.interface.registry import register


@dataclass(frozen=True, kw_only=True)
class _Half(CommHook):
    """Options of `FP16` and `BF16`.

    Args:
        accumulate_dtype: `None`: one all-reduce in 16 bit. `"float32"`: each rank receives its share of the
            16-bit gradients, sums it in float32 and sends the mean in 16 bit; the same bytes, and one
            rounding of the sum instead of w-1.
        hierarchy: `"node"`: average gradients in full within each node and compress between nodes, so that a node sends
            as much as one rank would. Each node needs the same number of ranks. `None`: among all ranks.
    """

    dtype: ClassVar[torch.dtype]
    accumulate_dtype: Literal["float32"] | None = None
    hierarchy: Hierarchy = None

    def __post_init__(self) -> None:
        if self.accumulate_dtype not in (None, "float32"):
            raise ValueError(f"accumulate_dtype must be None or 'float32', got {self.accumulate_dtype!r}")
        check_hierarchy(self.hierarchy)

    def bind(self, group: Group) -> BoundHook:
        return bind_by_node(self.hierarchy, group, lambda ranks: _BoundHalf(ranks, self))


@register
@dataclass(frozen=True, kw_only=True)
class FP16(_Half):
    """Average gradients in float16: 11 significant bits, magnitudes from 6e-8 to 65504.

    Unlike PyTorch's `default_hooks.fp16_compress_hook`, it divides gradients by the number of ranks w before it rounds
    them, so that values up to w times 65504, and their sum, do not overflow.

    Raises:
        ValueError: a value is out of range; when attached, nodes have different numbers of ranks.
    """

    name: ClassVar[str] = "fp16"
    dtype: ClassVar[torch.dtype] = torch.float16


@register
@dataclass(frozen=True, kw_only=True)
class BF16(_Half):
    """Average gradients in bfloat16: 8 significant bits, the range of float32.

    Works like PyTorch's `default_hooks.bf16_compress_hook`, but also on CPU, where DDP refuses PyTorch's hook.

    Raises:
        ValueError: a value is out of range; when attached, nodes have different numbers of ranks.
    """

    name: ClassVar[str] = "bf16"
    dtype: ClassVar[torch.dtype] = torch.bfloat16


class _BoundHalf(BoundHook):
    scales_gradients = True

    def __init__(self, group: Group, hook: _Half) -> None:
        super().__init__(group)
        self._hook, self._dtype, self._in_float32 = hook, hook.dtype, hook.accumulate_dtype == "float32"
        # Whether gradients were larger than their payload.
        self._shrank: set[bool] = set()

    def reduce(self, bucket: Bucket, ranks: Group) -> Steps[None]:
        flat = bucket.flat
        if not flat.is_floating_point():
            yield from ranks.all_reduce_mean_(flat, bucket.scale)
            return
        self._shrank.add(flat.element_size() > self._dtype.itemsize)
        half = torch.empty_like(flat, dtype=self._dtype)
        torch.div(flat, self.group.size / bucket.scale, out=half)
        self.group.counters.numel_overflowed += num_overflowed(flat, half)
        sum_ = ranks.all_reduce_in_float32 if self._in_float32 else ranks.all_reduce_
        flat.copy_((yield from sum_(half)))

    def reduce_scatter(self, bucket: Bucket, out: Tensor, ranks: Group) -> Steps[None]:
        """Write this rank's share of the average to `out`: see `allreduce.reduce_scatter`."""
        return reduce_scatter(bucket, out, ranks, self._dtype, self._in_float32)

    def inactive_reason(self, step: int) -> str | None:
        if self._shrank != {False}:
            return None
        return f"hook={self._hook.name!r} compresses nothing, gradients are in 16 bit already; use hook='int8'"
