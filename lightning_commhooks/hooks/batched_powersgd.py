"""Batched PowerSGD: a whole bucket is one square matrix."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_commhooks.core.collectives import Group
from lightning_commhooks.core.hook import BoundHook, Bucket
from lightning_commhooks.core.layout import any_nonzero
from lightning_commhooks.core.registry import register
from lightning_commhooks.hooks._low_rank import (
    all_finite,
    factor_dtype,
    keep_,
    power_iteration,
    repay_,
    to_gradient,
    work_dtype,
)
from lightning_commhooks.hooks._low_rank_base import BoundLowRank, Factor, LowRankConfig, move


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
        use_error_feedback: add what compression left out to the next step's gradient. Needs memory of the
            size of the gradients, at least float32.
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
class _Square:
    """Memory of one bucket, seen as a square matrix with zeros after the gradients.

    Attributes:
        residual: shape `(1, s, s)`, what is still owed; zero without error feedback.
        factor: where the power iteration begins; belongs to the bucket as a whole.
    """

    residual: Tensor
    factor: Factor


class _BoundBatchedPowerSGD(BoundLowRank[_Square]):
    def _reduce_compressed(self, flat: Tensor, bucket: Bucket, plan: _Square) -> tuple[int, int]:
        used = [any_nonzero([slot.view(flat) for slot in bucket.slots])] if bucket.may_be_unused else []
        start = self._start(plan.factor, bucket.step)
        # Residual, or without error feedback an empty square, plus gradient, padded with zeros.
        matrix = plan.residual if self._config.use_error_feedback else plan.residual.clone()
        owed = matrix.view(-1)[: flat.numel()].add_(flat)
        loaded = [(matrix, torch.bmm(start, matrix.mT))]
        (p,), (q,) = power_iteration(loaded, used, self.group, factor_dtype(flat.dtype))
        finite = all_finite([p, q])
        mean = to_gradient(torch.mm(p[0].t(), q[0]).view(-1)[: flat.numel()], flat.dtype)
        for is_used in used:
            # DDP throws away what a hook returns for a parameter that no rank used: send 0, go on owing it.
            for slot, factor in zip(bucket.slots, is_used > 0, strict=True):
                slot.view(mean).mul_(factor)
        if self._config.use_error_feedback:
            repay_(owed, mean, flat, finite)
        flat.copy_(mean)
        keep_(plan.factor.q, q, finite)
        return 0, p.numel() + q.numel()

    def _make_plan(self, flat: Tensor, bucket: Bucket) -> _Square:
        side = math.isqrt(flat.numel() - 1) + 1
        like = flat.new_empty(0, dtype=work_dtype(flat.dtype))
        key = "\n".join(bucket.names)
        self._factors = {
            k: q for k, q in self._factors.items() if k == key or not set(k.split("\n")) & set(bucket.names)
        }
        rank = min(side, self._config.matrix_approximation_rank)
        factor = self._make_factor([key], (rank, side), like)
        residual = like.new_zeros((1, side, side))
        for slot in bucket.slots if self._config.use_error_feedback else ():
            move(self._residuals, slot.name, slot.view(residual.view(-1)))
        return _Square(residual, factor)
