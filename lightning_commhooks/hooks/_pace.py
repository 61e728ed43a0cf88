"""How many steps a rank takes in a period of a given length in time."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from lightning_commhooks.collectives.group import Group


class Pace:
    """Steps of one period after another, each as many as this rank can take in `seconds`.

    The number of steps is set when a period begins, from the duration of the previous period's steps, so that ranks
    that step together agree on it without a message in each step. Dynamic local updates, Liu et al. 2024,
    https://arxiv.org/abs/2401.09135, section 5, which give every worker a share of the fastest one's steps.

    Args:
        group: all ranks.
        subgroup: the ranks that average gradients with this one in each step; the slowest of them sets the number.
        first: steps of the first period, which measures how long they take.
        seconds: intended duration of a period.

    Attributes:
        length: steps of this period.
        taken: steps of it that this rank has taken.
    """

    def __init__(self, group: Group, subgroup: Sequence[int], first: int, seconds: float) -> None:
        self._group, self._subgroup, self._seconds = group, subgroup, seconds
        self.length, self.taken = first, 0
        # When the first step of the period ended, and the last one.
        self._first = self._last = 0.0

    def step(self, num_steps: int) -> None:
        """Count steps of the optimizer, the last of which has just ended."""
        is_first = not self.taken
        self.taken += num_steps
        if self.is_over() and self._group.device.type == "cuda":
            torch.empty(1, device=self._group.device).item()  # the time of this device's work, without the average
        # Before the average: its wait for slower ranks is not part of a step.
        self._last = time.monotonic()
        if is_first:
            self._first = self._last

    def is_over(self, num_steps: int = 0) -> bool:
        """Return whether the period is over after `num_steps` more steps."""
        return self.taken + num_steps >= self.length

    def end(self) -> float:
        """End the period on all ranks; returns this rank's weight in the mean, by its steps: 1 on average."""
        microseconds = (self._last - self._first) * 1e6 / max(1, self.taken - 1)
        told = self._group.all_gather_quietly([self.taken, int(microseconds)])
        weight = self.taken * len(told) / sum(steps for steps, _ in told)
        slowest = max(1, *(told[rank][1] for rank in self._subgroup))
        self.length, self.taken = max(2, round(self._seconds * 1e6 / slowest)), 0
        return weight
