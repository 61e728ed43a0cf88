"""Where a step begins and ends."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lightning_commhooks.collectives.counters import Counters
from lightning_commhooks.runtime.engine import call_at_end_of_backward, call_if_backward_breaks_off

_NOT_BEGUN = -2


def current_backward() -> int:
    """The number that autograd gave the backward of this thread; -1 outside of one."""
    return torch._C._current_graph_task_id()


class StepClock:
    """Counts synchronized backwards from the order in which DDP hands over its buckets.

    A step ends with its backward: with the last bucket, where DDP itself finishes. (Not with the first, which
    reentrant activation checkpointing hands over in a backward inside the backward.) When DDP may skip the last bucket,
    as it does with `skip_all_reduce_unused_params=True`, the step ends with the backward in which it began. Outside of
    a backward (`join()`) an index that does not rise begins a new step, and the last one ends then.

    Args:
        counters: count the steps since `attach`.
        end_step: called once for each step, `end_step(in_time)`: whether DDP has not given the gradients to the
            parameters yet, which it has for a step outside of a backward.
        break_off: called for a step of which not all buckets are handed over, since its backward has raised: as soon as
            it has, in any thread, or when the step is to end. Called before `end_step`, raises nothing.

    Attributes:
        steps: synchronized backwards that began, since the beginning of training.
    """

    def __init__(self, counters: Counters, end_step: Callable[[bool], None], break_off: Callable[[], None]) -> None:
        self._counters = counters
        self._end_step = end_step
        self._break_off = break_off
        self._previous_index: int | None = None
        self._is_open = False
        self._is_complete = False
        # The number that autograd gave the first backward of a static graph, if there is one.
        self._static_backward: int | None = None
        # The number that autograd gave the last backward of a source that does not say where one begins.
        self._backward = -1
        # The number of the last backward in which a bucket of this step was handed over.
        self._watched = -1
        self.steps = 0

    def expect_static_graph(self) -> None:
        """Be ready for the first backward of a static graph: DDP hands over all buckets at its end, each as number 0.

        And none as the last one, if there are several, of gradients of several dtypes.
        """
        self._static_backward = _NOT_BEGUN

    @property
    def is_first_of_static_graph(self) -> bool:
        """Whether this is the first backward of a static graph: DDP waits for its buckets before it says it is done."""
        if self._static_backward is None:
            return False
        backward = current_backward()
        if self._static_backward == _NOT_BEGUN:
            self._static_backward = backward
        return 0 <= backward == self._static_backward

    @property
    def is_open(self) -> bool:
        """Whether a step has begun and not ended."""
        return self._is_open

    def step_of(self, index: int, is_last: bool, last_may_be_skipped: bool) -> int:
        """Number of the step that a bucket belongs to, from 0 on; called once for each bucket."""
        if self.is_first_of_static_graph:
            index = 0 if self._previous_index is None else self._previous_index + 1
            last_may_be_skipped = True
        begins = self._previous_index is None or index <= self._previous_index
        if begins:
            self._begin()
            self._is_open = True
        is_in_backward = self._watch_backward()
        self._is_complete = is_last or (last_may_be_skipped and not is_in_backward)
        if begins if last_may_be_skipped else is_last:
            call_at_end_of_backward(lambda: self.end(in_time=True))
        self._previous_index = None if is_last else index
        return self.steps - 1

    def place_in_backward(self, ends: bool = False) -> tuple[int, int]:
        """Number of the step, and of the bucket in it, for a source that does not say where a backward begins.

        A step has an end only if `ends`: with that backward.
        """
        backward = current_backward()
        if backward != self._backward:
            self._backward = backward
            self._begin()
            self._is_open = ends
            if ends:
                self._is_complete = not self._watch_backward()
                call_at_end_of_backward(lambda: self.end(in_time=True))
        self._previous_index = 0 if self._previous_index is None else self._previous_index + 1
        return self.steps - 1, self._previous_index

    def _watch_backward(self) -> bool:
        """Notice if the present backward raises before the step is complete; returns whether there is a backward."""
        backward = current_backward()
        if backward in (-1, self._watched):
            return backward != -1

        def break_off() -> None:
            if self._is_open and not self._is_complete and self._watched == backward:
                self._break_off()

        self._watched = backward
        return call_if_backward_breaks_off(break_off)

    def _begin(self) -> None:
        self.end()
        self.steps += 1
        self._counters.steps += 1
        self._counters.timing.begin_step(self.steps - 1)

    def abandon(self) -> None:
        """Abandon the present step, if it has not ended."""
        self._previous_index, self._is_open = None, False

    def end(self, *, in_time: bool = False) -> None:
        """End the present step, if there is one."""
        self._previous_index = None
        if self._is_open:
            self._is_open = False
            if not in_time and not self._is_complete:
                self._break_off()
            self._end_step(in_time)
