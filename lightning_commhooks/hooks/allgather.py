"""Gather all ranks' gradients, then average them locally."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.steps import Steps
from lightning_commhooks.interface.bucket import Bucket
from lightning_commhooks.interface.hook import BoundHook, CommHook
from lightning_commhooks.interface.registry import register


@register
@dataclass(frozen=True, kw_only=True)
class AllGather(CommHook):
    """Average gradients by gathering all of them on every rank.

    Sends w-1 times the gradient per rank, so more than `allreduce` from 3 ranks on, and holds w copies of a
    bucket. For networks whose all-reduce is slow or not deterministic: the sum is taken in rank order, in
    float32 for 16-bit gradients. PyTorch's DDP documentation describes it ("allgather then aggregate") but
    ships no such hook.
    """

    name: ClassVar[str] = "allgather"

    def bind(self, group: Group) -> BoundHook:
        return _BoundAllGather(group)


class _BoundAllGather(BoundHook):
    def reduce(self, bucket: Bucket, ranks: Group) -> Steps[None]:
        flat = bucket.flat
        gathered = yield from ranks.all_gather(flat)
        accumulator = torch.promote_types(flat.dtype, torch.float32) if flat.is_floating_point() else flat.dtype
        flat.copy_(gathered.mean(dim=0, dtype=accumulator))
