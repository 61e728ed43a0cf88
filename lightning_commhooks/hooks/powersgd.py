"""PowerSGD: Vogels et al. 2019, https://arxiv.org/abs/1905.13727, algorithms 1 and 2.

Notation: k matrices of equal shape have n rows and m columns each, and their approximations have rank r. M, of shape
`(k, n, m)`, is a rank's residuals plus its gradients. P, shape `(k, r, n)`, and Q, shape `(k, r, m)`, are equal on all
ranks; P^T Q approximates the mean of M over the ranks. P and Q are stored as a few long rows because multiplying a wide
matrix by a few rows from the left is several times faster than by a few columns from the right.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import logging
import math
import zlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.steps import Steps
from lightning_commhooks.interface.accumulation import is_one
from lightning_commhooks.interface.bucket import Bucket, Slot
from lightning_commhooks.interface.checks import check_bool, check_integer
from lightning_commhooks.interface.error_feedback import ErrorFeedback
from lightning_commhooks.interface.hierarchy import Hierarchy, bind_by_node, check_hierarchy
from lightning_commhooks.interface.hook import NEXT_TO_NOTHING, BoundHook, CommHook
from lightning_commhooks.interface.precision import add_unscaled_, all_finite, to_gradient, work_dtype
from lightning_commhooks.interface.python_code import earlier
from lightning_commhooks.interface.registry import register
from lightning_commhooks.interface.start import check_start, start_of
from lightning_commhooks.interface.state import Shapes

logger = logging.getLogger(__name__)

# 1 MB of float32: half of a core's second-level cache on common servers.
BLOCK_NUMEL = 2**18

Config = TypeVar("Config", bound="type[LowRankConfig]")


def takes_aliases(config: Config) -> Config:
    """Decorate a config class so that its constructor also accepts the names in `LowRankConfig.option_aliases`."""
    init: Any = config.__init__

    @functools.wraps(init)
    def made(self: LowRankConfig, **options: Any) -> None:
        for short, name in config.option_aliases.items():
            if short in options:
                if name in options:
                    raise ValueError(f"{short} and {name} are two names of one option; leave {short} out")
                options[name] = options.pop(short)
        init(self, **options)

    config.__init__ = made  # type: ignore[method-assign]
    return config


@dataclass(frozen=True, kw_only=True)
class LowRankConfig(CommHook):
    """Options that `powersgd` and `batched_powersgd` share; those of PyTorch's `PowerSGDState` keep names and defaults.

    `num_iters_per_step=1` follows the authors' package, https://github.com/epfml/powersgd, and begins with P. 2 follows
    PyTorch's hook; with 2, the authors' package would send the sum of two approximations.

    Args:
        num_iters_per_step: with 2, each step makes a whole power iteration, as in PyTorch: it computes P, then Q. With
            1, each step makes half an iteration: steps alternate between computing P from the previous step's Q, and Q
            from the previous step's P. This halves the bytes, and takes one all-reduce instead of two and one matrix
            product less.
        use_error_feedback: add the compression error to the next step's gradient. Needs memory of the size of the
            gradients, at least float32.
        warm_start: begin each step's power iteration where the last one ended. `num_iters_per_step=1`
            needs it.
        orthogonalization_epsilon: a row of Q (or P) is replaced by a random one if its norm is at most this fraction of
            the largest norm in its matrix. Unlike PyTorch's, it is relative. 0 replaces only rows that are exactly
            zero, which is enough.
        random_seed: seed of the random start. The global random state is not touched.
        compression_stats_logging_frequency: interval, in steps, at which the compression rate is logged once
            compression has begun.
        hierarchy: `"node"`: average gradients in full within each node and compress between nodes, so that a node sends
            as much as one rank would. Each node needs the same number of ranks. `None`: among all ranks.
    """

    option_aliases: ClassVar[Mapping[str, str]] = {"rank": "matrix_approximation_rank", "start": "start_powerSGD_iter"}

    matrix_approximation_rank: int = 1
    start_powerSGD_iter: int | float | Literal["auto"] = 1_000
    num_iters_per_step: int = 2
    use_error_feedback: bool = True
    warm_start: bool = True
    orthogonalization_epsilon: float = 0
    random_seed: int = 0
    compression_stats_logging_frequency: int = 10_000
    hierarchy: Hierarchy = None
    # Last, because options are listed in this order.
    batch_tensors_with_same_shape: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_integer("matrix_approximation_rank", self.matrix_approximation_rank, 1)
        check_start("start_powerSGD_iter", self.start_powerSGD_iter)
        check_integer("compression_stats_logging_frequency", self.compression_stats_logging_frequency, 1)
        check_bool("use_error_feedback", self.use_error_feedback)
        check_bool("warm_start", self.warm_start)
        check_integer("random_seed", self.random_seed)
        check_hierarchy(self.hierarchy)
        check_integer("num_iters_per_step", self.num_iters_per_step, 1)
        if self.num_iters_per_step > 2:
            raise ValueError(f"num_iters_per_step must be 1 or 2, got {self.num_iters_per_step!r}")
        if self.num_iters_per_step == 1 and not self.warm_start:
            raise ValueError(
                "num_iters_per_step=1 starts from the factor of the previous step: it needs warm_start=True, "
                "or use num_iters_per_step=2"
            )
        if not isinstance(self.orthogonalization_epsilon, (int, float)) or not 0 <= self.orthogonalization_epsilon < 1:
            raise ValueError(f"orthogonalization_epsilon must be in [0, 1), got {self.orthogonalization_epsilon!r}")

    def changes_at(self) -> set[int]:
        start = start_of(self, "start_powerSGD_iter")
        return set() if isinstance(start, float) else {start}

    def repeats_after(self) -> int:
        return 3 - self.num_iters_per_step

    @abstractmethod
    def matrices(self, slots: Sequence[Slot]) -> dict[tuple[int, int], list[tuple[Slot, ...]]]:
        """Divide the gradients of a bucket into matrices, grouped by their shape `(n, m)`.

        Args:
            slots: the gradients, in memory order.

        Returns:
            by shape, a tuple of gradients for each matrix. They are adjacent in the bucket, and the matrix is padded
            with zeros after the last one. Gradients in no matrix are sent uncompressed.
        """

    def rank(self, n: int, m: int) -> int:
        """Rank of the approximation of a matrix of that shape."""
        return min(n, m, self.matrix_approximation_rank)


@register
@takes_aliases
@dataclass(frozen=True, kw_only=True)
class PowerSGD(LowRankConfig):
    """Low-rank gradient compression with error feedback.

    PowerSGD of Vogels et al. 2019, https://arxiv.org/abs/1905.13727, algorithms 1 and 2. Gives the same results as
    PyTorch's `powerSGD_hook` where that hook runs. Unlike it, this hook works with any number of buckets on gloo,
    survives zero, rank-deficient, tiny and huge gradients, keeps its memory by parameter name, allows
    `start_powerSGD_iter` below 2, and computes in float32 for 16-bit gradients.

    For each matrix, sends `(n + m) * rank` numbers instead of `n * m`, in two all-reduces per bucket. The first one
    also sends, uncompressed, the tensors with fewer than two dimensions and the matrices that would not shrink enough.
    With `num_iters_per_step=1`, steps alternate between `n * rank` and `m * rank` numbers, in one all-reduce.

    Args:
        matrix_approximation_rank: rank of the approximation, `rank` for short (not in Lightning CLI files). 1 to 4
            is usual, up to 32 for language models.
        start_powerSGD_iter: number of initial steps without compression, `start` for short (not in Lightning CLI
            files), because early gradients matter most; or a fraction of the run, such as 0.1; or `"auto"`, the value
            for a hook that is chosen by its name `"powersgd"`: 1,000 steps, or a tenth of the run if that is sooner.
            Lightning and `transformers.Trainer` know the length of a run; elsewhere, pass `num_steps=` to `attach`.
        min_compression_rate: a matrix of n rows and m columns is compressed when
            `(n + m) * rank * min_compression_rate < n * m`.
        batch_tensors_with_same_shape: multiply matrices of equal shape in one batched product. The result is the same
            up to rounding. GPUs always do this; on CPU it is faster for many small layers and slower for large ones.

    Raises:
        ValueError: a value is out of range.
    """

    name: ClassVar[str] = "powersgd"
    aliases: ClassVar[tuple[str, ...]] = ("power_sgd",)

    min_compression_rate: float = 2
    batch_tensors_with_same_shape: bool = False  # type: ignore[misc]  # a constant of the base

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bool("batch_tensors_with_same_shape", self.batch_tensors_with_same_shape)
        if not isinstance(self.min_compression_rate, (int, float)) or not self.min_compression_rate > 0:
            raise ValueError(f"min_compression_rate must be above 0, got {self.min_compression_rate!r}")

    def bind(self, group: Group) -> BoundHook:
        return bind_by_node(self.hierarchy, group, lambda ranks: BoundPowerSGD(ranks, self))

    def matrices(self, slots: Sequence[Slot]) -> dict[tuple[int, int], list[tuple[Slot, ...]]]:
        by_shape: dict[tuple[int, int], list[tuple[Slot, ...]]] = {}
        for slot in slots:
            n, m = (slot.shape[0], math.prod(slot.shape[1:])) if len(slot.shape) > 1 else (1, 0)
            if (n + m) * self.rank(n, m) * self.min_compression_rate < n * m:
                by_shape.setdefault((n, m), []).append((slot,))
        return by_shape


@register
@takes_aliases
@dataclass(frozen=True, kw_only=True)
class BatchedPowerSGD(LowRankConfig):
    """Low-rank compression of whole buckets, ignoring where parameters begin and end.

    PyTorch's `batched_powerSGD_hook`, which fails on an assertion in PyTorch 2.13. It computes fewer and larger
    products than `powersgd` and also compresses biases, but its accuracy per byte is **much lower**: the rows of a
    bucket are not the rows of its layers, so their gradients have no low rank. Prefer `powersgd`.

    Sends `2 * ceil(sqrt(numel)) * rank` numbers for a bucket of `numel` elements, in two all-reduces; with
    `num_iters_per_step=1` half of that, in one.

    Args:
        matrix_approximation_rank: rank of the approximation, `rank` for short (not in Lightning CLI files). More
            than 1 rarely helps here.
        start_powerSGD_iter: number of initial steps without compression, or a fraction of the run, or `"auto"`: see
            [`PowerSGD`][].

    Raises:
        ValueError: a value is out of range.
    """

    # A bucket has one matrix, padded with zeros.
    batch_tensors_with_same_shape: ClassVar[bool] = True

    name: ClassVar[str] = "batched_powersgd"
    aliases: ClassVar[tuple[str, ...]] = ("batched_power_sgd",)

    def bind(self, group: Group) -> BoundHook:
        return bind_by_node(self.hierarchy, group, lambda ranks: BoundPowerSGD(ranks, self))

    def matrices(self, slots: Sequence[Slot]) -> dict[tuple[int, int], list[tuple[Slot, ...]]]:
        side = math.isqrt(max(sum(slot.numel for slot in slots), 1) - 1) + 1
        return {(side, side): [tuple(slots)]}


class BoundPowerSGD(ErrorFeedback):
    """Runs algorithm 1 on all matrices of a bucket at once; `ErrorFeedback` implements algorithm 2.

    Args:
        group: the collectives the hook may use.
        hook: the options.
    """

    hook: LowRankConfig

    def __init__(self, group: Group, hook: LowRankConfig) -> None:
        super().__init__(group, hook)
        self._start = start_of(hook, "start_powerSGD_iter")
        # Number of gradient elements, and of numbers sent, since compression began; and the step of the next log
        # message.
        self._numel_before = self._numel_after = self._next_report = 0
        # The results of `_share`, until a bucket has a new plan.
        self._shares: dict[int, float] = {}

    def average_(self, residual: Tensor | None, bucket: Bucket, ranks: Group) -> Steps[Tensor | None]:
        flat, (_, batches, rest) = bucket.flat, self.plan(bucket)
        if residual is None:
            residual = torch.zeros_like(flat, dtype=work_dtype(flat.dtype))
        dense = bucket.gather(rest).div_(self.group.size / bucket.scale)
        dense, ps, qs = yield from self._factors(batches, residual, bucket, dense, ranks)
        for batch, p, q in zip(batches, ps, qs, strict=True):
            batch.write_and_subtract_(residual, bucket, p, q)
        bucket.scatter_(rest, dense)
        self._report(flat.numel(), dense.numel(), bucket)
        if not flat.is_cpu and flat.dtype != torch.float16:
            # The runtime then checks the gradients: a GPU reads them in less time than kernels for each factor take.
            # Not in float16, which is clipped: infinite factors could leave finite gradients.
            return None
        finite = [_sent_is_finite(p, q * bucket.loss_scale, flat.dtype) for p, q in zip(ps, qs, strict=True)]
        return torch.stack([all_finite(dense), *finite]).all()

    def _factors(
        self, batches: Sequence[_Matrices], residual: Tensor, bucket: Bucket, dense: Tensor, ranks: Group
    ) -> Steps[tuple[Tensor, list[Tensor], list[Tensor]]]:
        """Return the sum of `dense` over ranks, and P and Q of each batch.

        With `num_iters_per_step=1`, a step makes half an iteration, as in Zhang et al. 2023,
        https://arxiv.org/abs/2306.08881: P = M Q, and in the next step Q = M^T P from that P.
        """
        is_half = self.hook.num_iters_per_step == 1
        # The memory has P from the step that computes it until the step that computes Q from it.
        makes_q = is_half and any("factor_p" in self.memory.get(key, {}) for batch in batches for key in batch.keys)
        last, new = ("factor_p", "factor") if makes_q else ("factor", "factor_p")
        starts = [self._first_factors(batch, last, bucket.step) for batch in batches]
        products = [
            batch.add_and_multiply_(residual, bucket, start, makes_q)
            for batch, start in zip(batches, starts, strict=True)
        ]
        (dense,), factors = yield from self._mean([dense], products, bucket.flat.dtype, ranks)
        if is_half:
            # Without a copy, the memory would keep `dense`, which may be a part of the same tensor.
            factors = [factor.clone() for factor in factors]
            self._remember(batches, factors, new)
            return (dense, starts, factors) if makes_q else (dense, factors, starts)
        ps = [orthonormal_basis(p) for p in factors]
        qs = [batch.multiply(residual, p) for batch, p in zip(batches, ps, strict=True)]
        _, qs = yield from self._mean([], qs, bucket.flat.dtype, ranks)
        self._remember(batches, qs, "factor")
        return dense, ps, qs

    def _first_factors(self, batch: _Matrices, kind: str, step: int) -> Tensor:
        """Return the orthonormal factors with which a step begins: an earlier step's, or random ones."""
        fresh = batch.fresh[kind]
        if not self.hook.warm_start:
            return orthonormal_basis(random_factors(batch.keys, fresh.shape[1:], fresh, self.hook.random_seed, step))
        last = [self.remembered(key, own.clone, kind) for key, own in zip(batch.keys, fresh, strict=True)]
        rows = torch.stack(last) if len(last) > 1 else last[0].unsqueeze(0)
        return orthonormal_basis(rows, fresh, self.hook.orthogonalization_epsilon)

    def _remember(self, batches: Sequence[_Matrices], factors: Sequence[Tensor], kind: str) -> None:
        for batch, own in zip(batches, factors, strict=True):
            for key, factor in zip(batch.keys, own, strict=True):
                self.remember(key, factor, kind)
                if kind == "factor" and "factor_p" in self.memory.get(key, {}):
                    self.remember(key, None, "factor_p")

    def _mean(
        self, exact: list[Tensor], factors: list[Tensor], dtype: torch.dtype, ranks: Group
    ) -> Steps[tuple[list[Tensor], list[Tensor]]]:
        """Return the sums over ranks of tensors, and the means of factors of gradients in `dtype`.

        `Cast` may make the group encode factors.
        """
        self._numel_after += sum(factor.numel() for factor in factors)
        # A row's norm may exceed the range of float16 even if none of its elements does.
        wire = torch.bfloat16 if dtype == torch.float16 else dtype
        if factors:
            torch._foreach_div_(factors, self.group.size)
        exact, means = yield from ranks.all_reduce_factors(exact, [factor.to(wire) for factor in factors])
        return exact, [mean.to(factor.dtype) for mean, factor in zip(means, factors, strict=True)]

    def compressed(self, bucket: Bucket) -> Sequence[Slot] | None:
        if bucket.step < self._start:
            return None
        slots: list[Slot] = self.plan(bucket)[0]
        return slots

    def lay_out(self, bucket: Bucket) -> tuple[list[Slot], list[_Matrices], list[Slot]]:
        """Return the gradients that are in matrices, the matrices, and the remaining gradients."""
        hook, batches = self.hook, []
        self._shares = {}
        like = bucket.flat.new_empty(0, dtype=work_dtype(bucket.flat.dtype))
        for (n, m), slots in hook.matrices(bucket.slots).items():
            batch = _Matrices(slots, n, m, hook.batch_tensors_with_same_shape or not like.is_cpu)
            kinds = {"factor": (m, 0), "factor_p": (n, -1)} if hook.num_iters_per_step == 1 else {"factor": (m, 0)}
            for kind, (length, seed) in kinds.items():
                rows = random_factors(batch.keys, (hook.rank(n, m), length), like, hook.random_seed, seed)
                batch.fresh[kind] = orthonormal_basis(rows)
            batches.append(batch)
        inside = [slot for batch in batches for slots in batch.slots for slot in slots]
        outside = set(bucket.slots).difference(inside)
        return inside, batches, [slot for slot in bucket.slots if slot in outside]

    def kept(self, shapes: list[tuple[int, ...]]) -> Shapes:
        matrices = self.hook.matrices([Slot(str(i), shape, 0) for i, shape in enumerate(shapes)])
        if len(matrices) != 1:
            return {}
        ((n, m),) = matrices
        r = self.hook.rank(n, m)
        factors = {"factor": (r, m), "factor_p": (r, n)} if self.hook.num_iters_per_step == 1 else {"factor": (r, m)}
        return {**factors, "residual": shapes[0]} if self.has_residuals and len(shapes) == 1 else factors

    def _report(self, numel: int, numel_rest: int, bucket: Bucket) -> None:
        """Log the rate at the first compressed step and then every `compression_stats_logging_frequency` steps."""
        self._numel_before += numel
        self._numel_after += numel_rest
        if bucket.is_last and bucket.step >= self._next_report:
            rate, before, after = self.compression_stats()
            text = "step %d: %d elements before compression, %d after, rate %.4g"
            logger.info(text, bucket.step, before, after, rate)
            self._next_report = bucket.step + self.hook.compression_stats_logging_frequency

    def compression_stats(self) -> tuple[float, int, int]:
        """Return `(rate, numel_before, numel_after)`, like `PowerSGDState`; the rate is 0 before compression begins."""
        rate = self._numel_before / self._numel_after if self._numel_after else 0.0
        return rate, self._numel_before, self._numel_after

    def inactive_reason(self, step: int) -> str | None:
        hook, start, rank = self.hook, self._start, self.hook.matrix_approximation_rank
        if step < start:
            return f"hook={hook.name!r} compresses from start_powerSGD_iter={start} on; {earlier(hook, step + 1)}"
        share = self._share(rank)
        if share > NEXT_TO_NOTHING:
            return None
        how_much = "nothing, no gradient is a matrix that shrinks"
        if share:
            how_much = f"only {share:.2%}, few gradients are matrices that shrink"
        # The highest rank that compresses enough: a lower rank compresses more gradients.
        better = bisect.bisect_left(range(1, rank), -NEXT_TO_NOTHING, key=lambda rank: -self._share(rank))
        return (
            f"hook={hook.name!r} compresses {how_much} enough at matrix_approximation_rank={rank}; "
            f"lower {f'it to {better}' if better else 'min_compression_rate'}, or use hook='bf16'"
        )

    def _share(self, rank: int) -> float:
        """Return the fraction of elements that would be compressed at that rank; 1 before there are any buckets."""
        if rank not in self._shares:
            hook = dataclasses.replace(self.hook, matrix_approximation_rank=rank)
            slots = [slot for slots, _ in self.plans.values() for slot in slots]
            matrices = [slot for of in hook.matrices(slots).values() for some in of for slot in some]
            total = sum(slot.numel for slot in slots)
            self._shares[rank] = sum(slot.numel for slot in matrices) / max(1, total) if slots else 1.0
        return self._shares[rank]


@dataclass
class _Matrices:
    """The matrices of one shape in a bucket.

    Attributes:
        slots: the gradients of each matrix, adjacent in the bucket; the matrix is padded with zeros after the last.
        n: number of rows.
        m: number of columns.
        is_stacked: whether to multiply the matrices as one; if not, one after another, in blocks of rows.
        fresh: random orthonormal factors by kind: `"factor"` is Q; `"factor_p"` is P, only with half iterations.
        keys: keys of the matrices in the memory: the names of their parameters, joined by newlines.
    """

    slots: list[tuple[Slot, ...]]
    n: int
    m: int
    is_stacked: bool
    fresh: dict[str, Tensor] = field(default_factory=dict)
    _stacked: Tensor | None = None

    def __post_init__(self) -> None:
        self.keys = ["\n".join(slot.name for slot in slots) for slots in self.slots]
        offsets = [slots[0].offset for slots in self.slots]
        self._spacings = {after - before for before, after in itertools.pairwise(offsets)} or {0}
        self._is_complete = all(sum(slot.numel for slot in slots) == self.n * self.m for slots in self.slots)
        # Whether one view of a flat bucket has all of them.
        self._is_view = self.is_stacked and self._is_complete and len(self._spacings) == 1

    def _parts(self, flat: Tensor) -> list[Tensor]:
        """Return the gradients of each matrix, as a contiguous view of a flat bucket."""
        return [flat[slots[0].offset : slots[-1].offset + slots[-1].numel] for slots in self.slots]

    def _blocks(
        self, residual: Tensor, flat: Tensor, at_once: bool = True
    ) -> Iterator[tuple[Tensor, Tensor, int | slice, slice]]:
        """Yield views of residuals and gradients, and the indices of their matrices and rows.

        One view of all matrices, shape `(k, n, m)`, if there is one and `at_once`; otherwise one matrix after another,
        shape `(n, m)`, on CPU in blocks of rows that fit into the cache. A block that is not complete is flat.
        """
        if self._is_view and at_once:
            yield self._stack(residual), self._stack(flat), slice(None), slice(None)
            return
        num = max(1, BLOCK_NUMEL // self.m) if flat.is_cpu else self.n
        for i, both in enumerate(zip(self._parts(residual), self._parts(flat), strict=True)):
            for row in range(0, -(-len(both[0]) // self.m), num):
                block, own = (part[row * self.m : (row + num) * self.m] for part in both)
                rows = slice(row, row + -(-len(block) // self.m))
                if len(block) % self.m == 0:
                    block, own = block.view(-1, self.m), own.view(-1, self.m)
                yield block, own, i, rows

    def add_and_multiply_(self, residual: Tensor, bucket: Bucket, start: Tensor, makes_q: bool) -> Tensor:
        """Add the gradients to the residuals, which gives M; return M Q, or M^T P if `makes_q`."""
        if self.is_stacked:
            for block, gradient, _, _ in self._blocks(residual, bucket.flat):
                add_unscaled_(block, gradient, bucket.divisor)
            self._stacked = self._stack(residual)
            return torch.bmm(start, self._stacked if makes_q else self._stacked.mT)
        product = start.new_zeros((*start.shape[:2], self.m if makes_q else self.n))
        for block, gradient, i, rows in self._blocks(residual, bucket.flat):
            add_unscaled_(block, gradient, bucket.divisor)
            if makes_q:
                product[i].addmm_(start[i][:, rows], block)
            else:
                torch.mm(start[i], block.t(), out=product[i][:, rows])
        return product

    def _stack(self, flat: Tensor) -> Tensor:
        """Return the matrices, shape `(k, n, m)`: a view if they are complete and equally spaced, otherwise a copy."""
        if self._is_view:
            offset = flat.storage_offset() + self.slots[0][0].offset
            return flat.as_strided((len(self.slots), self.n, self.m), (*self._spacings, self.m, 1), offset)
        matrices = self._parts(flat)
        if not self._is_complete:
            matrices = [pad(m, (0, self.n * self.m - m.numel())) for m in matrices]
        return torch.stack(matrices).view(-1, self.n, self.m)

    def multiply(self, residual: Tensor, p: Tensor) -> Tensor:
        """Return M^T P, after `add_and_multiply_`."""
        if self._stacked is not None:
            return torch.bmm(p, self._stacked)
        matrices = (m.view(self.n, self.m) for m in self._parts(residual))
        return torch.stack([torch.mm(own, m) for own, m in zip(p, matrices, strict=True)])

    def write_and_subtract_(self, residual: Tensor, bucket: Bucket, p: Tensor, q: Tensor) -> None:
        """Replace the gradients by P^T Q times the loss scale; subtract P^T Q, as rounded there, from the residuals."""
        self._stacked = None
        scaled = q if is_one(bucket.loss_scale) else q * bucket.loss_scale
        # Otherwise the product needs memory of its own.
        in_place = bucket.flat.dtype == q.dtype
        for block, written, i, rows in self._blocks(residual, bucket.flat, at_once=in_place):
            # With rank 1, a matrix product takes a third longer than an elementwise product.
            multiply = torch.mul if q.shape[1] == 1 else torch.bmm if written.dim() == 3 else torch.mm
            is_whole = in_place and written.dim() > 1
            product = multiply(p[i][..., rows].mT, scaled[i], out=written if is_whole else None)
            if not is_whole:
                written.copy_(to_gradient(product.view(-1)[: written.numel()].view_as(written), written.dtype))
            add_unscaled_(block, written, -bucket.loss_scale)


def _sent_is_finite(p: Tensor, q: Tensor, dtype: torch.dtype) -> Tensor:
    """Return whether P^T Q is finite in a dtype of gradients, as a boolean of one element.

    Either P or Q has orthonormal rows.
    """
    # No element of P^T Q is larger than r times the product of the largest elements of P and Q.
    limit = torch.finfo(q.dtype if dtype == torch.float16 else dtype).max
    largest_p, largest_q = (torch.linalg.vector_norm(factor, math.inf) for factor in (p, q))
    finite: Tensor = largest_p * largest_q * q.shape[1] < limit
    return finite


def random_factors(keys: Sequence[str], shape: Sequence[int], like: Tensor, seed: int, step: int) -> Tensor:
    """Return standard normal numbers for each key, in the dtype and on the device of `like`, equal on all ranks.

    The numbers do not depend on the device. They depend on the seed, on the parameters' names, so that the order of
    buckets does not matter, and on the step.
    """
    generator = torch.Generator()
    factors = torch.empty(len(keys), *shape, dtype=torch.float32, device="cpu")
    for key, factor in zip(keys, factors, strict=True):
        factor.normal_(generator=generator.manual_seed(zlib.crc32(f"{seed}:{step}:{key}".encode())))
    # A copy from pinned memory does not wait for the device.
    return factors.pin_memory().to(like, non_blocking=True) if like.is_cuda else factors.to(like)


def orthonormal_basis(rows: Tensor, fresh: Tensor | None = None, epsilon: float = 0.0) -> Tensor:
    """An orthonormal basis of the span of each matrix's rows, shape `(k, r, n)`, r <= n; not finite if rows are not.

    Householder reflections also give orthonormal rows for linearly dependent, zero, tiny and huge rows: if the rows
    span fewer than r dimensions, the rest of the basis is arbitrary. (PyTorch's Gram-Schmidt divides by zero or loses
    orthogonality.) A single row is divided by its norm, and stays zero if it is zero.

    Rows that are zero, or at most `epsilon` times as long as their matrix's longest, are first replaced by those of
    `fresh`, if given: if a matrix was zero in the last step, its rows could make P zero in all later steps.
    """
    if rows.dtype == torch.float64:
        largest = torch.linalg.vector_norm(rows, math.inf, dim=(1, 2), keepdim=True)
        rows = rows / largest.clamp_min_(torch.finfo(rows.dtype).tiny)
    # In float64, squares of float32 neither underflow nor overflow.
    norm = torch.linalg.vector_norm(rows, dim=2, keepdim=True, dtype=torch.float64)
    scaled = torch.empty_like(rows)
    if fresh is None:
        torch.div(rows, norm.clamp_min_(torch.finfo(norm.dtype).tiny), out=scaled)
    else:
        alive = norm > (epsilon * norm.amax(dim=1, keepdim=True) if epsilon else 0)
        scaled = torch.where(alive, torch.div(rows, norm, out=scaled), fresh)
    return scaled if rows.shape[1] == 1 else torch.linalg.qr(scaled.mT).Q.mT.contiguous()
