"""Options, memory and statistics shared by `powersgd` and `batched_powersgd`."""

from __future__ import annotations

import logging
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_commhooks.collectives.counters import Counters
from lightning_commhooks.collectives.group import Group
from lightning_commhooks.hooks._low_rank import orthonormal_basis, random_factor, revive
from lightning_commhooks.hooks._low_rank_state import loaded, saved, settled
from lightning_commhooks.interface.bucket import Bucket
from lightning_commhooks.interface.by_parameter import BoundByParameter, Entry, P
from lightning_commhooks.interface.checks import check_bool, check_integer
from lightning_commhooks.interface.hook import CommHook
from lightning_commhooks.interface.memory import Memory
from lightning_commhooks.interface.state import StateReader, StateWriter

logger = logging.getLogger("lightning_commhooks.hooks.powersgd")


@dataclass(frozen=True, kw_only=True)
class LowRankConfig(CommHook):
    """Options of `torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook.PowerSGDState`, same names and defaults."""

    matrix_approximation_rank: int = 1
    start_powerSGD_iter: int = 1_000
    use_error_feedback: bool = True
    warm_start: bool = True
    orthogonalization_epsilon: float = 0
    random_seed: int = 0
    compression_stats_logging_frequency: int = 10_000

    def __post_init__(self) -> None:
        for field, lowest in (
            ("matrix_approximation_rank", 1),
            ("start_powerSGD_iter", 0),
            ("compression_stats_logging_frequency", 1),
        ):
            check_integer(field, getattr(self, field), lowest)
        for field in ("use_error_feedback", "warm_start"):
            check_bool(field, getattr(self, field))
        check_integer("random_seed", self.random_seed)
        if not isinstance(self.orthogonalization_epsilon, (int, float)) or not 0 <= self.orthogonalization_epsilon < 1:
            raise ValueError(f"orthogonalization_epsilon must be in [0, 1), is {self.orthogonalization_epsilon!r}")


class LowRankStats:
    """What `PowerSGDState.compression_stats` counts: elements before and after, since compression began."""

    def __init__(self, config: LowRankConfig) -> None:
        self._config = config
        self._numel_before = 0
        self._numel_after = 0
        self._numel_compressed = 0
        self._next_report = 0

    def record(self, counters: Counters, numel: int, numel_dense: int, numel_factors: int) -> None:
        """Count one bucket.

        Args:
            counters: counts of the attachment, updated too.
            numel: elements in the bucket.
            numel_dense: those of them that were sent as they are.
            numel_factors: elements sent for the rest.
        """
        self._numel_before += numel
        self._numel_after += numel_dense + numel_factors
        self._numel_compressed += numel - numel_dense
        counters.numel_uncompressed += numel_dense
        counters.numel_compressed += numel - numel_dense

    def log(self, bucket: Bucket) -> None:
        """Log the rate at the first compressed step and every `compression_stats_logging_frequency` steps."""
        if bucket.is_last and bucket.step >= self._next_report:
            rate, before, after = self.as_tuple()
            logger.info(
                "step %d: %d elements before compression, %d after, rate %.4g", bucket.step, before, after, rate
            )
            self._next_report = bucket.step + self._config.compression_stats_logging_frequency

    def as_tuple(self) -> tuple[float, int, int]:
        """`(rate, numel_before, numel_after)`; the rate is 0 before compression has begun."""
        rate = self._numel_before / self._numel_after if self._numel_after else 0.0
        return rate, self._numel_before, self._numel_after

    def closing_warnings(self, steps: int) -> list[str]:
        """See `BoundHook.closing_warnings`."""
        start = self._config.start_powerSGD_iter
        if 0 < steps <= start:
            return [
                f"training ended after {steps} steps, before start_powerSGD_iter={start}: hook={self._config.name!r} "
                f"never compressed anything. Set start_powerSGD_iter to about a tenth of training, {steps // 10} here"
            ]
        if self._numel_before and not self._numel_compressed:
            rank = self._config.matrix_approximation_rank
            return [
                f"hook={self._config.name!r} compressed nothing: no gradient is a matrix that shrinks enough at "
                f"matrix_approximation_rank={rank}. Lower it, lower min_compression_rate, or use hook='bf16'"
            ]
        return []


class Factor:
    """Q of one batch of matrices.

    Args:
        names: k keys, the parameters' names; what the random start depends on.
        fresh: shape `(k, r, m)`, random rows, to begin with and for dead rows.
        stored: `(r, m)` each, where the power iteration of a matrix begins instead, if there is one.

    Attributes:
        q: shape `(k, r, m)`, from the last step.
    """

    def __init__(self, names: list[str], fresh: Tensor, stored: list[Tensor | None]) -> None:
        self.names = names
        self.fresh = fresh
        # A resumed run may have another precision than the one that was saved.
        start = [q.to(fresh) if q is not None else random for q, random in zip(stored, fresh, strict=True)]
        self.q = Memory(torch.stack(start))


class BoundLowRank(BoundByParameter[P]):
    """The dense first steps and the random starts. Residuals differ between ranks; factors are equal on all of them."""

    scales_gradients = True

    def __init__(self, config: LowRankConfig, group: Group) -> None:
        super().__init__(group)
        self._config = config
        self._stats = LowRankStats(config)

    def reduce(self, flat: Tensor, bucket: Bucket) -> Tensor | None:
        if bucket.step < self._config.start_powerSGD_iter or not flat.is_floating_point() or not flat.numel():
            self.group.counters.numel_uncompressed += flat.numel()
            self.group.all_reduce_mean_(flat, bucket.scale)
            return None
        finite, num_dense, num_factors = self._reduce_compressed(flat, bucket, self._plan(flat, bucket))
        self._stats.record(self.group.counters, flat.numel(), num_dense, num_factors)
        self._stats.log(bucket)
        return finite

    @abstractmethod
    def _reduce_compressed(self, flat: Tensor, bucket: Bucket, plan: P) -> tuple[Tensor, int, int]:
        """`reduce` once compression has begun; returns also the elements sent as they are, and as factors."""

    def _make_factor(self, names: list[str], shape: tuple[int, int], like: Tensor) -> Factor:
        stored = [self._stored.get(name, {}).get("factor") for name in names]
        return Factor(names, self._random(names, shape, 0, like), stored)

    def _start(self, factor: Factor, step: int) -> Tensor:
        """Orthonormal rows to begin the power iteration of this step with."""
        if not self._config.warm_start:
            _, r, m = factor.fresh.shape
            return orthonormal_basis(self._random(factor.names, (r, m), step, factor.fresh))
        return orthonormal_basis(revive(factor.q.value, factor.fresh, self._config.orthogonalization_epsilon))

    def _random(self, names: list[str], shape: tuple[int, int], step: int, like: Tensor) -> Tensor:
        return torch.stack([random_factor(name, shape, self._config.random_seed, step, like) for name in names])

    def _settled(self, entry: Entry) -> Tensor:
        return settled(entry)

    def _saved(self, entry: Entry, writer: StateWriter) -> Entry:
        return saved(entry, writer)

    def _loaded(self, key: str, part: Any, shapes: list[tuple[int, ...]], reader: StateReader) -> Entry | None:
        expected = self._entry_shapes(shapes)
        return loaded(key, part, expected, reader) if expected else None

    @abstractmethod
    def _entry_shapes(self, shapes: list[tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Shapes that an entry has, given those of the parameters in its key; none if it is not compressed."""

    def why_not_compressed(self, step: int) -> str | None:
        start = self._config.start_powerSGD_iter
        return f"start_powerSGD_iter={start}" if step < start else None

    def compression_stats(self) -> tuple[float, int, int]:
        return self._stats.as_tuple()

    def closing_warnings(self, steps: int) -> list[str]:
        return self._stats.closing_warnings(steps)
