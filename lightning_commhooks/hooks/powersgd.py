"""PowerSGD: each gradient matrix is sent as two thin factors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_commhooks.collectives.group import Group
from lightning_commhooks.hooks._low_rank import orthonormal_basis, revive
from lightning_commhooks.hooks._low_rank_options import LowRankConfig
from lightning_commhooks.hooks._matrices import Matrices
from lightning_commhooks.hooks._matrix_feedback import MatrixFeedback
from lightning_commhooks.hooks._steps_taken import StepsTaken
from lightning_commhooks.interface.bucket import Bucket, Slot
from lightning_commhooks.interface.hierarchy import bind_by_node
from lightning_commhooks.interface.hook import BoundHook
from lightning_commhooks.interface.registry import register
from lightning_commhooks.interface.state import StateReader, StateWriter


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
            twice the size of the compressed gradients, at least float32: what is owed, and what it was before the step.
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


class BoundPowerSGD(MatrixFeedback):
    """Algorithm 1 of Vogels et al. 2019, for all matrices of a bucket at once; algorithm 2 is `MatrixFeedback`.

    Legend: M what a rank owes, its gradient included, shape `(n, m)`; P and Q factors of the mean of M over ranks,
    r rows each, so that it is about `P^T Q`. Matrices of one shape are a batch of k.
    """

    def __init__(self, group: Group, hook: LowRankConfig) -> None:
        super().__init__(group, hook)
        self._half_steps = StepsTaken() if hook.num_iters_per_step == 1 else None

    def average(
        self, matrices: Sequence[Matrices], flat: Tensor, bucket: Bucket, along: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        if self._half_steps is not None:
            return self._half(self._half_steps, matrices, flat, bucket, along)
        starts = [self._start(batch, bucket.step) for batch in matrices]
        # P = M Q, whose sum over ranks has the same basis as its mean.
        ps = [batch.load_and_multiply(flat, start, bucket) for batch, start in zip(matrices, starts, strict=True)]
        ps = [orthonormal_basis(p) for p in self.sum_over_ranks(ps, matrices, along)]
        # Q = M^T P
        qs = [torch.bmm(p, batch.value).div_(self.group.size) for p, batch in zip(ps, matrices, strict=True)]
        return ps, self.sum_over_ranks(qs, matrices)

    def _half(
        self,
        half_steps: StepsTaken,
        matrices: Sequence[Matrices],
        flat: Tensor,
        bucket: Bucket,
        along: Sequence[Tensor],
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Half an iteration, as Zhang et al. 2023, https://arxiv.org/abs/2306.08881: P = M Q, in the next Q = M^T P."""
        makes_q = half_steps.number % 2 == 1
        half_steps.count()
        starts = [self._start(batch, bucket.step, is_p=makes_q) for batch in matrices]
        products = [
            batch.load_and_multiply(flat, start, bucket, transposed=makes_q).div_(self.group.size)
            for batch, start in zip(matrices, starts, strict=True)
        ]
        means = self.sum_over_ranks(products, matrices, along)
        return (starts, means) if makes_q else (means, starts)

    def _start(self, batch: Matrices, step: int, is_p: bool = False) -> Tensor:
        """Orthonormal Q, shape `(k, r, m)`, or P, `(k, r, n)`, to begin with: of an earlier step, or random."""
        start = batch.p if is_p else batch.q
        assert start is not None
        if not self.hook.warm_start:
            return orthonormal_basis(self.random(batch.keys, start.fresh, step))
        return orthonormal_basis(revive(start.memory.value, start.fresh, self.hook.orthogonalization_epsilon))

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
            if "half_steps" not in state and any("factor_p" in entry for entry in self._stored.values()):
                reader.differs("it has no 'half_steps', by which P and Q take turns")
            self._half_steps.load(state.get("half_steps"))
