"""The error of averaged gradients, estimated periodically from a sample of their elements."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.steps import Steps
from lightning_commhooks.interface.bucket import Bucket

DEFAULT_NUMEL = 2**14


# A sample of this rank's gradients, before they were averaged: indices of elements in the bucket, the elements in at
# least float32, and the number of elements of the bucket that each of them represents.
Sample = tuple[Tensor, Tensor, float]


class ErrorSampler:
    """Compares the result of a step with the mean of the same gradients in full precision.

    The error is `|result - mean| / |mean|`, with Euclidean norms over the gradients of all parameters. It is estimated
    from elements that are drawn again in each sampled step, the same on all ranks.

    Args:
        every: sample steps whose number is a multiple of this value.
        numel: number of elements to compare in a step, over all buckets; `None`: all elements.
        numel_model: number of elements of all gradients.
        only: sample this step only; `None`: as `every` says.

    Attributes:
        step: the last sampled step; -1 before the first.
    """

    def __init__(self, every: int, numel: int | None, numel_model: int, only: int | None = None) -> None:
        self._every, self._only = every, only
        self._fraction = 1.0 if numel is None else min(1.0, numel / max(1, numel_model))
        self.step = -1
        # Sums of squares: of the difference, and of the mean.
        self._sums: Tensor | None = None
        # The sums of the last step with finite gradients, and its number.
        self._finite: Tensor | None = None

    def take(self, flat: Tensor, bucket: Bucket) -> Sample | None:
        """Sample a bucket before it is reduced; `None` in unsampled steps, and for sparse or non-real gradients."""
        is_sampled = bucket.step % self._every == 0 and self._only in (None, bucket.step)
        if not is_sampled or flat.is_sparse or not flat.is_floating_point() or not flat.numel():
            return None
        if bucket.step != self.step:
            self._finite = self._latest()
            self.step, self._sums = bucket.step, None
        numel = flat.numel()
        count = max(1, round(numel * self._fraction))
        if count == numel:
            places = torch.arange(numel, device="cpu")
        else:
            # A separate generator: the same places on every rank, without a change of the global random state.
            generator = torch.Generator().manual_seed(1_000_003 * bucket.step + bucket.index)
            places = torch.randint(numel, (count,), generator=generator, device="cpu")
        if flat.is_cuda:
            places = places.pin_memory().to(flat.device, non_blocking=True)
        values = flat[places].to(torch.promote_types(flat.dtype, torch.float32))
        return places, values, numel / count

    def compare(self, sample: Sample, flat: Tensor, bucket: Bucket, ranks: Group) -> Steps[None]:
        """Compare the sample with the reduced bucket. Collective: one all-reduce of the sample."""
        # The factor that scaled gradients before they were averaged.
        factor = None if bucket.accumulated is None else bucket.accumulated.factor
        places, values, weight = sample
        values = values if factor is None else values * factor
        mean = yield from ranks.quiet().all_reduce_mean_(values)
        difference = flat[places].to(mean.dtype) - mean
        sums = torch.stack([difference.double().square().sum(), mean.double().square().sum()]) * weight
        self._sums = sums if self._sums is None else self._sums + sums

    def _latest(self) -> Tensor | None:
        """Return the sums of the last step with finite gradients, and its number."""
        if self._sums is None:
            return self._finite
        own = torch.cat([self._sums, self._sums.new_full((1,), self.step)])
        before = torch.full_like(own, math.nan) if self._finite is None else self._finite
        return torch.where(own.isfinite().all(), own, before)

    def last_finite(self) -> tuple[int, float]:
        """Return the last sampled step with finite gradients, and its error, or -1 and NaN. Synchronizes."""
        # Not stored: on CUDA it belongs to a different stream than the hook's.
        latest = self._latest()
        if latest is None:
            return -1, math.nan
        difference, mean, step = latest.tolist()
        if math.isnan(step):
            return -1, math.nan
        return int(step), math.sqrt(difference / mean) if mean > 0 else (0.0 if difference == 0 else math.inf)

    @property
    def relative_error(self) -> float:
        """The error of the last sampled step with finite gradients; NaN before the first. Synchronizes."""
        return self.last_finite()[1]
