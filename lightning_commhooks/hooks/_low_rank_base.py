"""Options, memory and statistics shared by `powersgd` and `batched_powersgd`."""

from __future__ import annotations

import logging
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from lightning_commhooks.core.collectives import Group
from lightning_commhooks.core.hook import BoundHook, Bucket, CommHook
from lightning_commhooks.core.metrics import Counters
from lightning_commhooks.hooks._low_rank import orthonormal_basis, random_factor, revive

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
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
                raise ValueError(f"{field} must be an integer of at least {lowest}, is {value!r}")
        for field in ("use_error_feedback", "warm_start"):
            if not isinstance(getattr(self, field), bool):
                raise ValueError(f"{field} must be True or False, is {getattr(self, field)!r}")
        if not isinstance(self.random_seed, int):
            raise ValueError(f"random_seed must be an integer, is {self.random_seed!r}")
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
                f"never compressed anything. Set start_powerSGD_iter below {steps}, to about a tenth of training"
            ]
        if self._numel_before and not self._numel_compressed:
            rank = self._config.matrix_approximation_rank
            return [
                f"hook={self._config.name!r} compressed nothing: no gradient is a matrix that shrinks enough at "
                f"matrix_approximation_rank={rank}. Lower it, lower min_compression_rate, or use hook='bf16'"
            ]
        return []


@dataclass
class Factor:
    """Q of one batch of matrices.

    Attributes:
        names: k keys, the parameters' names; what the random start depends on.
        q: shape `(k, r, m)`, from the last step.
        fresh: shape `(k, r, m)`, random rows, to begin with and for dead rows.
    """

    names: list[str]
    q: Tensor
    fresh: Tensor


Plan = TypeVar("Plan")


class BoundLowRank(BoundHook, Generic[Plan]):
    """Memory by parameter name, the dense first steps and the random starts.

    Residuals have their slot's shape, on this rank; factors are equal on all ranks. Both are views into
    larger tensors, which the plans of subclasses lay out for one bucket at a time.
    """

    def __init__(self, config: LowRankConfig, group: Group) -> None:
        super().__init__(group)
        self._config = config
        self._residuals: dict[str, Tensor] = {}
        self._factors: dict[str, Tensor] = {}
        self._plans: dict[tuple[str, ...], Plan] = {}
        self._stats = LowRankStats(config)

    def reduce(self, flat: Tensor, bucket: Bucket) -> None:
        if bucket.step < self._config.start_powerSGD_iter or not flat.is_floating_point() or not flat.numel():
            self.group.counters.numel_uncompressed += flat.numel()
            self.group.all_reduce_mean_(flat)
            return
        if bucket.names not in self._plans:
            # The first time, or DDP has rebuilt its buckets: memory moves along by name.
            self._settle()
            self._plans = {k: v for k, v in self._plans.items() if not set(k) & set(bucket.names)}
            self._plans[bucket.names] = self._make_plan(flat, bucket)
        num_dense, num_factors = self._reduce_compressed(flat, bucket, self._plans[bucket.names])
        self._stats.record(self.group.counters, flat.numel(), num_dense, num_factors)
        self._stats.log(bucket)

    @abstractmethod
    def _make_plan(self, flat: Tensor, bucket: Bucket) -> Plan:
        """Lay out the memory of one bucket, with what `_residuals` and `_factors` have of its parameters."""

    @abstractmethod
    def _reduce_compressed(self, flat: Tensor, bucket: Bucket, plan: Plan) -> tuple[int, int]:
        """`reduce` once compression has begun; returns the elements sent as they are, and as factors."""

    def _make_factor(self, names: list[str], shape: tuple[int, int], like: Tensor) -> Factor:
        fresh = self._random(names, shape, 0, like)
        factor = Factor(names, fresh.clone(), fresh)
        for name, q in zip(names, factor.q, strict=True):
            move(self._factors, name, q)
        return factor

    def _start(self, factor: Factor, step: int) -> Tensor:
        """Orthonormal rows to begin the power iteration of this step with."""
        if not self._config.warm_start:
            _, r, m = factor.q.shape
            return orthonormal_basis(self._random(factor.names, (r, m), step, factor.q))
        return orthonormal_basis(revive(factor.q, factor.fresh, self._config.orthogonalization_epsilon))

    def _random(self, names: list[str], shape: tuple[int, int], step: int, like: Tensor) -> Tensor:
        return torch.stack([random_factor(name, shape, self._config.random_seed, step, like) for name in names])

    def _settle(self) -> None:  # optional to override
        """Bring `_residuals` up to date, for hooks that update them lazily."""

    def drain_(self, flat: Tensor, bucket: Bucket) -> None:
        self._settle()
        for slot in bucket.slots:
            if slot.name in self._residuals:
                slot.view(flat).add_(self._residuals[slot.name])
                self._residuals[slot.name].zero_()

    def state_dict(self) -> dict[str, Any]:
        self._settle()
        # The mean over ranks of what is sent depends on the mean residual alone: one for all ranks will do.
        residuals = {name: self._residuals[name].contiguous().clone() for name in sorted(self._residuals)}
        for residual in residuals.values():
            self.group.all_reduce_mean_(residual)
        return {"residuals": residuals, "factors": {name: q.clone() for name, q in self._factors.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if set(state) != {"residuals", "factors"}:
            raise ValueError(f"state of PowerSGD has residuals and factors, this one has {sorted(state)}")
        self._plans = {}
        device = self.group.device
        self._residuals = {name: tensor.to(device, copy=True) for name, tensor in state["residuals"].items()}
        self._factors = {name: tensor.to(device, copy=True) for name, tensor in state["factors"].items()}

    def release(self) -> None:
        self._plans, self._residuals, self._factors = {}, {}, {}

    def compression_stats(self) -> tuple[float, int, int]:
        return self._stats.as_tuple()

    def closing_warnings(self, steps: int) -> list[str]:
        return self._stats.closing_warnings(steps)


def move(memory: dict[str, Tensor], name: str, new: Tensor) -> None:
    """Let `new` take the place of `memory[name]`, with its values if there are any."""
    if name in memory:
        new.copy_(memory[name])
    memory[name] = new
