"""Counters and times of one attachment's communication, and counters of plain DDP's for comparison."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

# The host's time in seconds, or an event on a CUDA stream.
Moment = Any
Interval = tuple[Moment, Moment]

# On CUDA, one step in `DEVICE_EVERY` is timed: recording an event costs a microsecond, and a step may have hundreds.
DEVICE_EVERY = 10
# Limit on timed steps with pending events. Older steps are dropped instead of waited for.
_MAX_PENDING = 64


@dataclass
class Step:
    """The intervals of one step."""

    handed_over: Moment
    comm: list[Interval] = field(default_factory=list)
    # The part of `comm` within work.
    within_work: list[Interval] = field(default_factory=list)
    work: list[Interval] = field(default_factory=list)
    waits: list[Interval] = field(default_factory=list)
    backward_done: Moment | None = None
    # Number of intervals of work in the backward, once an optimizer has stepped.
    num_in_backward: int | None = None


class Timing:
    """Adds up the times of steps, by the host's clock, for work on a communication thread.

    `comm` and `work` are called where the hook runs, the rest on the training thread. No step is timed if a thread
    copies CUDA tensors to the host, whose clock does not show the device's waits.

    Args:
        every: one step in so many is timed; 0: no step.

    Attributes:
        steps: number of synchronized backwards that were timed.
        step: the intervals of the present step; `None`: it is not timed.
    """

    def __init__(self, every: int = 1) -> None:
        self._every = every
        self.steps = 0
        self._totals = dict.fromkeys(("exposed_ms", "codec_ms", "comm_ms", "overlap_ms"), 0.0)
        self.step: Step | None = None
        # Threads whose work is not counted.
        self._paused: set[int] = set()

    now: Callable[[], Moment] = staticmethod(time.perf_counter)

    def ms(self, begin: Moment, end: Moment) -> float:
        """Return the milliseconds between two moments."""
        milliseconds: float = (end - begin) * 1e3
        return milliseconds

    def begin_step(self, step: int) -> None:
        """Record that a synchronized backward has passed on its first bucket."""
        self.finish_step()
        if self._every and step % self._every == 0:
            self.step = Step(self.now())

    def backward_done(self) -> None:
        """Record the end of the backward's computation: from here on, the training thread waits."""
        if self.step is not None:
            self.step.backward_done = self.now()

    def comm(self) -> AbstractContextManager[None]:
        """Time a wait for a collective within the hook's work, from which it is subtracted."""
        step = None if self.is_paused else self.step
        return self._timed(() if step is None else (step.comm, step.within_work))

    def work(self) -> AbstractContextManager[None]:
        """Time the hook's work, which may include waits."""
        return self._timed(() if self.step is None else (self.step.work,))

    def wait(self) -> AbstractContextManager[None]:
        """Time the training thread's wait for the hook after an optimizer's step."""
        step = self.step
        if step is not None and step.num_in_backward is None:
            step.num_in_backward = len(step.work)
        return self._timed(() if step is None else (step.waits,))

    @contextmanager
    def _timed(self, lists: tuple[list[Interval], ...]) -> Iterator[None]:
        if not lists:
            yield
            return
        begin = self.now()
        yield
        interval = begin, self.now()
        for intervals in lists:
            intervals.append(interval)

    def paused(self) -> AbstractContextManager[None]:
        """Do not time or count this thread's collectives, such as measurements and small agreements between ranks.

        Hooks that run in other threads meanwhile are not affected.
        """
        return _with_thread_in(self._paused)

    @property
    def is_paused(self) -> bool:
        """Whether this thread is within `paused`."""
        return threading.get_ident() in self._paused

    def totals(self) -> dict[str, float]:
        """Return the milliseconds of all timed steps; not during a backward. See `Attachment.metrics`."""
        self.finish_step()
        return {"timed_steps": self.steps, **self._totals}

    def finish_step(self) -> None:
        """Add up the present step, if its backward has ended."""
        step, self.step = self.step, None
        if step is not None and step.backward_done is not None:
            self.add(step)

    def add(self, step: Step) -> None:
        """Add up the intervals of a step."""
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

    def _covered(self, pairs: list[Interval]) -> float:
        """Return the milliseconds covered by at least one interval. The intervals of several threads overlap."""
        covered, until = 0.0, -math.inf
        for begin, end in sorted(pairs):
            covered += max(0.0, end - max(begin, until))
            until = max(until, end)
        return covered * 1e3


class DeviceTiming(Timing):
    """Times work on a CUDA stream in one step of ten, by events, without synchronizing."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(DEVICE_EVERY)
        self._device = device
        self._pending: deque[Step] = deque(maxlen=_MAX_PENDING)

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def ms(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()  # already reached, except in calls from `Auto`
        elapsed: float = begin.elapsed_time(end)
        return elapsed

    def add(self, step: Step) -> None:
        self._pending.append(step)

    def _covered(self, pairs: list[Interval]) -> float:
        return sum(self.ms(*pair) for pair in pairs)

    def finish_step(self) -> None:
        super().finish_step()
        while self._pending and _is_over(self._pending[0]):
            super().add(self._pending.popleft())


def _is_over(step: Step) -> bool:
    events = [step.handed_over, step.backward_done, *itertools.chain(*step.comm, *step.work, *step.waits)]
    return all(event.query() for event in events if event is not None)


_NOT_COUNTS = ("timing", "evaluating_threads")


@dataclass
class Counters:
    """Cumulative counts of this rank.

    Attributes:
        steps: synchronized backwards that have begun.
        bytes_sent: payload bytes that this rank sent for training, without headers.
        bytes_evaluation: payload bytes that this rank sent for evaluation and saving, within `evaluating`.
        bytes_dense: payload bytes that an all-reduce of the same gradients in their own dtype sends.
        bytes_sent_between_nodes: the part of `bytes_sent` that goes to ranks on other nodes, averaged over ranks.
        bytes_evaluation_between_nodes: the same of `bytes_evaluation`.
        bytes_dense_between_nodes: the same of `bytes_dense`.
        collectives: number of collectives for training.
        rounds: consecutive rounds of messages between ranks, each of which takes at least the latency of the link;
            collectives in flight at once for one bucket count as one.
        numel_compressed: gradient elements that were sent in compressed form or not at all: the remaining elements of
            all buckets that sent anything.
        numel_uncompressed: gradient elements that were sent uncompressed: for each bucket, the count of numbers that
            this rank passed to collectives in the gradients' dtype, or as floating-point numbers of at least as many
            bytes, up to the size of the bucket. With several ranks on a node, only numbers that leave the node count,
            if any do.
        numel_overflowed: gradient elements of this rank that are finite, but overflow in the 16 bits they were sent in.
        nonfinite_steps: steps that were set to NaN on all ranks because a gradient was inf or NaN on some rank: with
            hooks that have memory, and in local steps under a scaler.
        averagings: number of averages of the model, or of a part of it, over ranks; averages of several optimizers of
            a model count once.
        waited_ms: milliseconds that this rank waited for slower ranks before averages of models.
        timing: times of steps.
        evaluating_threads: threads within `evaluating`.
    """

    steps: int = 0
    bytes_sent: float = 0.0
    bytes_evaluation: float = 0.0
    bytes_dense: float = 0.0
    bytes_sent_between_nodes: float = 0.0
    bytes_evaluation_between_nodes: float = 0.0
    bytes_dense_between_nodes: float = 0.0
    collectives: int = 0
    rounds: int = 0
    numel_compressed: int = 0
    numel_uncompressed: int = 0
    # On CUDA a tensor, so that counting does not synchronize.
    numel_overflowed: int | Tensor = 0
    nonfinite_steps: int = 0
    averagings: int = 0
    waited_ms: float = 0.0
    timing: Timing = field(default_factory=Timing, compare=False, repr=False)
    evaluating_threads: set[int] = field(default_factory=set, compare=False, repr=False)

    def as_dict(self) -> dict[str, float]:
        """Return all counters and the ratio `bytes_dense / bytes_sent`, for all bytes and for bytes between nodes.

        The ratio is 1 if there was nothing to send (one process, one node) and inf if a hook sent nothing.
        """
        counts = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _NOT_COUNTS}
        plain = {name: value.item() if isinstance(value, Tensor) else value for name, value in counts.items()}
        ratios = {
            "compression_ratio": _ratio(self.bytes_dense, self.bytes_sent),
            "compression_ratio_between_nodes": _ratio(self.bytes_dense_between_nodes, self.bytes_sent_between_nodes),
        }
        return {**plain, **ratios}

    def count(self, num_bytes: float, between_nodes: float) -> bool:
        """Count a collective by the bytes that it sends, and the part of them that leaves the node.

        Returns whether it belongs to training.
        """
        if self.timing.is_paused:
            return False
        if self.is_evaluating:
            self.bytes_evaluation += num_bytes
            self.bytes_evaluation_between_nodes += between_nodes
            return False
        self.bytes_sent += num_bytes
        self.bytes_sent_between_nodes += between_nodes
        self.collectives += 1
        return True

    def evaluating(self) -> AbstractContextManager[None]:
        """Count this thread's bytes separately from training, as bytes of evaluation and checkpoints.

        Rounds and times are not counted, since they are about steps.
        """
        return _with_thread_in(self.evaluating_threads)

    @property
    def is_evaluating(self) -> bool:
        """Whether this thread is within `evaluating`."""
        return threading.get_ident() in self.evaluating_threads


def _ratio(dense: float, sent: float) -> float:
    return dense / sent if sent else math.inf if dense else 1.0


@contextmanager
def _with_thread_in(threads: set[int]) -> Iterator[None]:
    """Hold this thread's identifier in a set within a `with`; inside another such `with`, change nothing."""
    thread = threading.get_ident()
    if thread in threads:
        yield
        return
    threads.add(thread)
    try:
        yield
    finally:
        threads.discard(thread)
