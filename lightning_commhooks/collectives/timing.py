"""The time of a step: collectives, the hook's own work, and waits of the training thread."""

from __future__ import annotations

import itertools
import math
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

M = TypeVar("M")  # a moment

# On CUDA, one step in `DEVICE_EVERY` is timed: recording an event costs a microsecond, and a step may have hundreds.
DEVICE_EVERY = 10
# Limit on timed steps with pending events. Older steps are dropped instead of waited for.
_MAX_PENDING = 64


@dataclass
class _Step(Generic[M]):
    """The intervals of one step, each with begin and end."""

    handed_over: M
    comm: list[tuple[M, M]] = field(default_factory=list)
    # The part of `comm` within work.
    within_work: list[tuple[M, M]] = field(default_factory=list)
    work: list[tuple[M, M]] = field(default_factory=list)
    waits: list[tuple[M, M]] = field(default_factory=list)
    backward_done: M | None = None
    # Number of intervals of work in the backward, once an optimizer has stepped.
    num_in_backward: int | None = None


class Timing(ABC, Generic[M]):
    """Adds up the times of steps. `comm` and `work` are called where the hook runs, the rest on the training thread.

    Attributes:
        steps: number of synchronized backwards that were timed.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._totals = dict.fromkeys(("exposed_ms", "codec_ms", "comm_ms", "overlap_ms"), 0.0)
        self._step: _Step[M] | None = None
        # Threads whose work is not counted.
        self._paused: set[int] = set()

    @abstractmethod
    def now(self) -> M:
        """Return the current time on the device's stream or the host."""

    @abstractmethod
    def ms(self, begin: M, end: M) -> float:
        """Return the milliseconds between two moments."""

    def _is_timed(self, step: int) -> bool:
        return True

    def begin_step(self, step: int) -> None:
        """Record that a synchronized backward has passed on its first bucket."""
        self._finish_step()
        if self._is_timed(step):
            self._step = _Step(self.now())

    def backward_done(self) -> None:
        """Record the end of the backward's computation: from here on, the training thread waits."""
        if self._step is not None:
            self._step.backward_done = self.now()

    @contextmanager
    def comm(self, within_work: bool = True) -> Iterator[None]:
        """Time the wait for a collective.

        Args:
            within_work: whether the wait lies within an interval of work, from which it is subtracted.
        """
        step = self._step
        with self._timed(step.comm if step is not None and not self.is_paused else None):
            yield
        if step is not None and within_work and not self.is_paused:
            step.within_work.append(step.comm[-1])

    def work(self) -> AbstractContextManager[None]:
        """Time the hook's work, which may include waits."""
        step = self._step
        return self._timed(step.work if step is not None else None)

    def wait(self) -> AbstractContextManager[None]:
        """Time the training thread's wait for the hook after an optimizer's step."""
        step = self._step
        if step is not None and step.num_in_backward is None:
            step.num_in_backward = len(step.work)
        return self._timed(step.waits if step is not None else None)

    @contextmanager
    def _timed(self, pairs: list[tuple[M, M]] | None) -> Iterator[None]:
        if pairs is None:
            yield
            return
        begin = self.now()
        yield
        pairs.append((begin, self.now()))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not time the collectives of this thread; other threads are not affected."""
        if self.is_paused:
            yield
            return
        thread = threading.get_ident()
        self._paused.add(thread)
        try:
            yield
        finally:
            self._paused.discard(thread)

    @property
    def is_paused(self) -> bool:
        """Whether this thread is within `paused`."""
        return threading.get_ident() in self._paused

    def totals(self) -> dict[str, float]:
        """Return the milliseconds of all timed steps; not during a backward. See `Attachment.metrics`."""
        self._finish_step()
        return {"timed_steps": self.steps, **self._totals}

    def _finish_step(self) -> None:
        step, self._step = self._step, None
        if step is not None and step.backward_done is not None:
            self._add(step)

    def _add(self, step: _Step[M]) -> None:
        assert step.backward_done is not None
        done = step.backward_done
        comm = sum(self.ms(*pair) for pair in step.within_work)
        work = sum(self.ms(*pair) for pair in step.work)
        waits = sum(self.ms(*pair) for pair in step.waits)
        in_backward = step.work[: step.num_in_backward]
        tail = max(0.0, self.ms(done, in_backward[-1][1])) if in_backward else 0.0
        self.steps += 1
        self._totals["exposed_ms"] += tail + waits
        self._totals["codec_ms"] += max(0.0, work - comm)
        self._totals["comm_ms"] += self._covered(step.comm)
        self._totals["overlap_ms"] += max(0.0, self.ms(step.handed_over, done))

    def _covered(self, pairs: list[tuple[M, M]]) -> float:
        """Return the milliseconds covered by at least one interval."""
        return sum(self.ms(*pair) for pair in pairs)


class HostTiming(Timing[float]):
    """Times work on a communication thread, in every step, by the host's clock."""

    def now(self) -> float:
        return time.perf_counter()

    def ms(self, begin: float, end: float) -> float:
        return (end - begin) * 1e3

    def _covered(self, pairs: list[tuple[float, float]]) -> float:
        # The intervals of several threads overlap.
        covered, until = 0.0, -math.inf
        for begin, end in sorted(pairs):
            covered += max(0.0, end - max(begin, until))
            until = max(until, end)
        return covered * 1e3


class NoTiming(HostTiming):
    """Times nothing, for CUDA tensors that a thread copies to the host: its clock does not show the device's waits."""

    def _is_timed(self, step: int) -> bool:
        return False


class DeviceTiming(Timing[torch.cuda.Event]):
    """Times work on a CUDA stream in one step of ten, by events, without synchronizing."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._pending: deque[_Step[torch.cuda.Event]] = deque(maxlen=_MAX_PENDING)

    def _is_timed(self, step: int) -> bool:
        return step % DEVICE_EVERY == 0

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def ms(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()  # already reached, except in calls from `Auto`
        elapsed: float = begin.elapsed_time(end)
        return elapsed

    def _add(self, step: _Step[torch.cuda.Event]) -> None:
        self._pending.append(step)

    def _finish_step(self) -> None:
        super()._finish_step()
        while self._pending and _is_over(self._pending[0]):
            super()._add(self._pending.popleft())


def _is_over(step: _Step[torch.cuda.Event]) -> bool:
    events = [step.handed_over, step.backward_done, *itertools.chain(*step.comm, *step.work, *step.waits)]
    return all(event.query() for event in events if event is not None)
