"""Plain averaging, what DDP does without a hook."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.steps import Steps
from lightning_commhooks.interface.bucket import Bucket
from lightning_commhooks.interface.hook import BoundHook, CommHook
from lightning_commhooks.interface.precision import num_overflowed
from lightning_commhooks.interface.registry import register


@register
@dataclass(frozen=True, kw_only=True)
class AllReduce(CommHook):
    """Average gradients with one all-reduce per bucket, in their own dtype.

    Sends 2(w-1)/w times the gradient per rank. The same as
    `torch.distributed.algorithms.ddp_comm_hooks.default_hooks.allreduce_hook`: divides by the number of ranks,
    then sums.
    """

    name: ClassVar[str] = "allreduce"

    def bind(self, group: Group) -> BoundHook:
        return _BoundAllReduce(group)


class _BoundAllReduce(BoundHook):
    scales_gradients = True

    def reduce(self, bucket: Bucket, ranks: Group) -> Steps[None]:
        yield from ranks.all_reduce_mean_(bucket.flat, bucket.scale)

    def reduce_scatter(self, bucket: Bucket, out: Tensor, ranks: Group) -> Steps[None]:
        """Write this rank's share of the average to `out`: see `reduce_scatter`."""
        return reduce_scatter(bucket, out, ranks)


def reduce_scatter(
    bucket: Bucket, out: Tensor, ranks: Group, dtype: torch.dtype | None = None, in_float32: bool = False
) -> Steps[None]:
    """Divide, send, sum, divide: `fp16_compress_hook` and similar hooks of FSDP's `default_hooks`, on CPU too.

    Differs from PyTorch's in that the first division comes before the cast to 16 bit and the second after the cast
    back, so that neither rounds or overflows.

    Error of one element, in units of the mean magnitude over ranks: 2^-11 in float16, 2^-8 in bfloat16, where sums are
    in float32. Sums in 16 bit round as much again up to w times. In float16, values below 6e-5 times the first divisor
    have errors of up to 3e-8 times it.

    Args:
        bucket: gradients, shape `(w * n,)`, n elements for each rank in turn. They may be overwritten.
        out: shape `(n,)`, any floating-point dtype: for this rank's share of the average, times `bucket.scale`.
        ranks: the collectives for this bucket.
        dtype: of the numbers that are sent; `None`: the gradients' dtype.
        in_float32: whether 16-bit numbers are summed in float32. If not, it is up to the backend.
    """
    flat, factor = bucket.flat, bucket.scale / ranks.size
    before = predivide_factor(ranks.size)
    if ranks.size == 1 or dtype in (None, flat.dtype):
        # With a factor of 1, FSDP has divided by itself what needs it.
        before = 1 if factor == 1 else before
        sent = flat if before == 1 else flat.div_(before)
    else:
        sent = torch.empty_like(flat, dtype=dtype)
        torch.div(flat, before, out=sent)
        ranks.counters.numel_overflowed += num_overflowed(flat, sent)
    total = yield from ranks.reduce_scatter(sent.view(ranks.size, -1), in_float32)
    if out.element_size() < total.element_size():
        out.copy_(total.mul_(factor * before))
    else:
        out.copy_(total).mul_(factor * before)


def predivide_factor(size: int) -> int:
    """Return the divisor of gradients before they are summed over `size` ranks, so that 16 bit hold them and their sum.

    About the square root of `size`, a power of 2: `DefaultState._get_gradient_predivide_factor` of
    `torch.distributed.algorithms._comm_hooks.default_hooks`. The remaining division follows the sum.
    """
    factor = 1
    while size % factor == 0 and size / factor > factor:
        factor *= 2
    return factor
