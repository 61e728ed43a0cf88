"""Plain averaging, what DDP does without a hook."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.steps import Steps
from lightning_commhooks.hooks._shares import reduce_scatter
from lightning_commhooks.interface.bucket import Bucket
from lightning_commhooks.interface.hook import BoundHook, CommHook
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
        """Write this rank's share of the average to `out`: see `_shares.reduce_scatter`."""
        return reduce_scatter(bucket, out, ranks)
