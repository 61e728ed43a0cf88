"""PowerSGD: each gradient matrix is sent as two thin factors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_commhooks.core.collectives import Group
from lightning_commhooks.core.hook import BoundHook, Bucket, Slot
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

# 1 MB of float32: half of what a core's second-level cache holds on common servers.
_BLOCK_NUMEL = 2**18


@register
@dataclass(frozen=True, kw_only=True)
class PowerSGD(LowRankConfig):
    """Low-rank gradient compression with error feedback.

    PowerSGD of Vogels et al. 2019, https://arxiv.org/abs/1905.13727, algorithms 1 and 2. Same results as
    PyTorch's `powerSGD_hook` where that runs. Differs from it in that it works with any number of buckets on
    gloo, survives zero, rank-deficient, tiny and huge gradients, keeps its memory by parameter name, allows
    `start_powerSGD_iter` below 2, and computes in float32 for 16-bit gradients.

    Sends `(n + m) * rank` numbers instead of `n * m` for a matrix, in two all-reduces per bucket; tensors with
    fewer than two dimensions and matrices that would not shrink enough travel as they are in the first.

    Args:
        matrix_approximation_rank: rank of the approximation. 1 to 4 is usual, up to 32 for language models.
        start_powerSGD_iter: number of first steps averaged without compression, because early gradients
            matter most. About a tenth of training.
        min_compression_rate: a matrix of n rows and m columns is compressed when
            `(n + m) * rank * min_compression_rate < n * m`.
        use_error_feedback: add what compression left out to the next step's gradient. Needs memory of the
            size of the compressed gradients, at least float32.
        warm_start: begin each step's power iteration where the last one ended.
        orthogonalization_epsilon: a row of Q whose norm is at most this fraction of the longest is drawn
            anew. Relative, unlike PyTorch's; 0 renews rows that are exactly zero, which is enough.
        random_seed: of the random start. The global random state is not touched.
        compression_stats_logging_frequency: log the compression rate every so many steps once compression
            has begun.
        batch_tensors_with_same_shape: multiply matrices of equal shape in one batched product, without copying
            them together. The result is the same up to rounding. On GPUs always done; on CPU faster for many
            small layers, slower for large ones.

    Raises:
        ValueError: a value is out of range.
    """

    name: ClassVar[str] = "powersgd"
    aliases: ClassVar[tuple[str, ...]] = ("power_sgd",)

    min_compression_rate: float = 2
    batch_tensors_with_same_shape: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.min_compression_rate, (int, float)) or not self.min_compression_rate > 0:
            raise ValueError(f"min_compression_rate must be above 0, is {self.min_compression_rate!r}")

    def bind(self, group: Group) -> BoundHook:
        return _BoundPowerSGD(self, group)


@dataclass
class _Batch:
    """The k matrices of one shape in a bucket, and their memory.

    Attributes:
        slots: where they are.
        shape: `(n, m)`.
        factor: where the power iteration begins.
        memory: shape `(k, n, m)`, the residual before `sent` is taken from it; `None` without error feedback.
        sent: `(p, q)`, factors of what was sent at the last step. Taken from the memory at the next step, when
            the memory passes through the processor's cache anyway.
    """

    slots: list[Slot]
    shape: tuple[int, int]
    factor: Factor
    memory: Tensor | None
    sent: tuple[Tensor, Tensor] | None = None

    def views(self, flat: Tensor) -> list[Tensor]:
        """The gradients in `flat`, each of shape `(n, m)`."""
        return [slot.view(flat).view(self.shape) for slot in self.slots]

    def settle_(self) -> None:
        """Make `memory` the residual."""
        if self.memory is not None and self.sent is not None:
            p, q = self.sent
            self.memory.baddbmm_(p.mT, q, alpha=-1)
            self.sent = None


@dataclass(frozen=True)
class _Plan:
    """What to do with one bucket."""

    batches: list[_Batch]
    dense: list[Slot]


class _BoundPowerSGD(BoundLowRank[_Plan]):
    _config: PowerSGD

    def _reduce_compressed(self, flat: Tensor, bucket: Bucket, plan: _Plan) -> tuple[int, int]:
        dense = torch.cat([flat[:0], *(slot.view(flat).reshape(-1) for slot in plan.dense)]).div_(self.group.size)
        used = [any_nonzero(batch.views(flat)) for batch in plan.batches] if bucket.may_be_unused else []
        loaded = [self._load(flat, batch, self._start(batch.factor, bucket.step)) for batch in plan.batches]
        ps, qs = power_iteration(loaded, [dense, *used], self.group, factor_dtype(flat.dtype))
        for slot, mean in zip(plan.dense, dense.split([slot.numel for slot in plan.dense]), strict=True):
            slot.view(flat).copy_(mean.view(slot.shape))
        finite = all_finite([*ps, *qs])
        for i, (batch, p, q) in enumerate(zip(plan.batches, ps, qs, strict=True)):
            # DDP throws away what a hook returns for a parameter that no rank used: send 0, go on owing it.
            sent = q * (used[i] > 0).to(q).view(-1, 1, 1) if used else q
            self._unload(flat, batch, p, sent, finite)
            keep_(batch.factor.q, q, finite)
        return dense.numel(), sum(p.numel() + q.numel() for p, q in zip(ps, qs, strict=True))

    def _load(self, flat: Tensor, batch: _Batch, start: Tensor) -> tuple[Tensor, Tensor]:
        """Add the gradient to the memory.

        Returns:
            what is to be sent, shape `(k, n, m)`, and its product with `start`, shape `(k, r, n)`.
        """
        gradients = batch.views(flat)
        if batch.memory is None:
            matrices = torch.stack(gradients).to(start.dtype)
            return matrices, torch.bmm(start, matrices.mT)
        if self._config.batch_tensors_with_same_shape or flat.is_cuda:
            batch.settle_()
            for matrix, gradient in zip(batch.memory, gradients, strict=True):
                matrix.add_(gradient)
            return batch.memory, torch.bmm(start, batch.memory.mT)
        product = start.new_empty((*start.shape[:2], batch.shape[0]))
        for i, (matrix, gradient) in enumerate(zip(batch.memory, gradients, strict=True)):
            sent = None if batch.sent is None else (batch.sent[0][i], batch.sent[1][i])
            _load_by_blocks(matrix, gradient, start[i], product[i], sent)
        batch.sent = None
        return batch.memory, product

    def _unload(self, flat: Tensor, batch: _Batch, p: Tensor, q: Tensor, finite: Tensor) -> None:
        """Write P^T Q to `flat` and take it from the memory."""
        # Where the old gradient is not needed any more, and the optimizer gets exactly P^T Q.
        at_once = flat.dtype != q.dtype or finite.is_cuda or not finite
        for i, gradient in enumerate(batch.views(flat)):
            mean = to_gradient(torch.mm(p[i].t(), q[i], out=None if at_once else gradient), flat.dtype)
            if at_once and batch.memory is not None:
                repay_(batch.memory[i], mean, gradient, finite)
            if at_once:
                gradient.copy_(mean)
        batch.sent = None if at_once else (p, q)

    def _settle(self) -> None:
        for plan in self._plans.values():
            for batch in plan.batches:
                batch.settle_()

    def _make_plan(self, flat: Tensor, bucket: Bucket) -> _Plan:
        by_shape: dict[tuple[int, int], list[Slot]] = {}
        for slot in filter(self._shrinks, bucket.slots):
            by_shape.setdefault(_matrix_shape(slot), []).append(slot)
        like = flat.new_empty(0, dtype=work_dtype(flat.dtype))
        batches = [self._make_batch(slots, shape, like) for shape, slots in by_shape.items()]
        return _Plan(batches, [slot for slot in bucket.slots if not self._shrinks(slot)])

    def _make_batch(self, slots: list[Slot], shape: tuple[int, int], like: Tensor) -> _Batch:
        n, m = shape
        factor = self._make_factor([slot.name for slot in slots], (self._rank(n, m), m), like)
        if not self._config.use_error_feedback:
            return _Batch(slots, shape, factor, None)
        residual = like.new_zeros((len(slots), n, m))
        for slot, own in zip(slots, residual, strict=True):
            move(self._residuals, slot.name, own.view(slot.shape))
        return _Batch(slots, shape, factor, residual)

    def _rank(self, n: int, m: int) -> int:
        return min(n, m, self._config.matrix_approximation_rank)

    def _shrinks(self, slot: Slot) -> bool:
        if len(slot.shape) < 2 or slot.numel == 0:
            return False
        n, m = _matrix_shape(slot)
        return (n + m) * self._rank(n, m) * self._config.min_compression_rate < n * m


def _load_by_blocks(
    matrix: Tensor, gradient: Tensor, start: Tensor, product: Tensor, sent: tuple[Tensor, Tensor] | None
) -> None:
    """`matrix += gradient - P^T Q` and `product = start matrix^T`, in blocks of rows that stay in the cache.

    Args:
        matrix: shape `(n, m)`.
        gradient: shape `(n, m)`.
        start: shape `(r, m)`.
        product: shape `(r, n)`, written.
        sent: P, shape `(r, n)`, and Q, `(r, m)`.
    """
    rows = max(1, _BLOCK_NUMEL // matrix.shape[1])
    for first in range(0, matrix.shape[0], rows):
        block = slice(first, first + rows)
        if sent is not None:
            matrix[block].addmm_(sent[0][:, block].t(), sent[1], alpha=-1)
        matrix[block].add_(gradient[block])
        torch.mm(start, matrix[block].t(), out=product[:, block])


def _matrix_shape(slot: Slot) -> tuple[int, int]:
    return slot.shape[0], slot.numel // slot.shape[0]
