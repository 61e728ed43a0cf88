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

    A step ends with its backward. Outside of one (`join()`) an index that does not rise begins a new step, and
    the last one ends then. `is_last` alone would not do: `skip_all_reduce_unused_params=True` can skip the last
    bucket of every backward.

    Args:
        counters: where steps are counted too.
        end_step: called once for each step, after its last bucket was handed over. With `True` if DDP has not given
            the gradients to the parameters yet; with `False` for a step outside of a backward.

    Attributes:
        steps: synchronized backwards that began, since the beginning of training.
    """

    def __init__(self, counters: Counters, end_step: Callable[[bool], None] = lambda _: None) -> None:
        self._counters = counters
        self._end_step = end_step
        self._previous_index: int | None = None
        self._is_open = False
        self.steps = 0

    def step_of(self, index: int, is_last: bool) -> int:
        """Number of the step that a bucket belongs to, from 0 on; called once for each bucket."""
        if self._previous_index is None or index <= self._previous_index:
            self.end()
            self.steps += 1
            self._counters.steps += 1
            self._is_open = True
            call_at_end_of_backward(lambda: self.end(in_time=True))
        self._previous_index = None if is_last else index
        return self.steps - 1

    def end(self, *, in_time: bool = False) -> None:
        """End the present step, if there is one."""
        self._previous_index = None
        if self._is_open:
            self._is_open = False
            self._end_step(in_time)


class FiniteSteps:
    """Ends the steps of a hook with memory, on all ranks alike.

    Args:
        bound: the hook.
        engine: where it runs.
    """

    def __init__(self, bound: BoundHook, engine: Engine) -> None:
        self._bound = bound
        self._engine = engine
        self._finite: list[Tensor] = []
        self._reduced: list[Tensor] = []

    def add(self, reduced: Tensor, finite: Tensor | None) -> None:
        """Note the result of a bucket; called on the engine.

        Args:
            reduced: averaged gradients, which DDP has not given to the parameters yet.
            finite: whether they are, if that is known.
        """
        if self._bound.has_memory:
            self._finite.append(all_finite(reduced) if finite is None else finite)
            self._reduced.append(reduced)

    def end(self, in_time: bool) -> None:
        """Let the hook take over its new memory, or make all gradients of the step NaN.

        Args:
            in_time: whether the gradients are still there. Later the buckets may be in use for the next step.
        """
        self._engine.call(lambda: self._end(in_time))

    def _end(self, in_time: bool) -> None:
        if not self._finite:
            return
        finite, reduced = torch.stack(self._finite).all(), self._reduced
        self._finite, self._reduced = [], []
        self._bound.end_step(finite)
        self._bound.group.counters.nonfinite_steps += finite.logical_not() if finite.is_cuda else int(not finite)
        if in_time and (finite.is_cuda or not finite):
            penalty = torch.where(finite, 0.0, math.nan)
            for gradients in reduced:
                gradients.add_(penalty.to(gradients.dtype))
