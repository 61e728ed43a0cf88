"""Forwards and backwards of a model, and the steps that they make."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Set
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_commhooks.basics.copies import NotCopied
from lightning_commhooks.collectives.counters import Counters

_NOT_BEGUN = -2


def call_at_end_of_backward(function: Callable[[], None]) -> bool:
    """Make autograd call `function` after the current backward; outside of one, do nothing and return `False`."""
    try:
        torch.autograd.Variable._execution_engine.queue_callback(function)
    except RuntimeError:
        return False
    return True


def call_if_backward_breaks_off(function: Callable[[], None]) -> bool:
    """Call `function` after the current backward if it raises; outside of one, do nothing and return `False`.

    If a backward raises, autograd releases its callbacks without calling them.
    """

    def is_done() -> None:
        broken_off.detach()

    broken_off = weakref.finalize(is_done, function)
    broken_off.atexit = False
    if not call_at_end_of_backward(is_done):
        broken_off.detach()
        return False
    return True


def _call_last_in_backward(function: Callable[[], None]) -> None:
    """Call `function` after the current backward and all that is called after it by now."""
    call_at_end_of_backward(lambda: None if call_at_end_of_backward(function) else function())


def current_backward() -> int:
    """The number that autograd gave the backward of this thread; -1 outside of one."""
    return torch._C._current_graph_task_id()


class StepClock:
    """Counts synchronized backwards from the order in which DDP hands over its buckets.

    A step ends with its backward: with the last bucket, where DDP itself finishes. (Not with the first, which reentrant
    activation checkpointing hands over in a backward inside the backward.) When DDP may skip the last bucket, as it
    does with `skip_all_reduce_unused_params=True`, the step ends with the backward in which it began. Outside of a
    backward (`join()`) an index that does not rise begins a new step, and the last one ends then.

    `end_step(in_time)` is called once for each step: whether DDP has not given the gradients to the parameters yet,
    which it has for a step outside of a backward. `break_off` is called before, for a step of which not all buckets are
    handed over, since its backward has raised: as soon as it has, in any thread, or when the step is to end. It raises
    nothing.

    Attributes:
        steps: synchronized backwards that began, since the beginning of training.
        is_open: whether a step has begun and not ended.
    """

    def __init__(self, counters: Counters, end_step: Callable[[bool], None], break_off: Callable[[], None]) -> None:
        self._counters = counters
        self._end_step = end_step
        self._break_off = break_off
        self._previous_index: int | None = None
        self.is_open = False
        self._is_complete = False
        # The number that autograd gave the first backward of a static graph, if there is one.
        self._static_backward: int | None = None
        # For a source that does not count its buckets, the numbers that autograd gave the last backward, and the
        # present one if the source has said that it begins.
        self._backward = self._outer = -1
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

    def step_of(self, index: int, is_last: bool, last_may_be_skipped: bool) -> int:
        """Number of the step that a bucket belongs to, from 0 on; called once for each bucket."""
        if self.is_first_of_static_graph:
            index = 0 if self._previous_index is None else self._previous_index + 1
            last_may_be_skipped = True
        begins = self._previous_index is None or index <= self._previous_index
        if begins:
            self._begin()
            self.is_open = True
        is_in_backward = self._watch_backward()
        self._is_complete = is_last or (last_may_be_skipped and not is_in_backward)
        if begins if last_may_be_skipped else is_last:
            call_at_end_of_backward(lambda: self.end(in_time=True))
        self._previous_index = None if is_last else index
        return self.steps - 1

    def enter_backward(self) -> None:
        """Count the present backward and those within it, as of reentrant activation checkpointing, as one."""
        if self._outer != -1:
            return
        self._outer = current_backward()

        def leave() -> None:
            broken_off.detach()
            self._leave()

        # Until then autograd keeps `leave`, also if a callback before it raises.
        broken_off = weakref.finalize(leave, self._leave_broken)
        broken_off.atexit = False
        _call_last_in_backward(leave)

    def _leave(self) -> None:
        is_own, self._outer = self._backward == self._outer, -1
        if is_own:
            self.end(in_time=True)

    def _leave_broken(self) -> None:
        self._outer = -1
        if self.is_open:
            self._break_off()

    def place_in_backward(self, ends: bool = False) -> tuple[int, int]:
        """Number of the step, and of the bucket in it, for a source that does not count its buckets.

        Each backward is a step, and one for which `enter_backward` was not called may count as several. A step has an
        end only if `ends`: with that backward.
        """
        backward = current_backward() if self._outer == -1 else self._outer
        if backward != self._backward:
            self._backward = backward
            self._begin()
            self.is_open, self._is_complete = ends, False
            if ends and self._outer == -1:
                self._is_complete = not self._watch_backward()
                _call_last_in_backward(lambda: self.end(in_time=True))
        self._previous_index = 0 if self._previous_index is None else self._previous_index + 1
        return self.steps - 1, self._previous_index

    def _watch_backward(self) -> bool:
        """Notice if the present backward raises before the step is complete; returns whether there is a backward."""
        backward = current_backward()
        if backward in (-1, self._watched):
            return backward != -1

        def break_off() -> None:
            if self.is_open and not self._is_complete and self._watched == backward:
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
        self._previous_index, self.is_open = None, False

    def end(self, *, in_time: bool = False) -> None:
        """End the present step, if there is one."""
        self._previous_index = None
        if self.is_open:
            self.is_open = False
            if not in_time and not self._is_complete:
                self._break_off()
            self._end_step(in_time)


class _Forward:
    """A forward that trains. Also a hook on the nodes of its outputs, which keep it alive."""

    def __init__(self, reach: Callable[[_Forward], None], synchronizes: bool) -> None:
        self._reach = reach
        self.synchronizes = synchronizes

    def __call__(self, gradients: object) -> None:
        self._reach(self)


class Passes:
    """Follows each forward that trains to the backwards that pass through its outputs.

    All forwards may therefore come before all backwards, one backward may include several forwards, and one forward may
    have several backwards. A backward that passes through no output is attributed to all forwards so far. This happens
    if it runs within the forward, as in Lightning's manual optimization, if it differentiates a gradient, or if the
    output contains no tensor that this class finds.

    Attributes:
        is_ambiguous: whether several backwards followed several forwards without a tensor in their outputs, so that
            their micro-batches cannot be counted.
        last_synchronizes: whether the backward of the last forward that trains averages gradients.
    """

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self._handles: list[RemovableHandle] = []
        self._parameters: list[Tensor] = []
        self._not_synchronized: Callable[[], None] | None = None
        # Step count when the last forward that synchronizes ended: DDP averages only the next backward.
        self._steps_of_forward = -1
        self.last_synchronizes = True
        self.restart()

    def restart(self) -> None:
        """Drop all forwards."""
        # Weak references without a callback: Python would drop an exception that a signal handler raises in one.
        self._forwards: list[weakref.ref[_Forward]] = []
        self._has_begun, self.is_ambiguous = False, False
        # Forwards without a tensor in their outputs, since the last micro-batch, and in it.
        self._num_opaque, self._num_merged = 0, 0
        self._forget_backward()

    def _forget_backward(self) -> None:
        self._is_within, self._is_counted = False, False
        self._reached: set[_Forward] = set()
        # Whether DDP has already averaged an earlier backward, and if so the steps and gradients before this one.
        self._is_extra = False
        self._before: tuple[int, list[tuple[Tensor | None, int]]] | None = None

    def watch(
        self,
        model: nn.Module,
        parameters: Mapping[str, Tensor],
        synchronizes: Callable[[Any], bool],
        not_synchronized: Callable[[], None],
    ) -> None:
        """Follow the forwards of this DDP model from now on, instead of the previous model's.

        At the end of a forward, `synchronizes` returns whether the next backward averages gradients. `not_synchronized`
        is called at the end of a backward that passes through a forward that synchronizes, adds to gradients, and
        averages none.
        """
        self.close()
        self._parameters, self._not_synchronized = list(parameters.values()), not_synchronized

        def before(module: object, inputs: object) -> None:
            if torch.is_grad_enabled():
                self._has_begun = True
            if self._is_within and current_backward() < 0:
                self._forget_backward()  # it was interrupted

        def after(module: nn.Module, inputs: object, outputs: object) -> None:
            if torch.is_grad_enabled():
                self._follow(outputs, synchronizes(module))

        self._handles = [
            model.register_forward_pre_hook(NotCopied(torch.compiler.disable(before))),
            model.register_forward_hook(NotCopied(torch.compiler.disable(after))),
        ]

    def close(self) -> None:
        """Release the model."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._parameters = [], []
        self._not_synchronized = None

    def _follow(self, outputs: object, synchronizes: bool) -> None:
        self.last_synchronizes = synchronizes
        if synchronizes:
            self._steps_of_forward = self._clock.steps
        if not self._has_begun:
            return  # its backward ran within the forward
        forward = _Forward(self._reach, synchronizes)
        nodes = {node for tensor in _tensors(outputs, set(), 2) for node in _nodes(tensor)}
        for node in nodes:
            node.register_prehook(forward)
        if nodes:
            self._forwards = [one for one in self._forwards if one() is not None] + [weakref.ref(forward)]
        else:
            self._num_opaque += 1

    def _reach(self, forward: _Forward) -> None:
        self._enter()
        self._reached.add(forward)
        if self._is_extra and forward.synchronizes and self._before is None:
            self._before = self._clock.steps, self._gradients()

    def _enter(self) -> None:
        if self._is_within:
            return
        self._is_within = True
        self._is_extra = (
            self._not_synchronized is not None
            and self._steps_of_forward != self._clock.steps
            and not self._clock.is_open
        )
        call_at_end_of_backward(self._leave)

    def _leave(self) -> None:
        reached, before = self._reached, self._before
        if self._is_counted:
            left = self._uncounted() - reached if reached else set()
            self._forwards = [one for one in self._forwards if one() in left]
        self._forget_backward()
        report = self._not_synchronized
        if before is None or report is None or self._clock.steps != before[0]:
            return
        now = self._gradients()
        if any(was is not grad or version != old for (was, old), (grad, version) in zip(before[1], now, strict=True)):
            report()

    def _gradients(self) -> list[tuple[Tensor | None, int]]:
        return [(p.grad, -1 if p.grad is None else p.grad._version) for p in self._parameters]

    def begin_micro_batch(self) -> int | None:
        """Return the number of forwards left if a micro-batch begins with the gradient that has arrived; else `None`.

        A micro-batch begins with the first gradient of a backward of forwards that are in no earlier micro-batch.
        """
        self._enter()
        if self._is_counted:
            return None
        uncounted = self._uncounted()
        new: Set[_Forward] = self._reached & uncounted
        if self._reached and not new:
            return None
        if not self._reached and not self._has_begun:
            self.is_ambiguous = self.is_ambiguous or self._num_merged > 1
            return None
        self._is_counted, self._has_begun = True, False
        self._num_merged, self._num_opaque = (0 if new else self._num_opaque), 0
        return max(len(uncounted) - max(len(new), 1), 0)

    def _uncounted(self) -> set[_Forward]:
        """Return the forwards that are in no micro-batch yet."""
        return {forward for one in self._forwards if (forward := one()) is not None}


def _tensors(value: object, seen: set[int], depth: int) -> Iterator[Tensor]:
    """Yield the tensors in the output of a model: in containers, and in attributes of objects down to a depth."""
    if isinstance(value, Tensor):
        yield value
        return
    if isinstance(value, (str, bytes, type, nn.Module, ModuleType)) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        parts: list[object] = list(value.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        parts = list(value)
    elif dataclasses.is_dataclass(value):
        parts = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    else:
        parts = list(getattr(value, "__dict__", {}).values()) if depth else []
        depth -= 1
    for part in parts:
        yield from _tensors(part, seen, depth)


def _nodes(tensor: Tensor) -> Iterator[torch.autograd.graph.Node]:
    """Yield the nodes of a tensor and of its base: a view that is changed in place gets a new node."""
    for each in (tensor, tensor._base):
        if each is not None and each.grad_fn is not None:
            yield each.grad_fn
