"""Gradients of sharded models as numbers of 16 bit, or as they are."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_commhooks.fsdp.reduction import ShardedReduction
from lightning_commhooks.fsdp.shard_group import ShardGroup
from lightning_commhooks.interface.finite import num_overflowed


class DenseReduction(ShardedReduction):
    """Divide, send, sum, divide: `fp16_compress_hook` and the like of FSDP's `default_hooks`, on CPU too.

    Differs from PyTorch's in that the first division comes before the cast to 16 bit and the second after the cast
    back, so that neither rounds or overflows.

    Error of one element, in units of the mean magnitude over ranks: 2^-11 in float16, 2^-8 in bfloat16, where sums are
    in float32. Sums in 16 bit round as much again up to w times. In float16, what is below 6e-5 times the first divisor
    has errors of up to 3e-8 times it.

    Args:
        group: the ranks.
        dtype: of the numbers that are sent; `None`: that of the gradients.
        in_float32: whether 16-bit numbers are summed in float32. If not, it is up to the backend.
    """

    def __init__(self, group: ShardGroup, dtype: torch.dtype | None, in_float32: bool) -> None:
        super().__init__(group)
        self._dtype = dtype
        self._in_float32 = in_float32
        self._predivide = predivide_factor(group.size)

    def reduce_scatter(self, flat: Tensor, out: Tensor, factor: float) -> None:
        sent, factor = self._divided(flat, factor)
        chunks = sent.view(self.group.size, -1)
        reduce = self.group.reduce_scatter_in_float32 if self._in_float32 else self.group.reduce_scatter
        _write(reduce(chunks), factor, out)

    def all_reduce_(self, flat: Tensor, factor: float) -> None:
        sent, factor = self._divided(flat, factor)
        is_half = sent.element_size() == 2
        sum_ = self.group.all_reduce_in_float32 if self._in_float32 and is_half else self.group.all_reduce_
        _write(self.group.finish(sum_(sent)), factor, flat)

    def _divided(self, flat: Tensor, factor: float) -> tuple[Tensor, float]:
        """What to send, and what its sum is to be multiplied by."""
        counters = self.group.counters
        if self.group.size == 1 or self._dtype in (None, flat.dtype):
            counters.numel_uncompressed += flat.numel()
            # With a factor of 1, FSDP has divided by itself what needs it.
            return (flat, factor) if factor == 1 else (flat.div_(self._predivide), factor * self._predivide)
        counters.numel_compressed += flat.numel()
        half = torch.empty_like(flat, dtype=self._dtype)
        torch.div(flat, self._predivide, out=half)
        counters.numel_overflowed += num_overflowed(flat, half)
        return half, factor * self._predivide


def _write(total: Tensor, factor: float, out: Tensor) -> None:
    if out.element_size() < total.element_size():
        out.copy_(total.mul_(factor))
    else:
        out.copy_(total).mul_(factor)


def predivide_factor(size: int) -> int:
    """What gradients are divided by before they are summed over `size` ranks, so that 16 bit hold them and their sum.

    About the square root of `size`, a power of 2: `DefaultState._get_gradient_predivide_factor` of
    `torch.distributed.algorithms._comm_hooks.default_hooks`. What is left to divide by comes after the sum.
    """
    factor = 1
    while size % factor == 0 and size / factor > factor:
        factor *= 2
    return factor
