"""Ends steps: whether one was finite, on all ranks alike."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_commhooks.ddp.running import RunningHook
from lightning_commhooks.interface.averages_models import is_local
from lightning_commhooks.interface.memory import all_finite, spoil_unless_


class FiniteSteps:
    """Ends the steps of a hook with memory, and those that ranks take alone under a scaler, on all ranks alike."""

    def __init__(self, running: RunningHook, grad_scaler: torch.amp.GradScaler | None) -> None:
        self._running = running
        self._grad_scaler = grad_scaler
        self._is_local = False
        self._finite: list[Tensor] = []
        self._reduced: list[Tensor] = []

    def forget(self) -> None:
        """Let go of the buckets of the present step."""
        self._finite, self._reduced = [], []

    def add(self, reduced: Tensor, finite: Tensor | None, step: int, is_late: bool) -> None:
        """Note the averaged gradients of a bucket, and whether they are finite if that is known; called on the engine.

        DDP has not given them to the parameters yet. With `is_late` it will have when the step ends.
        """
        self._is_local = is_local(self._running.bound, step) and (self._running.bound.has_memory or self._may_skip())
        if self._running.bound.has_memory or self._is_local:
            finite = all_finite(reduced) if finite is None else finite
            if self._is_local and is_late:
                finite = self._agreed(finite)
                spoil_unless_(finite, reduced)
            self._finite.append(finite)
            self._reduced.append(reduced)

    def _may_skip(self) -> bool:
        return self._grad_scaler is not None and self._grad_scaler.is_enabled()

    def _agreed(self, finite: Tensor) -> Tensor:
        """Whether gradients are finite on all ranks; one scalar all-reduce."""
        num_bad = finite.logical_not().to(torch.float32).view(1)
        return self._running.bound.group.all_reduce_(num_bad).eq(0).view(())

    def end(self, in_time: bool, complete: bool) -> None:
        """Let the hook take over its new memory, or make all gradients of the step NaN.

        Not `in_time`, the buckets may be in use for the next step. Not `complete`, what was sent went nowhere.
        """
        self._running.call(lambda: self._end(in_time, complete))

    def _end(self, in_time: bool, complete: bool) -> None:
        if self._finite:
            with self._running.bound.group.counters.timing.work():
                self._take_over(in_time, complete)
        self._running.committed.keep()

    def _take_over(self, in_time: bool, complete: bool) -> None:
        finite, reduced = torch.stack(self._finite).all(), self._reduced
        if not complete:
            finite = torch.zeros_like(finite)
        if self._is_local:
            finite = self._agreed(finite)
        self.forget()
        with self._running.committed.taking_over():
            self._running.bound.end_step(finite)
        self._running.counters.nonfinite_steps += finite.logical_not() if finite.is_cuda else int(not finite)
        if in_time:
            for gradients in reduced:
                spoil_unless_(finite, gradients)
