"""PowerSGD: each gradient matrix is sent as two thin factors."""

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
from lightning_commhooks.hooks._low_rank_state import settled
from lightning_commhooks.interface.bucket import Bucket, Slot
from lightning_commhooks.interface.by_parameter import Entry, Plan
from lightning_commhooks.interface.hook import BoundHook
from lightning_commhooks.interface.memory import Memory, all_finite
from lightning_commhooks.interface.precision import add_unscaled, to_gradient, work_dtype
from lightning_commhooks.interface.registry import register

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
        use_error_feedback: add what compression left out to the next step's gradient. Needs memory of
            twice the size of the compressed gradients, at least float32: what is owed, and what it was before the step.
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


@dataclass(frozen=True)
class _Batch:
    """The k matrices of one shape in a bucket, and their memory.

    Attributes:
        slots: where they are.
        shape: `(n, m)`.
        factor: where the power iteration begins.
        memory: shape `(k, n, m)`, the residual before `sent` is taken from it; `None` without error feedback.
        sent: P, shape `(k, r, n)`, and Q, `(k, r, m)`, factors of what was sent at the last step. Taken from the
            memory at the next step, when the memory passes through the processor's cache anyway. `None` when the
            memory is the residual: without error feedback, and for 16-bit gradients, which P^T Q is rounded to.
    """

    slots: list[Slot]
    shape: tuple[int, int]
    factor: Factor
    memory: Memory | None
    sent: tuple[Memory, Memory] | None

    def views(self, flat: Tensor) -> list[Tensor]:
        """The gradients in `flat`, each of shape `(n, m)`."""
        return [slot.view(flat).view(self.shape) for slot in self.slots]


@dataclass(frozen=True)
class _Plan(Plan):
    batches: list[_Batch]
    dense: list[Slot]

    @property
    def memories(self) -> list[Memory]:
        return [
            memory
            for batch in self.batches
            for memory in (batch.factor.q, batch.memory, *(batch.sent or ()))
            if memory is not None
        ]

    def entries(self) -> dict[str, Entry]:
        entries = {}
        for batch in self.batches:
            for i, slot in enumerate(batch.slots):
                entry = entries[slot.name] = {"factor": batch.factor.q.value[i]}
                if batch.memory is not None:
                    entry["residual"] = batch.memory.value[i].view(slot.shape)
                if batch.sent is not None:
                    entry["sent_p"], entry["sent_q"] = (memory.value[i] for memory in batch.sent)
        return entries

    def owed(self) -> Iterator[Tensor]:
        for entry in self.entries().values():
            if "residual" in entry:
                yield settled(entry)


class _BoundPowerSGD(BoundLowRank[_Plan]):
    _config: PowerSGD

    def _reduce_compressed(self, flat: Tensor, bucket: Bucket, plan: _Plan) -> tuple[Tensor, int, int]:
        dense = torch.cat([flat[:0], *(slot.view(flat).reshape(-1) for slot in plan.dense)])
        dense.div_(self.group.size / bucket.scale)
        used = [] if bucket.unused is None else [bucket.used(batch.slots, flat) for batch in plan.batches]
        loaded = [self._load(flat, batch, bucket) for batch in plan.batches]
        ps, qs = power_iteration(loaded, [dense, *used], self.group, factor_dtype(flat.dtype))
        for slot, mean in zip(plan.dense, dense.split([slot.numel for slot in plan.dense]), strict=True):
            slot.view(flat).copy_(mean.view(slot.shape))
        finite = [all_finite(dense)]
        for i, (batch, p, q) in enumerate(zip(plan.batches, ps, qs, strict=True)):
            batch.factor.q.next().copy_(q)
            # DDP throws away what a hook returns for a parameter that no rank used: send 0, go on owing it.
            sent = q * (used[i] > 0).to(q).view(-1, 1, 1) if used else q
            if used:
                _take_back(batch, used[i], bucket)
            finite.append(self._unload(flat, batch, p, sent, bucket.loss_scale))
        numel_factors = sum(p.numel() + q.numel() for p, q in zip(ps, qs, strict=True))
        return torch.stack(finite).all(), dense.numel(), numel_factors

    def _load(self, flat: Tensor, batch: _Batch, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """Add the gradient to the memory.

        Returns:
            what is to be sent, shape `(k, n, m)`, and its product with the start, shape `(k, r, n)`.
        """
        start, divisor = self._start(batch.factor, bucket.step), bucket.divisor
        gradients = batch.views(flat)
        if batch.memory is None:
            matrices = torch.stack(gradients).to(start.dtype).div_(divisor)
            return matrices, torch.bmm(start, matrices.mT)
        memory, matrices = batch.memory.value, batch.memory.next()
        if self._config.batch_tensors_with_same_shape or flat.is_cuda:
            for old, gradient, matrix in zip(memory, gradients, matrices, strict=True):
                add_unscaled(old, gradient, divisor, out=matrix)
            if batch.sent is not None:
                matrices.baddbmm_(batch.sent[0].value.mT, batch.sent[1].value, alpha=-1)
            return matrices, torch.bmm(start, matrices.mT)
        product = start.new_empty((*start.shape[:2], batch.shape[0]))
        for i, gradient in enumerate(gradients):
            sent = None if batch.sent is None else (batch.sent[0].value[i], batch.sent[1].value[i])
            _load_by_blocks(memory[i], gradient, divisor, sent, start[i], out=(matrices[i], product[i]))
        return matrices, product

    def _unload(self, flat: Tensor, batch: _Batch, p: Tensor, q: Tensor, scale: float | Tensor) -> Tensor:
        """Write P^T Q to `flat`, take it from the memory, return whether it is finite."""
        scaled = q * scale
        if batch.sent is not None:
            for memory, factor in zip(batch.sent, (p, q), strict=True):
                memory.next().copy_(factor)
        for i, gradient in enumerate(batch.views(flat)):
            if gradient.dtype == q.dtype:
                torch.mm(p[i].t(), scaled[i], out=gradient)
            else:
                gradient.copy_(to_gradient(torch.mm(p[i].t(), scaled[i]), flat.dtype))
            if batch.memory is not None and batch.sent is None:
                batch.memory.next()[i].sub_(gradient.to(q.dtype) / scale)
        return sent_is_finite(scaled, flat.dtype)

    def _make_plan(self, flat: Tensor, bucket: Bucket) -> _Plan:
        by_shape: dict[tuple[int, int], list[Slot]] = {}
        for slot in bucket.slots:
            if self._shrinks(slot.shape):
                by_shape.setdefault(_matrix_shape(slot.shape), []).append(slot)
        batches = [self._make_batch(slots, shape, flat) for shape, slots in by_shape.items()]
        return _Plan(batches, [slot for slot in bucket.slots if not self._shrinks(slot.shape)])

    def _make_batch(self, slots: list[Slot], shape: tuple[int, int], flat: Tensor) -> _Batch:
        (n, m), k = shape, len(slots)
        r = self._rank(n, m)
        like = flat.new_empty(0, dtype=work_dtype(flat.dtype))
        factor = self._make_factor([slot.name for slot in slots], (r, m), like)
        if not self._config.use_error_feedback:
            return _Batch(slots, shape, factor, None, None)
        residual, sent = like.new_zeros((k, n, m)), None
        if like.dtype == flat.dtype:
            sent = Memory(like.new_zeros((k, r, n))), Memory(like.new_zeros((k, r, m)))
        for i, slot in enumerate(slots):
            entry = self._stored.pop(slot.name, {})
            if "sent_p" in entry and sent is not None:
                sent[0].value[i], sent[1].value[i] = entry["sent_p"], entry["sent_q"]
                residual[i] = entry["residual"].view(n, m)
            elif "residual" in entry:
                residual[i] = settled(entry).view(n, m)
        return _Batch(slots, shape, factor, Memory(residual), sent)

    def _entry_shapes(self, shapes: list[tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        if len(shapes) != 1 or not self._shrinks(shapes[0]):
            return {}
        n, m = _matrix_shape(shapes[0])
        residual = {"residual": shapes[0]} if self._config.use_error_feedback else {}
        return {"factor": (self._rank(n, m), m), **residual}

    def _rank(self, n: int, m: int) -> int:
        return min(n, m, self._config.matrix_approximation_rank)

    def _shrinks(self, shape: tuple[int, ...]) -> bool:
        if len(shape) < 2 or 0 in shape:
            return False
        n, m = _matrix_shape(shape)
        return (n + m) * self._rank(n, m) * self._config.min_compression_rate < n * m


def _take_back(batch: _Batch, used: Tensor, bucket: Bucket) -> None:
    """Leave gradients that no rank has got in this backward, but in an earlier one, out of the memory."""
    for i, slot in enumerate(batch.slots):
        if batch.memory is None or slot.name not in (bucket.unused or ()):
            continue
        old, new = batch.memory.value[i], batch.memory.next()[i]
        if batch.sent is not None:
            old = torch.addmm(old, batch.sent[0].value[i].t(), batch.sent[1].value[i], alpha=-1)
        new.copy_(torch.where(used[i] > 0, new, old))


def _load_by_blocks(
    memory: Tensor,
    gradient: Tensor,
    divisor: float | Tensor,
    sent: tuple[Tensor, Tensor] | None,
    start: Tensor,
    out: tuple[Tensor, Tensor],
) -> None:
    """`matrix = memory + gradient - P^T Q` and `product = start matrix^T`, in blocks of rows that stay in the cache.

    Args:
        memory: shape `(n, m)`.
        gradient: shape `(n, m)`.
        divisor: to divide the gradient by.
        sent: P, shape `(r, n)`, and Q, `(r, m)`, or `None` for zero.
        start: shape `(r, m)`.
        out: the matrix, shape `(n, m)`, and the product, shape `(r, n)`.
    """
    matrix, product = out
    rows = max(1, _BLOCK_NUMEL // matrix.shape[1])
    for first in range(0, matrix.shape[0], rows):
        block = slice(first, first + rows)
        add_unscaled(memory[block], gradient[block], divisor, out=matrix[block])
        if sent is not None:
            matrix[block].addmm_(sent[0][:, block].t(), sent[1], alpha=-1)
        torch.mm(start, matrix[block].t(), out=product[:, block])


def _matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    return shape[0], math.prod(shape[1:])
