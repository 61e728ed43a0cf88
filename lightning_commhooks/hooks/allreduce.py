"""Plain averaging, what DDP does without a hook."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lightning_commhooks.collectives.group import Group
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

    def overlaps(self, step: int) -> bool:
        return True

    def reduce(self, flat: Tensor, bucket: Bucket) -> None:
        self.group.counters.numel_uncompressed += flat.numel()
        self.group.all_reduce_mean_(flat, bucket.scale)
