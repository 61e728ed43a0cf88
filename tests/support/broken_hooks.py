"""Top-k with error feedback, and what can be wrong with a hook: one hook for each rule of the testing kit."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.distributed as dist
from plain_hooks import hook_of

import lightning_commhooks as lc


class TopKBound(lc.ErrorFeedback):
    """Send the largest elements of each gradient, keep the rest."""

    def __init__(self, config, group):
        super().__init__(group)
        self._ratio = getattr(config, "ratio", 0.1)

    def average(self, owed, bucket, ranks):
        picked = torch.cat([slot.offset + self._largest(slot.view(owed).reshape(-1)) for slot in bucket.slots])
        indices = yield from ranks.all_gather(picked)
        values = yield from ranks.all_gather(owed[picked])
        mean = torch.zeros_like(owed).index_add_(0, indices.view(-1), values.view(-1) / self.group.size)
        return mean, torch.zeros_like(owed).index_copy_(0, picked, owed[picked])

    def _largest(self, gradient):
        k = int(self._ratio * gradient.numel()) + 1
        return gradient.abs().topk(min(k, gradient.numel()), sorted=False).indices


@dataclass(frozen=True, kw_only=True)
class TopK(lc.CommHook):
    name: ClassVar[str] = "topk"
    bound: ClassVar[type] = TopKBound

    ratio: float = 0.1

    def bind(self, group):
        return self.bound(self, group)


class FirstBound(TopKBound):
    """Nothing is wrong with it: it sends the first half of each gradient, so inf in the other half is not sent."""

    def _largest(self, gradient):
        return torch.arange((gradient.numel() + 1) // 2)


class NotDividedBound(TopKBound):
    def average(self, owed, bucket, ranks):
        mean, sent = yield from super().average(owed, bucket, ranks)
        return mean * self.group.size, sent


class SkippingBound(TopKBound):
    def average(self, owed, bucket, ranks):
        if bucket.step == 1 and ranks.rank == 1:
            return torch.zeros_like(owed), torch.zeros_like(owed)
        return (yield from super().average(owed, bucket, ranks))


class HastyBound(TopKBound):
    """Its memory changes in bad steps, too."""

    def end_step(self, finite):
        super().end_step(torch.tensor(True))


class ForgetfulBound(TopKBound):
    def state_dict(self, writer):
        return {"entries": {}}


class SecretBound(TopKBound):
    """Sends what it does not count."""

    def average(self, owed, bucket, ranks):
        dist.all_reduce(owed.clone(), group=self.group.process_group)
        return super().average(owed, bucket, ranks)


class ScaledBound(TopKBound):
    """Ignores the loss scale."""

    def reduce(self, bucket, ranks):
        return super().reduce(replace(bucket, loss_scale=1.0), ranks)


class SpendingBound(TopKBound):
    """Spends its memory of parameters that nobody uses."""

    def reduce(self, bucket, ranks):
        return super().reduce(replace(bucket, unused=None), ranks)


class RandomBound(TopKBound):
    """Draws from the global generator."""

    def average(self, owed, bucket, ranks):
        torch.rand(1)
        return super().average(owed, bucket, ranks)


class LossyBound(TopKBound):
    """Keeps no residual."""

    def average(self, owed, bucket, ranks):
        mean, _ = yield from super().average(owed, bucket, ranks)
        return mean, owed.clone()


class WholeBound(TopKBound):
    """Nothing is wrong with it: it sends everything, and returns `owed` itself where nothing is to be sent."""

    def average(self, owed, bucket, ranks):
        return (owed, owed) if ranks.size == 1 else ((yield from ranks.all_reduce_mean_(owed.clone())), owed)


for _bound in TopKBound.__subclasses__():
    globals()[_bound.__name__.removesuffix("Bound")] = hook_of(_bound, _bound.__name__.removesuffix("Bound"), TopK)


class _BoundSum(lc.BoundHook):
    """Does not divide, and has no memory that would show it."""

    def reduce(self, bucket, ranks):
        yield from ranks.all_reduce_(bucket.flat)


Sum = hook_of(_BoundSum, "Sum")


class ReturnedBound(TopKBound):
    """Returns the average, as a hook of PyTorch's does."""

    def reduce(self, bucket, ranks):
        total = yield from ranks.all_reduce_(bucket.flat.clone())
        return total / ranks.size


class UnwaitedBound(TopKBound):
    """Does not wait for its collective."""

    def reduce(self, bucket, ranks):
        ranks.all_reduce_mean_(bucket.flat)
        return
        yield


class ChangesBound(lc.BoundHook):
    """Sends what has changed since the last step (EF21, https://arxiv.org/abs/2106.05203) in bfloat16.

    Nothing is wrong with it: it has a memory, and no residual.
    """

    has_memory = True
    own_kinds = frozenset({"own"})

    def __init__(self, config, group):
        super().__init__(group)
        self._staged = {}

    def reduce(self, bucket, ranks):
        dtype = torch.promote_types(bucket.flat.dtype, torch.float32)
        own, mean = (self._flat(kind, bucket, dtype) for kind in ("own", "mean"))
        change = (bucket.flat.to(dtype) / bucket.loss_scale - own).bfloat16()
        own += change
        mean += (yield from ranks.all_gather(change)).to(dtype).mean(0)
        self._staged |= {slot.name: {"own": slot.view(own), "mean": slot.view(mean)} for slot in bucket.slots}
        bucket.flat.copy_(mean * bucket.loss_scale)

    def _flat(self, kind, bucket, dtype):
        parts = [self.memory.get(slot.name, {}).get(kind, bucket.flat.new_zeros(slot.shape)) for slot in bucket.slots]
        return torch.cat([part.reshape(-1) for part in parts]).to(dtype)

    def end_step(self, finite):
        if finite:
            self.memory.update(self._staged)
        self._staged = {}

    def kept(self, shapes):
        return {"own": shapes[0], "mean": shapes[0]}


class UniformBound(ChangesBound):
    """Claims that ranks have the same memory."""

    own_kinds = frozenset()


class UnnamedBound(ChangesBound):
    """Names one kind of its memory only."""

    def kept(self, shapes):
        return {"own": shapes[0]}


class ShortBound(TopKBound):
    """Returns a part in another shape."""

    def average(self, owed, bucket, ranks):
        mean, sent = yield from super().average(owed, bucket, ranks)
        return mean, sent[:1]


class IdleBound(TopKBound):
    """Sends nothing where this rank has used no parameter of a bucket."""

    def average(self, owed, bucket, ranks):
        if bucket.unused is not None and bucket.unused >= set(bucket.names):
            return torch.zeros_like(owed), torch.zeros_like(owed)
        return (yield from super().average(owed, bucket, ranks))


class RaisingBound(TopKBound):
    """Fails on one rank."""

    def average(self, owed, bucket, ranks):
        if ranks.rank == 1:
            raise ArithmeticError("no convergence")
        return (yield from super().average(owed, bucket, ranks))


Changes, Uniform, Unnamed = (
    hook_of(bound, bound.__name__.removesuffix("Bound"), TopK) for bound in (ChangesBound, UniformBound, UnnamedBound)
)
Short, Idle, Raising = (
    hook_of(bound, bound.__name__.removesuffix("Bound"), TopK) for bound in (ShortBound, IdleBound, RaisingBound)
)
Returned, Unwaited = hook_of(ReturnedBound, "Returned", TopK), hook_of(UnwaitedBound, "Unwaited", TopK)
