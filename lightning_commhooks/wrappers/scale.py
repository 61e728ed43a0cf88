"""A wrapper that divides accumulated gradients by the number or the weights of their micro-batches."""

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

    If g_i is the gradient of micro-batch i's loss, and the framework divides the loss by d, gradients arrive as
    `sum(g_i) / d`. They are scaled before they are compressed. A window is the micro-batches since gradients were
    cleared, n of them on this rank. The result is the mean over ranks of

    * `"framework"`: `sum(g_i) / d`, as without this wrapper.
    * `"mean"`: `sum(g_i) / n`. A shorter last window of an epoch counts as much as a full one.
    * `"sum"`: `sum(g_i)`.
    * an integer k: `sum(g_i) / d / k`, as with the widely copied wrapper `scale_by_grad_accum_steps`
      (`bucket.div_(k)`), for code that does not divide the loss.
    * `"weighted"`: w `sum(g_i)` divided by the sum of the weights of all micro-batches on all w ranks, set by
      `Attachment.add_weight`: the mean over all tokens, if the loss is a sum over tokens and the weight their number.
      Sends two numbers with each bucket. In local steps, each rank divides by its own weights and sends nothing.

    Args:
        hook: the hook that averages the scaled gradients: a name, a configured `CommHook`, or a DDP hook function
            `(state, bucket)`.
        accumulation: the scaling, one of the above.

    Raises:
        ValueError: the hook is unknown, `accumulation` is invalid, another wrapper contains this one, or `"weighted"`
            is used with a `PerParameter` that averages both models and gradients. In the backward, as a `HookError` on
            all ranks: with `"weighted"`, `add_weight` was not called for a micro-batch on some rank.
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
        # A copied dataclass already holds a UserFunction.
        inner = hook if isinstance(hook, UserFunction) else get_hook(hook)  # type: ignore[arg-type]
        if isinstance(inner, ScaleByGradAccumulation):
            get_inner_hook(inner)  # raises
        object.__setattr__(self, "hook", inner)
        accumulation = self.accumulation
        is_count = isinstance(accumulation, int) and not isinstance(accumulation, bool) and accumulation >= 1
        if not is_count and accumulation not in _MODES:
            raise ValueError(
                f"accumulation must be one of {', '.join(map(repr, _MODES))} or an integer of at least 1, got "
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
                "accumulation='weighted' does not work with a PerParameter that averages both models and gradients: "
                "ranks would divide by their own weights and by all ranks' weights. Use accumulation='mean'"
            )
        return _BoundScale(self.accumulation, inner)


def without_scale(hook: CommHook) -> CommHook:
    """Return the hook that users and checkpoints see: without [`ScaleByGradAccumulation`][] around it."""
    return hook.inner_hooks[0] if isinstance(hook, ScaleByGradAccumulation) else hook


def accumulation_of(hook: CommHook) -> Accumulation:
    """Return the divisor of accumulated gradients."""
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
        return (yield from self.inner.reduce_sparse(grad, bucket, ranks))

    def _factor(self, bucket: Bucket, ranks: Group) -> Steps[Number]:
        """Return the factor of the gradients, the same for all buckets of a step."""
        accumulated = bucket.accumulated
        if accumulated is None:
            return 1.0
        # Each bucket sends its own request: whether another bucket has sent one already may differ between ranks.
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
                    "accumulation='mean': several forwards of the model came before several backwards, which cannot "
                    "be counted, since the model's outputs contain no tensor. Return tensors in tuples, lists, dicts "
                    "or dataclasses, or call backward after each forward"
                )
            return divided_by / accumulated.num_micro_batches
        total = yield from self._total_weight(accumulated, bucket, ranks)
        num_ranks = 1 if self.inner.is_local(bucket.step) else self.group.size
        if isinstance(total, Tensor):
            # A 0-dimensional tensor would multiply 16-bit gradients in 16 bits.
            return torch.where(total == 0, 1.0, num_ranks * divided_by / total).to(torch.float32).view(1)
        # Without tokens, gradients are zero as well.
        return num_ranks * divided_by / total if total > 0 else 1.0

    def _warn_if_divided_twice(self, count: int, divided_by: float) -> None:
        if divided_by == 1 or self._warned or self.group.global_rank != 0:
            return
        self._warned = True
        warnings.warn(
            f"accumulation={count} divides gradients by {count}, but the framework has divided the loss by "
            f"{divided_by:g} already. Use accumulation='mean' to divide once, by the number of micro-batches",
            stacklevel=2,
        )

    def _total_weight(self, accumulated: Accumulated, bucket: Bucket, ranks: Group) -> Steps[Number]:
        # Created on the device: copying a number to it would synchronize.
        total = torch.zeros(2, dtype=torch.float64, device=self.group.device)
        total[0] += accumulated.weight
        total[1] += accumulated.num_weightless
        if not self.inner.is_local(bucket.step):
            yield from ranks.not_gradients().all_reduce_(total)
        if accumulated.num_weightless or (total.is_cpu and total[1] > 0):
            count = accumulated.num_weightless or total[1]
            where = "" if accumulated.num_weightless else " on other ranks"
            raise ValueError(
                f"accumulation='weighted': {count:g} micro-batches of this step{where} have no weight. Call "
                "add_weight(num_tokens) before each backward on every rank"
            )
        # On a device, without synchronizing: gradients become NaN if a weight is missing on another rank.
        return total[0].item() if total.is_cpu else torch.where(total[1] == 0, total[:1], math.nan)
