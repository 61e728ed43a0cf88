"""Where a step begins and ends, and whether it was finite."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_commhooks.core.engine import Engine, call_at_end_of_backward
from lightning_commhooks.core.hook import BoundHook
from lightning_commhooks.core.memory import all_finite
from lightning_commhooks.core.metrics import Counters


class StepClock:
    """Counts synchronized backwards from the order in which DDP hands over its buckets.

    A step ends with its backward: with the last bucket, where DDP itself finishes. (Not with the first, which
    reentrant activation checkpointing hands over in a backward inside the backward.) When DDP may skip the last bucket,
    as it does with `skip_all_reduce_unused_params=True`, the step ends with the backward in which it began. Outside of
    a backward (`join()`) an index that does not rise begins a new step, and the last one ends then.

    Args:
        counters: where steps are counted too.
        end_step: called once for each step, `end_step(in_time, complete)`: whether DDP has not given the gradients to
            the parameters yet, which it has for a step outside of a backward; and whether all buckets were handed
            over, which they were not if the backward broke off.

    Attributes:
        steps: synchronized backwards that began, since the beginning of training.
    """

    def __init__(self, counters: Counters, end_step: Callable[[bool, bool], None] = lambda *_: None) -> None:
        self._counters = counters
        self._end_step = end_step
        self._previous_index: int | None = None
        self._is_open = False
        self._is_complete = False
        self.steps = 0

    def step_of(self, index: int, is_last: bool, last_may_be_skipped: bool) -> int:
        """Number of the step that a bucket belongs to, from 0 on; called once for each bucket."""
        begins = self._previous_index is None or index <= self._previous_index
        if begins:
            self.end()
            self.steps += 1
            self._counters.steps += 1
            self._is_open = True
        self._is_complete = is_last or last_may_be_skipped
        if begins if last_may_be_skipped else is_last:
            call_at_end_of_backward(lambda: self.end(in_time=True))
        self._previous_index = None if is_last else index
        return self.steps - 1

    def end(self, *, in_time: bool = False) -> None:
        """End the present step, if there is one."""
        self._previous_index = None
        if self._is_open:
            self._is_open = False
            self._end_step(in_time, self._is_complete)


class FiniteSteps:
    """Ends the steps of a hook with memory, on all ranks alike.

    Args:
        bound: the hook.
        engine: where it runs.

    Attributes:
        bound: the hook; another one once a state was loaded.
    """

    def __init__(self, bound: BoundHook, engine: Engine) -> None:
        self.bound = bound
        self._engine = engine
        self._finite: list[Tensor] = []
        self._reduced: list[Tensor] = []

    def forget(self) -> None:
        """Let go of the buckets of the present step."""
        self._finite, self._reduced = [], []

    def add(self, reduced: Tensor, finite: Tensor | None) -> None:
        """Note the result of a bucket; called on the engine.

        Args:
            reduced: averaged gradients, which DDP has not given to the parameters yet.
            finite: whether they are, if that is known.
        """
        if self.bound.has_memory:
            self._finite.append(all_finite(reduced) if finite is None else finite)
            self._reduced.append(reduced)

    def end(self, in_time: bool, complete: bool) -> None:
        """Let the hook take over its new memory, or make all gradients of the step NaN.

        Args:
            in_time: whether the gradients are still there. Later the buckets may be in use for the next step.
            complete: whether there was a bucket for each gradient. What a broken-off backward sent went nowhere.
        """
        self._engine.call(lambda: self._end(in_time, complete))

    def _end(self, in_time: bool, complete: bool) -> None:
        if not self._finite:
            return
        finite, reduced = torch.stack(self._finite).all(), self._reduced
        if not complete:
            finite = torch.zeros_like(finite)
        self.forget()
        self.bound.end_step(finite)
        self.bound.group.counters.nonfinite_steps += finite.logical_not() if finite.is_cuda else int(not finite)
        if in_time and (finite.is_cuda or not finite):
            penalty = torch.where(finite, 0.0, math.nan)
            for gradients in reduced:
                gradients.add_(penalty.to(gradients.dtype))
