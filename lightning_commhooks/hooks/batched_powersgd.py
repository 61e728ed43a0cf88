"""Batched PowerSGD: a whole bucket is one square matrix."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_commhooks.collectives.group import Group
from lightning_commhooks.hooks._low_rank import (
    factor_dtype,
    power_iteration,
    sent_is_finite,
)
from lightning_commhooks.hooks._low_rank_base import BoundLowRank, Factor, LowRankConfig
from lightning_commhooks.interface.bucket import Bucket, Slot
from lightning_commhooks.interface.by_parameter import Entry, Plan
from lightning_commhooks.interface.hook import BoundHook
from lightning_commhooks.interface.memory import Memory
from lightning_commhooks.interface.precision import add_unscaled, to_gradient, work_dtype
from lightning_commhooks.interface.registry import register


@register
@dataclass(frozen=True, kw_only=True)
class BatchedPowerSGD(LowRankConfig):
    """Low-rank compression of whole buckets, ignoring where parameters begin and end.

    PyTorch's `batched_powerSGD_hook`, which fails on an assertion in PyTorch 2.13. Fewer and larger products
    than `powersgd`, and biases are compressed too, at the price of **much lower accuracy** per byte: cutting a
    bucket into rows destroys the low rank of its gradients. Prefer `powersgd`.

    Sends `2 * ceil(sqrt(numel)) * rank` numbers for a bucket of `numel` elements, in two all-reduces.

    Args:
        matrix_approximation_rank: rank of the approximation. More than 1 rarely helps here.
        start_powerSGD_iter: number of first steps averaged without compression.
        use_error_feedback: add what compression left out to the next step's gradient. Needs memory of
            twice the size of the gradients, at least float32: what is owed, and what it was before the step.
        warm_start: begin each step's power iteration where the last one ended.
        orthogonalization_epsilon: a row of Q whose norm is at most this fraction of the longest is drawn
            anew. Relative, unlike PyTorch's; 0 renews rows that are exactly zero, which is enough.
        random_seed: of the random start. The global random state is not touched.
        compression_stats_logging_frequency: log the compression rate every so many steps once compression
            has begun.

    Raises:
        ValueError: a value is out of range.
    """

    name: ClassVar[str] = "batched_powersgd"
    aliases: ClassVar[tuple[str, ...]] = ("batched_power_sgd",)

    def bind(self, group: Group) -> BoundHook:
        return _BoundBatchedPowerSGD(self, group)


@dataclass(frozen=True)
class _Square(Plan):
    """Memory of one bucket, seen as a square matrix with zeros after the gradients.

    Attributes:
        slots: the parameters in the bucket.
        factor: where the power iteration begins; belongs to the bucket as a whole.
        residual: shape `(1, s, s)`, what is still owed; `None` without error feedback.
    """

    slots: tuple[Slot, ...]
    factor: Factor
    residual: Memory | None

    @property
    def memories(self) -> list[Memory]:
        return [self.factor.q] if self.residual is None else [self.factor.q, self.residual]

    def entries(self) -> dict[str, Entry]:
        entries: dict[str, Entry] = {}
        if self.residual is not None:
            entries = {slot.name: {"residual": slot.view(self.residual.value.view(-1))} for slot in self.slots}
        entries.setdefault(self.factor.names[0], {})["factor"] = self.factor.q.value[0]
        return entries

    def owed(self) -> Iterator[Tensor]:
        if self.residual is not None:
            yield self.residual.value


class _BoundBatchedPowerSGD(BoundLowRank[_Square]):
    def _reduce_compressed(self, flat: Tensor, bucket: Bucket, plan: _Square) -> tuple[Tensor, int, int]:
        used = [] if bucket.unused is None else [bucket.used(bucket.slots, flat)]
        start = self._start(plan.factor, bucket.step)
        numel, scale = flat.numel(), bucket.loss_scale
        side = start.shape[2]
        # What is owed and the gradient, padded with zeros.
        matrix = start.new_empty((1, side, side)) if plan.residual is None else plan.residual.next()
        owed, padding = matrix.view(-1).split([numel, side * side - numel])
        padding.zero_()
        old = owed.new_zeros(()) if plan.residual is None else plan.residual.value.view(-1)[:numel]
        add_unscaled(old, flat, bucket.divisor, out=owed)
        loaded = [(matrix, torch.bmm(start, matrix.mT))]
        (p,), (q,) = power_iteration(loaded, used, self.group, factor_dtype(flat.dtype))
        scaled = q * scale
        mean = to_gradient(torch.mm(p[0].t(), scaled[0]).view(-1)[:numel], flat.dtype)
        for is_used in used:
            # DDP throws away what a hook returns for a parameter that no rank used: send 0, go on owing it.
            for slot, factor in zip(bucket.slots, is_used > 0, strict=True):
                slot.view(mean).mul_(factor)
        flat.copy_(mean)
        owed.sub_(mean.to(owed.dtype).div_(scale))
        for slot, is_used in zip(bucket.slots, used[0] > 0 if used and plan.residual is not None else (), strict=False):
            if slot.name in (bucket.unused or ()):
                # Nor owe a gradient that is left from an earlier backward.
                slot.view(owed).copy_(torch.where(is_used, slot.view(owed), slot.view(old)))
        plan.factor.q.next().copy_(q)
        return sent_is_finite(scaled, flat.dtype), 0, p.numel() + q.numel()

    def _make_plan(self, flat: Tensor, bucket: Bucket) -> _Square:
        like = flat.new_empty(0, dtype=work_dtype(flat.dtype))
        shape = self._factor_shape(flat.numel())
        factor = self._make_factor(["\n".join(bucket.names)], shape, like)
        residual = like.new_zeros((1, shape[1], shape[1]))
        for slot in bucket.slots:
            # Factors stay: DDP may come back to the bucket they belong to, as it does after a resume.
            entry = self._stored.get(slot.name, {})
            if "residual" in entry:
                slot.view(residual.view(-1)).copy_(entry.pop("residual"))
        return _Square(bucket.slots, factor, Memory(residual) if self._config.use_error_feedback else None)

    def _entry_shapes(self, shapes: list[tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        factor: dict[str, tuple[int, ...]] = {"factor": self._factor_shape(sum(map(math.prod, shapes)))}
        with_residual = self._config.use_error_feedback and len(shapes) == 1
        return {**factor, "residual": shapes[0]} if with_residual else factor

    def _factor_shape(self, numel: int) -> tuple[int, int]:
        side = math.isqrt(max(numel, 1) - 1) + 1
        return min(side, self._config.matrix_approximation_rank), side
