"""Batched PowerSGD: a whole bucket is one square matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from lightning_commhooks.collectives.group import Group
from lightning_commhooks.hooks.powersgd import BoundPowerSGD, LowRankConfig, takes_aliases
from lightning_commhooks.interface.bucket import Slot
from lightning_commhooks.interface.hierarchy import bind_by_node
from lightning_commhooks.interface.hook import BoundHook
from lightning_commhooks.interface.registry import register


@register
@takes_aliases
@dataclass(frozen=True, kw_only=True)
class BatchedPowerSGD(LowRankConfig):
    """Low-rank compression of whole buckets, ignoring where parameters begin and end.

    PyTorch's `batched_powerSGD_hook`, which fails on an assertion in PyTorch 2.13. Fewer and larger products
    than `powersgd`, and biases are compressed too, at the price of **much lower accuracy** per byte: cutting a
    bucket into rows destroys the low rank of its gradients. Prefer `powersgd`.

    Sends `2 * ceil(sqrt(numel)) * rank` numbers for a bucket of `numel` elements, in two all-reduces; with
    `num_iters_per_step=1` half of that, in one.

    Args:
        matrix_approximation_rank: rank of the approximation, `rank` for short. More than 1 rarely helps here.
        start_powerSGD_iter: number of first steps averaged without compression, or a fraction of the run, or
            `"auto"`: see [`PowerSGD`][].

    Raises:
        ValueError: a value is out of range.
    """

    # There is one, filled up with zeros.
    batch_tensors_with_same_shape: ClassVar[bool] = True

    name: ClassVar[str] = "batched_powersgd"
    aliases: ClassVar[tuple[str, ...]] = ("batched_power_sgd",)

    def bind(self, group: Group) -> BoundHook:
        return bind_by_node(self.hierarchy, group, lambda ranks: BoundPowerSGD(ranks, self))

    def matrices(self, slots: Sequence[Slot]) -> dict[tuple[int, int], list[tuple[Slot, ...]]]:
        side = math.isqrt(max(sum(slot.numel for slot in slots), 1) - 1) + 1
        return {(side, side): [tuple(slots)]}
