"""Where a step begins and ends, and whether it was finite."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_commhooks.core.committed import Committed
from lightning_commhooks.core.engine import call_at_end_of_backward
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
            self._counters.timing.begin_step(self.steps - 1)
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
    """Ends the steps of a hook with memory, and those that ranks take alone under a scaler, on all ranks alike.

    Args:
        bound: the hook.
        call: runs a function where the hook runs.
        committed: what the hook has taken over.
        grad_scaler: which skips steps, if any does.
    """

    def __init__(
        self,
        bound: BoundHook,
        call: Callable[[Callable[[], None]], None],
        committed: Committed,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self._call = call
        self._grad_scaler = grad_scaler
        self.take_over(bound, committed)
        self._is_local = False
        self._finite: list[Tensor] = []
        self._reduced: list[Tensor] = []

    def take_over(self, bound: BoundHook, committed: Committed) -> None:
        """Go on with another hook, once a state was loaded."""
        self.bound, self._committed = bound, committed

    def forget(self) -> None:
        """Let go of the buckets of the present step."""
        self._finite, self._reduced = [], []

    def add(self, reduced: Tensor, finite: Tensor | None, step: int, is_late: bool) -> None:
        """Note the result of a bucket; called on the engine.

        Args:
            reduced: averaged gradients, which DDP has not given to the parameters yet.
            finite: whether they are, if that is known.
            step: number of the step.
            is_late: whether it will be too late to change `reduced` when the step ends.
        """
        self._is_local = self.bound.is_local(step) and (self.bound.has_memory or self._may_skip())
        if self.bound.has_memory or self._is_local:
            finite = all_finite(reduced) if finite is None else finite
            if self._is_local and is_late:
                finite = self._agreed(finite)
                _spoil_unless(finite, reduced)
            self._finite.append(finite)
            self._reduced.append(reduced)

    def _may_skip(self) -> bool:
        return self._grad_scaler is not None and self._grad_scaler.is_enabled()

    def _agreed(self, finite: Tensor) -> Tensor:
        """Whether gradients are finite on all ranks; one scalar all-reduce."""
        num_bad = finite.logical_not().to(torch.float32).view(1)
        return self.bound.group.all_reduce_(num_bad).eq(0).view(())

    def end(self, in_time: bool, complete: bool) -> None:
        """Let the hook take over its new memory, or make all gradients of the step NaN.

        Args:
            in_time: whether the gradients are still there. Later the buckets may be in use for the next step.
            complete: whether there was a bucket for each gradient. What a broken-off backward sent went nowhere.
        """
        self._call(lambda: self._end(in_time, complete))

    def _end(self, in_time: bool, complete: bool) -> None:
        if self._finite:
            with self.bound.group.counters.timing.work():
                self._settle(in_time, complete)
        self._committed.keep()

    def _settle(self, in_time: bool, complete: bool) -> None:
        finite, reduced = torch.stack(self._finite).all(), self._reduced
        if not complete:
            finite = torch.zeros_like(finite)
        if self._is_local:
            finite = self._agreed(finite)
        self.forget()
        with self._committed.taking_over():
            self.bound.end_step(finite)
        self.bound.group.counters.nonfinite_steps += finite.logical_not() if finite.is_cuda else int(not finite)
        if in_time:
            for gradients in reduced:
                _spoil_unless(finite, gradients)


def _spoil_unless(finite: Tensor, gradients: Tensor) -> None:
    """Make gradients NaN; does not wait for a CUDA device to know whether to."""
    if finite.is_cuda or not finite:
        gradients.add_(torch.where(finite, 0.0, math.nan).to(gradients.dtype))
