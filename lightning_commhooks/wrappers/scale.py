"""Divide gradients by the micro-batches that they are the sum of, or by the weights of these."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.steps import Steps
from lightning_commhooks.interface.accumulation import Accumulated, Number, is_one
from lightning_commhooks.interface.averages_models import is_local
from lightning_commhooks.interface.bucket import Bucket
from lightning_commhooks.interface.hook import BoundHook, CommHook
from lightning_commhooks.interface.registry import get_hook, get_inner_hook
from lightning_commhooks.interface.user_function import UserFunction, check_user_hook
from lightning_commhooks.interface.wrapper import BoundAround, BoundWrapper
from lightning_commhooks.wrappers.hook_name import HookName

Accumulation = Literal["framework", "mean", "sum", "weighted"] | int

_MODES = ("framework", "mean", "sum", "weighted")


@dataclass(frozen=True)
class ScaleByGradAccumulation(CommHook):
    """Scale gradients that are accumulated over micro-batches, whatever the framework divides the loss by.

    With g_i the gradient of the loss of micro-batch i, which the framework divides by d, gradients arrive as
    `sum(g_i) / d`. They are scaled before they are compressed. A window is the micro-batches since gradients were
    cleared, n of them on this rank. What is communicated is the mean over ranks of

    * `"framework"`: `sum(g_i) / d`, as without this.
    * `"mean"`: `sum(g_i) / n`. A last window of an epoch that is shorter counts as much as others.
    * `"sum"`: `sum(g_i)`.
    * an integer k: `sum(g_i) / d / k`. The `scale_by_grad_accum_steps` wrapper that is often copied: `bucket.div_(k)`,
      for code that divides the loss by nothing.
    * `"weighted"`: w `sum(g_i)` over the sum of the weights of all micro-batches of all w ranks, which
      `Attachment.add_weight` is told; so the mean over all tokens, if the loss is a sum over tokens and the weight
      their number. Sends two numbers with each bucket. While ranks step alone, each uses its own sum and sends none.

    Args:
        hook: the hook that averages the scaled gradients: a name, a configured `CommHook`, or a DDP hook function
            `(state, bucket)`.
        accumulation: see above.

    Raises:
        ValueError: unknown hook; `accumulation` is none of these; this is put inside of another wrapper; `"weighted"`
            with a `PerParameter` that averages models and gradients. In the backward, as a `HookError` on all ranks:
            `"weighted"`, and `add_weight` was not called for a micro-batch of some rank.
    """

    name: ClassVar[str] = "scale_by_grad_accumulation"
    is_outermost: ClassVar[bool] = True

    hook: CommHook | HookName | Callable[..., Any]
    accumulation: Accumulation = "mean"

    def __post_init__(self) -> None:
        hook = self.hook
        if callable(hook) and not isinstance(hook, (CommHook, type)):
            check_user_hook(hook)
            hook = UserFunction(hook)
        # A function in here already, when a dataclass is copied.
        inner = hook if isinstance(hook, UserFunction) else get_hook(hook)  # type: ignore[arg-type]
        if isinstance(inner, ScaleByGradAccumulation):
            get_inner_hook(inner)  # refuses
        object.__setattr__(self, "hook", inner)
        accumulation = self.accumulation
        is_count = isinstance(accumulation, int) and not isinstance(accumulation, bool) and accumulation >= 1
        if not is_count and accumulation not in _MODES:
            raise ValueError(
                f"accumulation must be one of {', '.join(map(repr, _MODES))} or an integer of at least 1, is "
                f"{accumulation!r}"
            )

    @property
    def inner_hooks(self) -> tuple[CommHook, ...]:
        assert isinstance(self.hook, CommHook)
        return (self.hook,)

    def bind(self, group: Group) -> BoundHook:
        inner = self.inner_hooks[0].bind(group)
        if self.accumulation == "weighted" and isinstance(inner, BoundWrapper) and inner.mixes_averages:
            raise ValueError(
                "accumulation='weighted' does not work with a PerParameter of which some hooks average models and "
                "others gradients: ranks would divide by their own weights and by those of all. Use accumulation='mean'"
            )
        return _BoundScale(self.accumulation, inner)


def without_scale(hook: CommHook) -> CommHook:
    """The hook that users and checkpoints know a hook by: without [`ScaleByGradAccumulation`][] around it."""
    return hook.inner_hooks[0] if isinstance(hook, ScaleByGradAccumulation) else hook


def accumulation_of(hook: CommHook) -> Accumulation:
    """Divisor of accumulated gradients."""
    return hook.accumulation if isinstance(hook, ScaleByGradAccumulation) else "framework"


class _BoundScale(BoundAround):
    def __init__(self, accumulation: Accumulation, inner: BoundHook) -> None:
        super().__init__(inner)
        self.scales_gradients = False
        self._accumulation = accumulation
        self._warned = False

    def reduce(self, bucket: Bucket, ranks: Group) -> Steps[Tensor | None]:
        return (yield from self._reduce_scaled(bucket, (yield from self._factor(bucket, ranks)), ranks))

    def reduce_sparse(self, grad: Tensor, bucket: Bucket, ranks: Group) -> Steps[Tensor]:
        factor = yield from self._factor(bucket, ranks)
        if not is_one(factor):
            grad = grad.clone()
            grad._values().mul_(factor)
        return (yield from self._inner.reduce_sparse(grad, bucket, ranks))

    def _factor(self, bucket: Bucket, ranks: Group) -> Steps[Number]:
        """Factor of gradients, the same for all buckets of a step."""
        accumulated = bucket.accumulated
        if accumulated is None:
            return 1.0
        # Each bucket asks for itself: whether another one has asked by now may differ between ranks.
        accumulated.factor = yield from self._factor_of(accumulated, bucket, ranks)
        return accumulated.factor

    def _factor_of(self, accumulated: Accumulated, bucket: Bucket, ranks: Group) -> Steps[Number]:
        divided_by = accumulated.divided_by
        if isinstance(self._accumulation, int):
            self._warn_if_divided_twice(self._accumulation, divided_by)
            return 1 / self._accumulation
        if self._accumulation == "sum":
            return divided_by
        if self._accumulation == "mean":
            if accumulated.num_micro_batches is None:
                raise ValueError(
                    "accumulation='mean': several forwards of the model came before several backwards, and these "
                    "cannot be counted, since no tensor was found in the outputs of the model. Return tensors in "
                    "tuples, lists, dicts or dataclasses; or call backward after each forward"
                )
            return divided_by / accumulated.num_micro_batches
        total = yield from self._total_weight(accumulated, bucket, ranks)
        num_ranks = 1 if is_local(self._inner, bucket.step) else self.group.size
        if isinstance(total, Tensor):
            # By a tensor of no dimension 16-bit gradients would be multiplied in 16 bit.
            return torch.where(total == 0, 1.0, num_ranks * divided_by / total).to(torch.float32).view(1)
        # Without tokens there are no gradients either.
        return num_ranks * divided_by / total if total > 0 else 1.0

    def _warn_if_divided_twice(self, count: int, divided_by: float) -> None:
        if divided_by == 1 or self._warned or self.group.global_rank != 0:
            return
        self._warned = True
        warnings.warn(
            f"accumulation={count} divides gradients by {count}, though the framework has divided the loss by "
            f"{divided_by:g} already. accumulation='mean' divides by the micro-batches that ran, once",
            stacklevel=2,
        )

    def _total_weight(self, accumulated: Accumulated, bucket: Bucket, ranks: Group) -> Steps[Number]:
        # Made on the device: copying a number there would wait for it.
        total = torch.zeros(2, dtype=torch.float64, device=self.group.device)
        total[0] += accumulated.weight
        total[1] += accumulated.num_weightless
        if not is_local(self._inner, bucket.step):
            yield from ranks.not_gradients().all_reduce_(total)
        if accumulated.num_weightless or (total.is_cpu and total[1] > 0):
            count = accumulated.num_weightless or f"on another rank {total[1]:g}"
            raise ValueError(
                f"accumulation='weighted': {count} micro-batches of this step have no weight. Call "
                "add_weight(num_tokens) between the forward and the backward of each"
            )
        # A device is not waited for: without a weight on another rank gradients become NaN.
        return total[0].item() if total.is_cpu else torch.where(total[1] == 0, total[:1], math.nan)
