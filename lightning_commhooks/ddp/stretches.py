"""What a hook sends in all steps of a training, from a few of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_commhooks.ddp.dry_run import DryRun, Sent

# Steps to go through for one forecast, and seconds.
_MOST_STEPS = 5_000
_MOST_SECONDS = 2.0


@dataclass(frozen=True)
class Stretch:
    """Steps between two at which a hook begins to send otherwise.

    Attributes:
        first: number of the first one.
        last: that of the first one after it; `None`: there is no end.
        period: steps after which what is sent repeats.
        is_local: whether ranks step alone.
        steps: what is sent in each of the first `1 + period` steps, or in all of them. The first one is by itself: a
            hook that takes over pays what its predecessor owed.
    """

    first: int
    last: int | None
    period: int
    is_local: bool
    steps: Sequence[Sent]

    def sent(self, begin: int, end: int) -> Sent:
        """In the steps from `begin` on and before `end`, as far as they are in this stretch."""
        begin, end = max(begin, self.first), end if self.last is None else min(end, self.last)
        return self._until(end).plus(self._until(begin), -1) if begin < end else Sent()

    def _until(self, end: int) -> Sent:
        num_steps = end - self.first
        total = Sent()
        for step in self.steps[:num_steps]:
            total += step
        if (more := num_steps - len(self.steps)) > 0:
            for i, step in enumerate(repeated := self.steps[1:]):
                total = total.plus(step, (more - i + len(repeated) - 1) // len(repeated))
        return total

    @property
    def usual(self) -> Sent:
        """In a period; or in all steps, if there are no more."""
        if self.last is not None and self.last - self.first == len(self.steps):
            return self.sent(self.first, self.last)
        return self.sent(self.first + 1, self.first + 1 + self.period)


def go_through(dry: DryRun, changes: Sequence[int], num_steps: int | None, period: int) -> list[Stretch]:
    """Stretches of a training, from the few steps that differ.

    Args:
        dry: a hook that has not done anything yet.
        changes: steps at which it begins to send otherwise.
        num_steps: of the training; `None`: unknown.
        period: steps after which what it sends repeats.

    Raises:
        ValueError: that would be too many, or take too long.
    """
    deadline = time.monotonic() + _MOST_SECONDS

    def step(number: int) -> Sent:
        if time.monotonic() > deadline:
            raise ValueError(f"it takes more than {_MOST_SECONDS:g} s")
        return dry.step(number)

    firsts = sorted({0, *(step for step in changes if num_steps is None or step < num_steps)})
    if len(firsts) * 2 * period > _MOST_STEPS:
        raise ValueError(f"what is sent repeats after {period} steps only")
    lasts: list[int | None] = [*firsts[1:], num_steps]
    stretches = []
    for first, last in zip(firsts, lasts, strict=True):
        length = 1 + period if last is None else min(1 + period, last - first)
        steps = [step(first + i) for i in range(length)]
        stretches.append(Stretch(first, last, period, dry.is_local(first), steps))
        if last is not None and last != num_steps:
            # So that the next stretch begins where this one ends: perhaps in the middle of a period.
            for i in range((last - first - length) % period):
                step(first + length + i)
    return stretches
