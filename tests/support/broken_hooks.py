"""Top-k with error feedback, and what can be wrong with a hook: one hook for each rule of the testing kit."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.distributed as dist

import lightning_commhooks as lc

frozen = dataclass(frozen=True, kw_only=True)


@frozen
class TopK(lc.CommHook):
    """Send the largest elements of each gradient, keep the rest."""

    name: ClassVar[str] = "topk"

    ratio: float = 0.1

    def bind(self, group):
        return BoundTopK(self, group)


class BoundTopK(lc.ErrorFeedback):
    def __init__(self, config, group):
        super().__init__(group)
        self._ratio = config.ratio

    def average(self, owed, bucket, ranks):
        picked = torch.cat([slot.offset + self._largest(slot.view(owed).reshape(-1)) for slot in bucket.slots])
        indices = yield from ranks.all_gather(picked)
        values = yield from ranks.all_gather(owed[picked])
        mean = torch.zeros_like(owed).index_add_(0, indices.view(-1), values.view(-1) / self.group.size)
        return mean, torch.zeros_like(owed).index_copy_(0, picked, owed[picked])

    def _largest(self, gradient):
        k = int(self._ratio * gradient.numel()) + 1
        return gradient.abs().topk(min(k, gradient.numel()), sorted=False).indices


@frozen
class Broken(TopK):
    """Top-k with a bound hook of another class."""

    name: ClassVar[str] = "broken"
    bound: ClassVar[type] = BoundTopK

    def bind(self, group):
        return self.bound(self, group)


class _FirstBound(BoundTopK):
    def _largest(self, gradient):
        return torch.arange((gradient.numel() + 1) // 2)


@frozen
class First(Broken):
    """Nothing is wrong with it: it sends the first half of each gradient, so inf in the other half is not sent."""

    bound: ClassVar[type] = _FirstBound


class _SumBound(BoundTopK):
    def average(self, owed, bucket, ranks):
        mean, sent = yield from super().average(owed, bucket, ranks)
        return mean * self.group.size, sent


@frozen
class NotDivided(Broken):
    bound: ClassVar[type] = _SumBound


class _SkippingBound(BoundTopK):
    def average(self, owed, bucket, ranks):
        if bucket.step == 1 and ranks.rank == 1:
            return torch.zeros_like(owed), torch.zeros_like(owed)
        return (yield from super().average(owed, bucket, ranks))


@frozen
class Skipping(Broken):
    bound: ClassVar[type] = _SkippingBound


class _HastyBound(BoundTopK):
    def end_step(self, finite):
        super().end_step(torch.tensor(True))


@frozen
class Hasty(Broken):
    """Its memory changes in bad steps, too."""

    bound: ClassVar[type] = _HastyBound


class _ForgetfulBound(BoundTopK):
    def state_dict(self, writer):
        return {"entries": {}}


@frozen
class Forgetful(Broken):
    bound: ClassVar[type] = _ForgetfulBound


class _SecretBound(BoundTopK):
    def average(self, owed, bucket, ranks):
        dist.all_reduce(owed.clone(), group=self.group.process_group)
        return super().average(owed, bucket, ranks)


@frozen
class Secret(Broken):
    """Sends what it does not count."""

    bound: ClassVar[type] = _SecretBound


class _ScaledBound(BoundTopK):
    def reduce(self, bucket, ranks):
        return super().reduce(replace(bucket, loss_scale=1.0), ranks)


@frozen
class Scaled(Broken):
    """Ignores the loss scale."""

    bound: ClassVar[type] = _ScaledBound


class _SpendingBound(BoundTopK):
    def reduce(self, bucket, ranks):
        return super().reduce(replace(bucket, unused=None), ranks)


@frozen
class Spending(Broken):
    """Spends its memory of parameters that nobody uses."""

    bound: ClassVar[type] = _SpendingBound


class _RandomBound(BoundTopK):
    def average(self, owed, bucket, ranks):
        torch.rand(1)
        return super().average(owed, bucket, ranks)


@frozen
class Random(Broken):
    """Draws from the global generator."""

    bound: ClassVar[type] = _RandomBound


class _LossyBound(BoundTopK):
    def average(self, owed, bucket, ranks):
        mean, _ = yield from super().average(owed, bucket, ranks)
        return mean, owed.clone()


@frozen
class Lossy(Broken):
    """Owes nothing."""

    bound: ClassVar[type] = _LossyBound


@frozen
class Sum(lc.CommHook):
    """Does not divide, and has no memory that would show it."""

    name: ClassVar[str] = "sum"

    def bind(self, group):
        return _BoundSum(group)


class _BoundSum(lc.BoundHook):
    def reduce(self, bucket, ranks):
        yield from ranks.all_reduce_(bucket.flat)


class _WholeBound(lc.ErrorFeedback):
    def average(self, owed, bucket, ranks):
        return (owed, owed) if ranks.size == 1 else ((yield from ranks.all_reduce_mean_(owed.clone())), owed)


@frozen
class Whole(Broken):
    """Nothing is wrong with it: it sends everything, and returns `owed` itself where nothing is to be sent."""

    name: ClassVar[str] = "whole"

    def bind(self, group):
        return _WholeBound(group)
