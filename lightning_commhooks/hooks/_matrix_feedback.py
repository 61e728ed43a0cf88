"""Error feedback of methods that send gradient matrices as factors: the base that leaves one function to write."""

from __future__ import annotations

import dataclasses
import logging
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_commhooks.collectives.group import Group
from lightning_commhooks.hooks._low_rank import random_factor
from lightning_commhooks.hooks._low_rank_options import LowRankConfig
from lightning_commhooks.hooks._matrices import Matrices, keys_of, settled
from lightning_commhooks.interface.bucket import Bucket, Slot
from lightning_commhooks.interface.by_parameter import BoundByParameter, Entry, Plan, Shapes
from lightning_commhooks.interface.hook import NEXT_TO_NOTHING
from lightning_commhooks.interface.memory import Memory, all_finite
from lightning_commhooks.interface.precision import work_dtype

logger = logging.getLogger("lightning_commhooks.hooks.powersgd")


@dataclass(frozen=True)
class _Plan(Plan):
    """The matrices in a bucket, and the gradients that are in none."""

    matrices: list[Matrices]
    rest: list[Slot]

    @property
    def slots(self) -> list[Slot]:
        """All gradients."""
        return [*self.rest, *(slot for batch in self.matrices for slot in batch.slots)]

    @property
    def memories(self) -> list[Memory]:
        return [memory for batch in self.matrices for memory in batch.memories]

    def entries(self) -> dict[str, Entry]:
        return {name: entry for batch in self.matrices for name, entry in batch.entries().items()}

    def owed(self) -> Iterator[Tensor]:
        for entry in self.entries().values():
            if "residual" in entry:
                yield settled(entry)


class MatrixFeedback(BoundByParameter[_Plan]):
    """As `ErrorFeedback`, of matrices that are sent as products of two factors: subclasses write `average`.

    What is owed differs between ranks; factors are equal on all of them.

    Args:
        group: the collectives the hook may use.
        hook: its options.
    """

    scales_gradients = True
    lasting = ("factor", "factor_p")

    def __init__(self, group: Group, hook: LowRankConfig) -> None:
        super().__init__(group)
        self.hook = hook
        # Elements before compression and after it, and those of matrices, since compression began.
        self._numel_before = self._numel_after = self._numel_compressed = 0
        self._next_report = 0

    @abstractmethod
    def average(
        self, matrices: Sequence[Matrices], flat: Tensor, bucket: Bucket, along: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Approximate the mean over ranks of each matrix by P^T Q.

        Args:
            matrices: batches of shape `(k, n, m)`, to be loaded first.
            flat: the gradients that they are loaded from.
            bucket: its metadata.
            along: what becomes its sum over ranks on the way, in the first call of `sum_over_ranks`.

        Returns:
            P, shape `(k, r, n)`, and Q, `(k, r, m)`, of each batch, one of them with orthonormal rows, equal on all
            ranks.
        """

    def sum_over_ranks(
        self, factors: Sequence[Tensor], matrices: Sequence[Matrices], along: Sequence[Tensor] = ()
    ) -> list[Tensor]:
        """Sums over ranks of factors of `matrices`; one collective per dtype. `Cast` may have them encoded."""
        self._numel_after += sum(factor.numel() for factor in factors)
        sent = [factor.to(batch.wire_dtype) for factor, batch in zip(factors, matrices, strict=True)]
        self.group.all_reduce_factors_(along, sent)
        return [total.to(factor.dtype) for total, factor in zip(sent, factors, strict=True)]

    def random(self, keys: Sequence[str], like: Tensor, step: int) -> Tensor:
        """Random factors, shape, dtype and device of `like`, equal on all ranks."""
        shape, seed = tuple(like.shape[1:]), self.hook.random_seed
        return torch.stack([random_factor(key, shape, seed, step, like) for key in keys])

    def overlaps(self, step: int) -> bool:
        return True

    def reduce(self, flat: Tensor, bucket: Bucket) -> Tensor | None:
        counters = self.group.counters
        if bucket.step < self.hook.start_powerSGD_iter or not flat.is_floating_point() or not flat.numel():
            counters.numel_uncompressed += flat.numel()
            self.group.all_reduce_mean_(flat, bucket.scale)
            return None
        plan = self._plan(flat, bucket)
        rest = torch.cat([flat[:0], *(slot.view(flat).reshape(-1) for slot in plan.rest)])
        rest.div_(self.group.size / bucket.scale)
        used = [] if bucket.unused is None else [bucket.used(batch.slots, flat) for batch in plan.matrices]
        ps, qs = self.average(plan.matrices, flat, bucket, [rest, *used])
        for slot, mean in zip(plan.rest, rest.split([slot.numel for slot in plan.rest]), strict=True):
            slot.view(flat).copy_(mean.view(slot.shape))
        finite = [all_finite(rest)]
        for i, (batch, p, q) in enumerate(zip(plan.matrices, ps, qs, strict=True)):
            finite.append(batch.send(flat, p, q, used[i] > 0 if used else None, bucket))
        self._count(flat.numel(), rest.numel())
        self._log(bucket)
        return torch.stack(finite).all()

    def _make_plan(self, flat: Tensor, bucket: Bucket) -> _Plan:
        matrices, places = [], self.hook.matrices(bucket.slots)
        for (n, m), gradients in places.items():
            empty = flat.new_empty((len(gradients), self.hook.rank(n, m), n + m), dtype=work_dtype(flat.dtype))
            keys = keys_of(gradients)
            q = self.random(keys, empty[:, :, :m], step=0)
            p = self.random(keys, empty[:, :, m:], step=-1) if self.hook.num_iters_per_step == 1 else None
            at_once = not flat.is_cpu or self.hook.multiplies_at_once
            batch = Matrices(gradients, (n, m), q, p, flat.dtype, self.hook.use_error_feedback, at_once)
            batch.restore(self._take)
            matrices.append(batch)
        in_matrices = {slot for batch in matrices for slot in batch.slots}
        return _Plan(matrices, [slot for slot in bucket.slots if slot not in in_matrices])

    def _settled(self, entry: Mapping[str, Tensor]) -> Tensor:
        return settled(entry)

    def _entry_shapes(self, shapes: list[tuple[int, ...]]) -> Shapes:
        matrices = self.hook.matrices([Slot(str(i), shape, 0) for i, shape in enumerate(shapes)])
        if len(matrices) != 1:
            return {}
        ((n, m),) = matrices
        r = self.hook.rank(n, m)
        expected: Shapes = {"factor": (r, m)}
        if self.hook.num_iters_per_step == 1:
            expected["factor_p"] = (r, n)
        if self.hook.use_error_feedback and len(shapes) == 1:
            expected |= {"residual": shapes[0], "sent_p": (r, n), "sent_q": (r, m)}
        return expected

    def _count(self, numel: int, numel_rest: int) -> None:
        self._numel_before += numel
        self._numel_after += numel_rest
        self._numel_compressed += numel - numel_rest
        self.group.counters.numel_uncompressed += numel_rest
        self.group.counters.numel_compressed += numel - numel_rest

    def _log(self, bucket: Bucket) -> None:
        """At the first compressed step and every `compression_stats_logging_frequency` steps."""
        if bucket.is_last and bucket.step >= self._next_report and not self.group.is_dry_run:
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
        slots = [slot for plan in self._plans.values() for slot in plan.slots]
        total = sum(slot.numel for slot in slots)
        good, bad = 0, self.hook.matrix_approximation_rank
        while bad - good > 1:
            middle = (good + bad) // 2
            matrices = dataclasses.replace(self.hook, matrix_approximation_rank=middle).matrices(slots)
            numel = sum(slot.numel for some in matrices.values() for gradients in some for slot in gradients)
            good, bad = (middle, bad) if numel > NEXT_TO_NOTHING * total else (good, middle)
        return good
