"""PowerSGD: each gradient matrix is sent as two thin factors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_commhooks.core.collectives import Group
from lightning_commhooks.core.hook import BoundHook, Bucket, Slot
from lightning_commhooks.core.registry import register
from lightning_commhooks.hooks._low_rank import factor_dtype, low_rank_mean, store_, work_dtype
from lightning_commhooks.hooks._low_rank_base import BoundLowRank, Factor, LowRankConfig, any_nonzero, move


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
        batch_tensors_with_same_shape: multiply matrices of equal shape in one batched product. The result is
            the same; faster on GPUs with many equal layers.

    Raises:
        ValueError: a value is out of range.
    """

    name: ClassVar[str] = "powersgd"
    aliases: ClassVar[tuple[str, ...]] = ("power_sgd",)

    min_compression_rate: float = 2
    batch_tensors_with_same_shape: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.min_compression_rate > 0:
            raise ValueError(f"min_compression_rate must be above 0, is {self.min_compression_rate!r}")

    def bind(self, group: Group) -> BoundHook:
        return _BoundPowerSGD(self, group)


@dataclass(frozen=True)
class _Batch:
    """The k matrices of one shape in a bucket, and their memory.

    Attributes:
        slots: where they are.
        residual: shape `(k, n, m)`, what is still owed; zero without error feedback.
        factor: where the power iteration begins.
    """

    slots: list[Slot]
    residual: Tensor
    factor: Factor

    def views(self, flat: Tensor) -> list[Tensor]:
        """The gradients in `flat`, each of shape `(n, m)`."""
        return [slot.view(flat).view(_matrix_shape(slot)) for slot in self.slots]


@dataclass(frozen=True)
class _Plan:
    """What to do with one bucket."""

    batches: list[_Batch]
    dense: list[Slot]


class _BoundPowerSGD(BoundLowRank):
    _config: PowerSGD

    def __init__(self, config: PowerSGD, group: Group) -> None:
        super().__init__(config, group)
        self._plans: dict[tuple[str, ...], _Plan] = {}
        self._workspace = torch.empty(0)

    def _reduce_compressed(self, flat: Tensor, bucket: Bucket) -> tuple[int, int]:
        plan = self._plan(flat, bucket)
        dense = torch.cat([flat[:0], *(slot.view(flat).reshape(-1) for slot in plan.dense)]).div_(self.group.size)
        used = [any_nonzero(batch.views(flat)) for batch in plan.batches] if bucket.may_be_unused else []
        matrices = self._load(flat, plan)
        starts = [self._start(batch.factor, bucket.step) for batch in plan.batches]
        ps, qs = low_rank_mean(matrices, starts, [dense, *used], self.group, factor_dtype(flat.dtype))
        for slot, mean in zip(plan.dense, dense.split([slot.numel for slot in plan.dense]), strict=True):
            slot.view(flat).copy_(mean.view(slot.shape))
        finite = torch.stack([torch.isfinite(q).all() for q in qs]).all() if qs else torch.tensor(True)
        for i, (batch, matrix, p, q) in enumerate(zip(plan.batches, matrices, ps, qs, strict=True)):
            # DDP throws away what a hook returns for a parameter that no rank used: send 0, go on owing it.
            sent = q * (used[i] > 0).to(q).view(-1, 1, 1) if used else q
            self._unload(flat, batch, matrix, p, sent, finite)
            store_(batch.factor.q, q, 0, finite)
        return dense.numel(), sum(p.numel() + q.numel() for p, q in zip(ps, qs, strict=True))

    def _load(self, flat: Tensor, plan: _Plan) -> list[Tensor]:
        """What is to be sent: gradient plus residual, shape `(k, n, m)` for each batch."""
        sizes = [batch.residual.numel() for batch in plan.batches]
        if self._workspace.numel() < sum(sizes) or self._workspace.dtype != work_dtype(flat.dtype):
            self._workspace = flat.new_empty(sum(sizes), dtype=work_dtype(flat.dtype))
        matrices = []
        for batch, part in zip(plan.batches, self._workspace[: sum(sizes)].split(sizes), strict=True):
            matrices.append(part.view(batch.residual.shape))
            for gradient, residual, matrix in zip(batch.views(flat), batch.residual, matrices[-1], strict=True):
                torch.add(gradient, residual, out=matrix)
        return matrices

    def _unload(self, flat: Tensor, batch: _Batch, matrix: Tensor, p: Tensor, q: Tensor, finite: Tensor) -> None:
        """Write P^T Q to `flat`, and what it misses to the residual."""
        for i, gradient in enumerate(batch.views(flat)):
            if gradient.dtype == q.dtype:
                torch.mm(p[i].t(), q[i], out=gradient)
            else:
                gradient.copy_(torch.mm(p[i].t(), q[i]))
            if self._config.use_error_feedback:
                store_(batch.residual[i], matrix[i], gradient, finite)

    def _plan(self, flat: Tensor, bucket: Bucket) -> _Plan:
        if bucket.names not in self._plans:
            # DDP has rebuilt its buckets: memory moves along by name.
            self._plans = {k: v for k, v in self._plans.items() if not set(k) & set(bucket.names)}
            self._plans[bucket.names] = self._make_plan(flat, bucket)
        return self._plans[bucket.names]

    def _make_plan(self, flat: Tensor, bucket: Bucket) -> _Plan:
        by_shape: dict[object, list[Slot]] = {}
        for slot in filter(self._shrinks, bucket.slots):
            same = _matrix_shape(slot) if self._config.batch_tensors_with_same_shape else slot.name
            by_shape.setdefault(same, []).append(slot)
        like = flat.new_empty(0, dtype=work_dtype(flat.dtype))
        batches = [self._make_batch(slots, like) for slots in by_shape.values()]
        return _Plan(batches, [slot for slot in bucket.slots if not self._shrinks(slot)])

    def _make_batch(self, slots: list[Slot], like: Tensor) -> _Batch:
        n, m = _matrix_shape(slots[0])
        factor = self._make_factor([slot.name for slot in slots], (self._rank(n, m), m), like)
        if not self._config.use_error_feedback:
            return _Batch(slots, like.new_zeros(1).expand(len(slots), n, m), factor)
        residual = like.new_zeros((len(slots), n, m))
        for slot, own in zip(slots, residual, strict=True):
            move(self._residuals, slot.name, own.view(slot.shape))
        return _Batch(slots, residual, factor)

    def _rank(self, n: int, m: int) -> int:
        return min(n, m, self._config.matrix_approximation_rank)

    def _shrinks(self, slot: Slot) -> bool:
        if len(slot.shape) < 2 or slot.numel == 0:
            return False
        n, m = _matrix_shape(slot)
        return (n + m) * self._rank(n, m) * self._config.min_compression_rate < n * m


def _matrix_shape(slot: Slot) -> tuple[int, int]:
    return slot.shape[0], slot.numel // slot.shape[0]
