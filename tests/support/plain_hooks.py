"""Hooks as somebody writes them who has read the page on it: they keep no books."""

from dataclasses import dataclass
from typing import ClassVar

import torch

import lightning_commhooks as lc


@dataclass(frozen=True, kw_only=True)
class Plain(lc.CommHook):
    """A hook of one class."""

    name: ClassVar[str] = "plain"
    bound: ClassVar[type]

    def bind(self, group):
        return self.bound(group)


def hook_of(bound, name, base=Plain):
    """The hook of a bound hook, with the name that it has in the module, by which a configuration is pickled."""
    names = {"name": name.lower(), "bound": bound, "__module__": bound.__module__, "__annotations__": {}}
    return dataclass(frozen=True, kw_only=True)(type(name, (base,), names))


class InPlace(lc.BoundHook):
    def reduce(self, bucket, ranks):
        yield from ranks.all_reduce_(bucket.flat.div_(ranks.size))


class OfACopy(lc.BoundHook):
    def reduce(self, bucket, ranks):
        bucket.flat.copy_((yield from ranks.all_reduce_mean_(bucket.flat.clone())))


class InPieces(lc.BoundHook):
    def reduce(self, bucket, ranks):
        later = [ranks.all_reduce_mean_(slot.view(bucket.flat)) for slot in bucket.slots]
        for steps in later:
            yield from steps


class Gathered(lc.BoundHook):
    def reduce(self, bucket, ranks):
        bucket.flat.copy_((yield from ranks.all_gather(bucket.flat)).mean(0))


class InBFloat16(lc.BoundHook):
    def reduce(self, bucket, ranks):
        bucket.flat.copy_((yield from ranks.all_reduce_mean_(bucket.flat.bfloat16())))


class InFloat16(lc.BoundHook):
    def reduce(self, bucket, ranks):
        bucket.flat.copy_((yield from ranks.all_reduce_((bucket.flat / ranks.size).half())))


class Signs(lc.BoundHook):
    """Signs in 8 bit, and one scale in float32."""

    def reduce(self, bucket, ranks):
        scales = yield from ranks.all_gather(bucket.flat.float().abs().mean().view(1))
        signs = yield from ranks.all_gather(bucket.flat.sign().to(torch.int8))
        bucket.flat.copy_((signs * scales).mean(0))


class MatricesInBFloat16(lc.BoundHook):
    def reduce(self, bucket, ranks):
        for slot in bucket.slots:
            own = slot.view(bucket.flat)
            sent = own.bfloat16() if len(slot.shape) > 1 else own
            own.copy_((yield from ranks.all_reduce_mean_(sent)))


class LargestTenth(lc.ErrorFeedback):
    def average(self, residual, bucket, ranks):
        picked = residual.abs().topk(-(-residual.numel() // 10)).indices
        places, values = (yield from ranks.all_gather(picked)), (yield from ranks.all_gather(residual[picked]))
        mean = torch.zeros_like(residual)
        for own, theirs in zip(places, values, strict=True):
            mean[own] += theirs / ranks.size
        return mean, torch.zeros_like(residual).index_put((picked,), residual[picked])


class Nothing(lc.BoundHook):
    def reduce(self, bucket, ranks):
        return
        yield


class Alone(lc.AveragesModels):
    def is_local(self, step):
        return True

    def reduce(self, bucket, ranks):
        return
        yield

    def after_optimizer_step(self, stepped):
        stepped.models.average_(stepped.parameters)


class DividedTwice(lc.BoundHook):
    def reduce(self, bucket, ranks):
        yield from ranks.all_reduce_mean_(bucket.flat.div_(ranks.size))


class NotWritten(lc.BoundHook):
    def reduce(self, bucket, ranks):
        yield from ranks.all_reduce_mean_(bucket.flat.clone())


class NoGenerator(lc.BoundHook):
    def reduce(self, bucket, ranks):
        ranks.all_reduce_mean_(bucket.flat)


class YieldsGenerator(lc.BoundHook):
    def reduce(self, bucket, ranks):
        yield ranks.all_reduce_mean_(bucket.flat)


class NoPair(lc.ErrorFeedback):
    def average(self, residual, bucket, ranks):
        return (yield from ranks.all_reduce_mean_(residual.clone()))


class AverageNoGenerator(lc.ErrorFeedback):
    def average(self, residual, bucket, ranks):
        return residual, residual


for _bound in [own for own in vars().copy().values() if isinstance(own, type) and issubclass(own, lc.BoundHook)]:
    globals()[f"{_bound.__name__}Hook"] = hook_of(_bound, f"{_bound.__name__}Hook")
