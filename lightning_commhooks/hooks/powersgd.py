"""PowerSGD: each gradient matrix is sent as two thin factors."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.steps import Steps
from lightning_commhooks.hooks._low_rank import (
    factor_dtype,
    orthonormal_basis,
    random_factor,
    revive,
    sent_is_finite,
)
from lightning_commhooks.hooks._low_rank_options import LowRankConfig
from lightning_commhooks.hooks._matrices import Matrices
from lightning_commhooks.hooks._steps_taken import StepsTaken
from lightning_commhooks.interface.bucket import Bucket, Slot
from lightning_commhooks.interface.error_feedback import ErrorFeedback, Shapes
from lightning_commhooks.interface.finite import all_finite
from lightning_commhooks.interface.hierarchy import bind_by_node
from lightning_commhooks.interface.hook import NEXT_TO_NOTHING, BoundHook
from lightning_commhooks.interface.precision import work_dtype
from lightning_commhooks.interface.registry import register
from lightning_commhooks.interface.state import StateReader, StateWriter

logger = logging.getLogger(__name__)


@register
@dataclass(frozen=True, kw_only=True)
class PowerSGD(LowRankConfig):
    """Low-rank gradient compression with error feedback.

    PowerSGD of Vogels et al. 2019, https://arxiv.org/abs/1905.13727, algorithms 1 and 2. Same results as
    PyTorch's `powerSGD_hook` where that runs. Differs from it in that it works with any number of buckets on
    gloo, survives zero, rank-deficient, tiny and huge gradients, keeps its memory by parameter name, allows
    `start_powerSGD_iter` below 2, and computes in float32 for 16-bit gradients.

    Sends `(n + m) * rank` numbers instead of `n * m` for a matrix, in two all-reduces per bucket; tensors with
    fewer than two dimensions and matrices that would not shrink enough travel as they are in the first. With
    `num_iters_per_step=1` `n * rank` and `m * rank` in turn, in one all-reduce.

    Args:
        matrix_approximation_rank: rank of the approximation. 1 to 4 is usual, up to 32 for language models.
        start_powerSGD_iter: number of first steps averaged without compression, because early gradients
            matter most. About a tenth of training.
        num_iters_per_step: 2 makes a whole power iteration in each step, as PyTorch does: P, then Q. 1 makes half of
            one, in turn P with the Q of the step before, and Q with the P of the step before: half the bytes, one
            all-reduce in place of two, and one product less.
        min_compression_rate: a matrix of n rows and m columns is compressed when
            `(n + m) * rank * min_compression_rate < n * m`.
        use_error_feedback: add what compression left out to the next step's gradient. Needs memory of
            the size of the gradients, at least float32.
        warm_start: begin each step's power iteration where the last one ended. `num_iters_per_step=1`
            needs it.
        orthogonalization_epsilon: a row of Q (or P) whose norm is at most this fraction of the longest is drawn
            anew. Relative, unlike PyTorch's; 0 renews rows that are exactly zero, which is enough.
        random_seed: of the random start. The global random state is not touched.
        compression_stats_logging_frequency: log the compression rate every so many steps once compression
            has begun.
        hierarchy: `"node"`: gradients are averaged within each node as they are, and compressed between nodes, so that
            what leaves a node is what one of its ranks would send, not all of them. Needs as many ranks on each node.
            `None`: among all ranks.
        batch_tensors_with_same_shape: multiply matrices of equal shape in one batched product. The result is the same
            up to rounding. On GPUs always done; on CPU faster for many small layers, slower for large ones.

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
        return bind_by_node(self.hierarchy, group, lambda ranks: BoundPowerSGD(ranks, self))

    @property
    def multiplies_at_once(self) -> bool:
        return self.batch_tensors_with_same_shape

    def matrices(self, slots: Sequence[Slot]) -> dict[tuple[int, int], list[tuple[Slot, ...]]]:
        by_shape: dict[tuple[int, int], list[tuple[Slot, ...]]] = {}
        for slot in slots:
            if len(slot.shape) > 1 and slot.numel:
                n, m = slot.shape[0], math.prod(slot.shape[1:])
                if (n + m) * self.rank(n, m) * self.min_compression_rate < n * m:
                    by_shape.setdefault((n, m), []).append((slot,))
        return by_shape


@dataclass
class _Laid:
    """The matrices in a bucket, and the gradients that are in none."""

    matrices: list[Matrices]
    rest: list[Slot]

    @property
    def in_matrices(self) -> list[Slot]:
        """All gradients of matrices."""
        return [slot for batch in self.matrices for slots in batch.gradients for slot in slots]


class BoundPowerSGD(ErrorFeedback):
    """Algorithm 1 of Vogels et al. 2019, for all matrices of a bucket at once; algorithm 2 is `ErrorFeedback`.

    Legend: M a rank's residual, its gradient included, shape `(n, m)`; P and Q factors of the mean of M over ranks,
    r rows each, so that it is about `P^T Q`. Matrices of one shape are a batch of k.

    Args:
        group: the collectives the hook may use.
        hook: its options.
    """

    def __init__(self, group: Group, hook: LowRankConfig) -> None:
        super().__init__(group, hook)
        self._laid: dict[tuple[str, ...], _Laid] = {}
        self._half_steps = StepsTaken() if hook.num_iters_per_step == 1 else None
        # Elements before compression and after it, and those of matrices, since compression began.
        self._numel_before = self._numel_after = self._numel_compressed = 0
        self._next_report = 0

    def average_(self, residual: Tensor | None, bucket: Bucket, ranks: Group) -> Steps[Tensor]:
        flat, laid = bucket.flat, self._laid[bucket.names]
        if residual is None:
            residual = torch.zeros_like(flat, dtype=work_dtype(flat.dtype))
        rest = [slot.view(flat).view(-1) for slot in laid.rest]
        dense = torch.cat([flat[:0], *rest]).div_(self.group.size / bucket.scale)
        approximate = self._whole if self._half_steps is None else self._half
        ps, qs = yield from approximate(laid.matrices, residual, bucket, dense, ranks)
        finite = [all_finite(dense)]
        for batch, p, q in zip(laid.matrices, ps, qs, strict=True):
            batch.write_and_subtract_(residual, flat, p, q, bucket)
            finite.append(sent_is_finite(p, q * bucket.loss_scale, flat.dtype))
            for kind, factors in (("factor", q), ("factor_p", p)):
                for key, factor in zip(batch.keys, factors, strict=True) if kind in batch.fresh else ():
                    self.remember(key, factor, kind)
        for view, mean in zip(rest, dense.split([len(view) for view in rest]), strict=True):
            view.copy_(mean)
        self._count(flat.numel(), dense.numel(), bucket)
        return torch.stack(finite).all()

    def _whole(
        self, matrices: Sequence[Matrices], residual: Tensor, bucket: Bucket, dense: Tensor, ranks: Group
    ) -> Steps[tuple[list[Tensor], list[Tensor]]]:
        flat, starts = bucket.flat, [self._start(batch, "factor", bucket.step) for batch in matrices]
        # P = M Q, whose sum over ranks has the same basis as its mean.
        ps = [batch.add_and_multiply_(residual, flat, q, bucket) for batch, q in zip(matrices, starts, strict=True)]
        ps = [orthonormal_basis(p) for p in (yield from self._sum_over_ranks(ps, flat.dtype, ranks, [dense]))]
        # Q = M^T P
        qs = [batch.multiply(residual, p).div_(self.group.size) for batch, p in zip(matrices, ps, strict=True)]
        return ps, (yield from self._sum_over_ranks(qs, flat.dtype, ranks))

    def _half(
        self, matrices: Sequence[Matrices], residual: Tensor, bucket: Bucket, dense: Tensor, ranks: Group
    ) -> Steps[tuple[list[Tensor], list[Tensor]]]:
        """Half an iteration, as Zhang et al. 2023, https://arxiv.org/abs/2306.08881: P = M Q, in the next Q = M^T P."""
        assert self._half_steps is not None
        makes_q = self._half_steps.number % 2 == 1
        self._half_steps.count()
        starts = [self._start(batch, "factor_p" if makes_q else "factor", bucket.step) for batch in matrices]
        products = [
            batch.add_and_multiply_(residual, bucket.flat, start, bucket, transposed=makes_q).div_(self.group.size)
            for batch, start in zip(matrices, starts, strict=True)
        ]
        means = yield from self._sum_over_ranks(products, bucket.flat.dtype, ranks, [dense])
        return (starts, means) if makes_q else (means, starts)

    def _start(self, batch: Matrices, kind: str, step: int) -> Tensor:
        """Orthonormal factors to begin with: of an earlier step, or random."""
        fresh = batch.fresh[kind]
        if not self.hook.warm_start:
            return orthonormal_basis(self._random(batch.keys, fresh, step))
        last = [self.remembered(key, own.clone, kind) for key, own in zip(batch.keys, fresh, strict=True)]
        return orthonormal_basis(revive(torch.stack(last), fresh, self.hook.orthogonalization_epsilon))

    def _random(self, keys: Sequence[str], like: Tensor, step: int) -> Tensor:
        """Random factors, shape, dtype and device of `like`, equal on all ranks."""
        return torch.stack(
            [random_factor(key, tuple(like.shape[1:]), self.hook.random_seed, step, like) for key in keys]
        )

    def _sum_over_ranks(
        self, factors: Sequence[Tensor], dtype: torch.dtype, ranks: Group, along: Sequence[Tensor] = ()
    ) -> Steps[list[Tensor]]:
        """Sums of factors of gradients of a dtype; `along` becomes its sum, too. `Cast` may have factors encoded."""
        self._numel_after += sum(factor.numel() for factor in factors)
        sent = [factor.to(factor_dtype(dtype)) for factor in factors]
        yield from ranks.all_reduce_factors_(along, sent)
        return [total.to(factor.dtype) for total, factor in zip(sent, factors, strict=True)]

    def compressed(self, bucket: Bucket) -> Sequence[Slot] | None:
        if bucket.step < self.hook.start_powerSGD_iter:
            return None
        if bucket.names not in self._laid:
            names = set(bucket.names)
            self._laid = {other: laid for other, laid in self._laid.items() if names.isdisjoint(other)}
            laid = self._laid[bucket.names] = self._lay_out(bucket)
            # Factors of several gradients together, as they were before DDP has built its buckets anew.
            keys = {key for batch in laid.matrices for key in batch.keys}
            for key in [key for key in self.memory if "\n" in key and not names.isdisjoint(key.split("\n"))]:
                if key not in keys:
                    del self.memory[key]
        return self._laid[bucket.names].in_matrices

    def _lay_out(self, bucket: Bucket) -> _Laid:
        flat, batches = bucket.flat, []
        for (n, m), gradients in self.hook.matrices(bucket.slots).items():
            batch = Matrices(gradients, n, m, not flat.is_cpu or self.hook.multiplies_at_once, {})
            like = flat.new_empty((len(gradients), self.hook.rank(n, m), n + m), dtype=work_dtype(flat.dtype))
            batch.fresh["factor"] = self._random(batch.keys, like[:, :, :m], step=0)
            if self._half_steps is not None:
                batch.fresh["factor_p"] = self._random(batch.keys, like[:, :, m:], step=-1)
            batches.append(batch)
        laid = _Laid(batches, [])
        matrices = set(laid.in_matrices)
        laid.rest = [slot for slot in bucket.slots if slot not in matrices]
        return laid

    def end_step(self, finite: Tensor) -> None:
        super().end_step(finite)
        if self._half_steps is not None:
            self._half_steps.end_step(finite)

    def state_dict(self, writer: StateWriter) -> dict[str, Any]:
        state = super().state_dict(writer)
        return state if self._half_steps is None else {**state, "half_steps": self._half_steps.saved()}

    def load_state_dict(self, state: dict[str, Any], reader: StateReader) -> None:
        super().load_state_dict(state, reader)
        if self._half_steps is not None:
            if "half_steps" not in state and any("factor_p" in entry for entry in self.memory.values()):
                reader.differs("it has no 'half_steps', by which P and Q take turns")
            self._half_steps.load(state.get("half_steps"))

    def _shapes(self, shapes: list[tuple[int, ...]]) -> Shapes:
        expected: Shapes = {}
        matrices = self.hook.matrices([Slot(str(i), shape, 0) for i, shape in enumerate(shapes)])
        if len(matrices) == 1:
            ((n, m),) = matrices
            r = self.hook.rank(n, m)
            expected = {"factor": (r, m), **({} if self._half_steps is None else {"factor_p": (r, n)})}
            if self.has_residuals and len(shapes) == 1:
                expected["residual"] = shapes[0]
        return expected

    def _count(self, numel: int, numel_rest: int, bucket: Bucket) -> None:
        """Count elements; log at the first compressed step and every `compression_stats_logging_frequency` steps."""
        self._numel_before += numel
        self._numel_after += numel_rest
        self._numel_compressed += numel - numel_rest
        self.group.counters.numel_uncompressed += numel_rest
        self.group.counters.numel_compressed += numel - numel_rest
        if bucket.is_last and bucket.step >= self._next_report:
            rate, before, after = self.compression_stats()
            logger.info(
                "step %d: %d elements before compression, %d after, rate %.4g", bucket.step, before, after, rate
            )
            self._next_report = bucket.step + self.hook.compression_stats_logging_frequency

    def compression_stats(self) -> tuple[float, int, int]:
        """`(rate, numel_before, numel_after)`, as `PowerSGDState.compression_stats`; the rate is 0 until it begins."""
        rate = self._numel_before / self._numel_after if self._numel_after else 0.0
        return rate, self._numel_before, self._numel_after

    def not_begun(self, step: int) -> str | None:
        start = self.hook.start_powerSGD_iter
        if step < start:
            advice = f"set it to about a tenth of training, {(step + 1) // 10} here"
            return f"hook={self.hook.name!r} compresses from start_powerSGD_iter={start} on; {advice}"
        if not self._numel_before or self._numel_compressed > NEXT_TO_NOTHING * self._numel_before:
            return None
        rank, share = self.hook.matrix_approximation_rank, self._numel_compressed / self._numel_before
        how_much = "nothing, no gradient is a matrix that shrinks"
        if share:
            how_much = f"only {share:.2%}, few gradients are matrices that shrink"
        better = self._rank_that_compresses()
        lower = f"lower it to {better}" if better else "lower min_compression_rate"
        return (
            f"hook={self.hook.name!r} compresses {how_much} enough at matrix_approximation_rank={rank}; {lower}, or "
            "use hook='bf16'"
        )

    def _rank_that_compresses(self) -> int:
        """The highest rank at which more than next to nothing is compressed; 0 if there is none."""
        slots = [slot for laid in self._laid.values() for slot in (*laid.rest, *laid.in_matrices)]
        total = sum(slot.numel for slot in slots)
        good, bad = 0, self.hook.matrix_approximation_rank
        while bad - good > 1:
            middle = (good + bad) // 2
            matrices = dataclasses.replace(self.hook, matrix_approximation_rank=middle).matrices(slots)
            numel = sum(slot.numel for some in matrices.values() for gradients in some for slot in gradients)
            good, bad = (middle, bad) if numel > NEXT_TO_NOTHING * total else (good, middle)
        return good

    def release(self) -> None:
        super().release()
        self._laid = {}
