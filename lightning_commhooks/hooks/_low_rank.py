"""Options that `powersgd` and `batched_powersgd` share, and factors: random, orthonormal, revived."""

from __future__ import annotations

import functools
import math
import zlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from lightning_commhooks.interface.bucket import Slot
from lightning_commhooks.interface.checks import check_bool, check_integer
from lightning_commhooks.interface.hierarchy import Hierarchy, check_hierarchy
from lightning_commhooks.interface.hook import CommHook
from lightning_commhooks.interface.start import check_start, start_of

Config = TypeVar("Config", bound="type[LowRankConfig]")


def takes_aliases(config: Config) -> Config:
    """Class decorator: options may be given by their `LowRankConfig.option_aliases` too."""
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
    """Options of PyTorch's `PowerSGDState` that `powersgd` and `batched_powersgd` share, same names and defaults.

    `num_iters_per_step=1` is that of the authors' package, https://github.com/epfml/powersgd, beginning with P; 2 is
    what PyTorch's hook does, where theirs would send the sum of two approximations.

    Args:
        num_iters_per_step: 2 makes a whole power iteration in each step, as PyTorch does: P, then Q. 1 makes half of
            one, in turn P with the Q of the step before, and Q with the P of the step before: half the bytes, one
            all-reduce in place of two, and one product less.
        use_error_feedback: add what compression left out to the next step's gradient. Needs memory of
            the size of the gradients, at least float32.
        warm_start: begin each step's power iteration where the last one ended. `num_iters_per_step=1`
            needs it.
        orthogonalization_epsilon: a row of Q (or P) whose norm is at most this fraction of the longest is drawn
            anew. Relative, unlike PyTorch's; 0 renews rows that are exactly zero, which is enough.
        random_seed: of the random start. The global random state is not touched.
        compression_stats_logging_frequency: log the compression rate every so many steps once compression
            has begun.
        hierarchy: `"node"`: average gradients in full within each node and compress between nodes, so that a node sends
            what one rank would. Each node needs the same number of ranks. `None`: among all ranks.
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
    # Last: the order is that in which options are listed.
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
            raise ValueError(f"num_iters_per_step must be 1 or 2, is {self.num_iters_per_step!r}")
        if self.num_iters_per_step == 1 and not self.warm_start:
            raise ValueError(
                "num_iters_per_step=1 goes on from the factor of the step before: it needs warm_start=True, "
                "or use num_iters_per_step=2"
            )
        if not isinstance(self.orthogonalization_epsilon, (int, float)) or not 0 <= self.orthogonalization_epsilon < 1:
            raise ValueError(f"orthogonalization_epsilon must be in [0, 1), is {self.orthogonalization_epsilon!r}")

    def changes_at(self) -> set[int]:
        start = start_of(self, "start_powerSGD_iter")
        return set() if isinstance(start, float) else {start}

    def repeats_after(self) -> int:
        return 3 - self.num_iters_per_step

    @abstractmethod
    def matrices(self, slots: Sequence[Slot]) -> dict[tuple[int, int], list[tuple[Slot, ...]]]:
        """Cut a bucket into matrices, by their shape `(n, m)`.

        Args:
            slots: the gradients, in memory order.

        Returns:
            the gradients of each matrix: neighbours in the bucket, zeros after the last. Gradients in no matrix are
            sent as they are.
        """

    def rank(self, n: int, m: int) -> int:
        """Rank of the approximation of a matrix of that shape."""
        return min(n, m, self.matrix_approximation_rank)


def random_factors(keys: Sequence[str], shape: Sequence[int], like: Tensor, seed: int, step: int) -> Tensor:
    """Standard normal numbers for each key, dtype and device of `like`, the same on all ranks and devices.

    They depend on names of parameters, so that no order of buckets matters, on the seed, and on the step where they are
    drawn anew at each.
    """
    generator = torch.Generator()
    factors = torch.empty(len(keys), *shape)
    for key, factor in zip(keys, factors, strict=True):
        factor.normal_(generator=generator.manual_seed(zlib.crc32(f"{seed}:{step}:{key}".encode())))
    # Pinned, a copy does not wait for the device.
    return factors.pin_memory().to(like, non_blocking=True) if like.is_cuda else factors.to(like)


def orthonormal_basis(rows: Tensor) -> Tensor:
    """An orthonormal basis of the span of each matrix's rows, shape `(k, r, n)`, r <= n; NaN where they are not finite.

    By Householder, which also gives orthonormal rows for dependent, zero, tiny and huge ones: where they span less than
    r dimensions, the rest of the basis is arbitrary. (PyTorch's Gram-Schmidt divides by zero or loses orthogonality.)
    """
    # Norms are sums of squares: scaling keeps them from overflow and underflow.
    largest = torch.linalg.vector_norm(rows, math.inf, dim=2, keepdim=True).clamp_min_(torch.finfo(rows.dtype).tiny)
    basis: Tensor = torch.linalg.qr((rows / largest).mT).Q
    return basis.mT.contiguous()


def revived(rows: Tensor, fresh: Tensor, epsilon: float) -> Tensor:
    """Rows of factors, with fresh ones for the dead: shorter than `epsilon` times the longest of their matrix, or zero.

    Those of a matrix that was zero at the last step could give P = 0 for ever after.
    """
    norm = torch.linalg.vector_norm(rows, ord=1, dim=2, keepdim=True)
    alive = norm > (epsilon * norm.amax(dim=1, keepdim=True) if epsilon else 0)
    return torch.where(alive, rows, fresh)
