"""Top-k sparsification with error feedback: Lin et al. 2017, https://arxiv.org/abs/1712.01887."""

from dataclasses import dataclass

import torch

import lightning_commhooks as lc


@dataclass(frozen=True, kw_only=True)
class TopK(lc.CommHook):
    """Send the largest elements of each gradient, keep the rest.

    Args:
        ratio: fraction of the elements that is sent, above 0 and up to 1.
    """

    name = "topk"
    ratio: float = 0.01

    def __post_init__(self):
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio must be above 0 and up to 1, got {self.ratio}")

    def bind(self, group):
        return BoundTopK(group, self)


class BoundTopK(lc.ErrorFeedback):
    """Top-k at work on one model."""

    def average(self, residual, bucket, ranks):
        picked = torch.cat([slot.offset + self._largest(slot.view(residual).flatten()) for slot in bucket.slots]).int()
        mean = torch.zeros_like(residual)
        indices, values = (yield from ranks.all_gather(picked)), (yield from ranks.all_gather(residual[picked]))
        for places, own in zip(indices, values, strict=True):
            mean[places] += own / ranks.size
        return mean, torch.zeros_like(residual).index_put((picked,), residual[picked])

    def _largest(self, gradient):
        return gradient.abs().topk(min(gradient.numel(), max(1, int(self.hook.ratio * gradient.numel())))).indices
