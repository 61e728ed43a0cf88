"""Measures what all-reduces take."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.link import Link
from lightning_commhooks.collectives.steps import finish

# Bytes that a rank sends, by our own count.
_SIZES = tuple(2**exponent for exponent in (8, 12, 14, *range(16, 29)))
# A size whose bytes take so long, and longer than latency does, is the last one: larger ones take as long per byte.
_LONG_ENOUGH = 0.015
# Late, it is enough if they take this part of latency: more than latency varies.
_CLEAR = 0.1
# When the smallest all-reduce takes so long, small sizes are latency for the most part, and few of them will do.
_FAR = 0.005
# Up to this size it is measured however long it takes: below, most of a call is latency.
_LARGE = 2**20
# Calls of one size, one behind the other: so long, and so many.
_SECONDS_PER_SIZE = 0.008
_MAX_CALLS = 40
_MIN_CALLS = 3


def check_ranks(group: Group) -> None:
    """Refuse a group that has no link to measure.

    Raises:
        ValueError: it has one rank.
    """
    if group.size < 2:
        raise ValueError("there is no link to measure among one rank")


def measure_link(group: Group, budget: float = 1.5) -> Link:
    """Measure what all-reduces of a group take. Collective. Bytes are not counted.

    Args:
        group: the ranks; more than one.
        budget: seconds. When they have passed, sizes above a megabyte are left out, unless smaller ones are all
            latency, and calls are timed once where latency is long.

    Returns:
        the costs, equal on all ranks.

    Raises:
        ValueError: the group has one rank.
    """
    check_ranks(group)
    with group.counters.paused(), torch.no_grad():
        return _Meter(group, budget).measure()


class _Meter:
    """Times all-reduces; all ranks take the same decisions, by collectives of their own."""

    def __init__(self, group: Group, budget: float) -> None:
        self._group = group
        self._budget = budget
        self._begin = time.perf_counter()
        self._elapsed = 0.0

    def measure(self) -> Link:
        self._time(2**16, 3)  # connections, and TCP's windows, grow with use
        latency = self._time(_SIZES[0], _MIN_CALLS)
        is_far = latency > _FAR
        seconds, costs = latency, []
        for size in _SIZES[::3] if is_far else _SIZES:
            seconds = self._time(size, self._num_calls(size, is_far, at_least=seconds))
            costs.append((float(size), seconds))
            latency, transfer = costs[0][1], seconds - costs[0][1]
            is_enough = self._is_late and size >= _LARGE and transfer > _CLEAR * latency
            if is_enough or transfer > max(_LONG_ENOUGH, latency):
                break
        return Link(self._group.size, rising(costs), self._group.latency)

    @property
    def _is_late(self) -> bool:
        return self._elapsed > self._budget

    def _num_calls(self, size: int, is_far: bool, at_least: float) -> int:
        """How many calls to time, of which each takes at least so many seconds."""
        if is_far and at_least > _SECONDS_PER_SIZE / _MIN_CALLS:
            # It is latency for the most part, which is steady.
            return 1 if self._is_late else _MIN_CALLS
        seconds = self._time(size, 1)
        return max(_MIN_CALLS, min(_MAX_CALLS, int(_SECONDS_PER_SIZE / max(seconds, 1e-6))))

    def _time(self, num_bytes: int, calls: int) -> float:
        """Seconds of the median one of several calls in a row, the mean over ranks."""
        # A ring sends 2(w-1)/w of the payload, of 4 bytes each.
        numel = max(1, round(num_bytes * self._group.size / (2 * (self._group.size - 1)) / 4))
        tensor = torch.zeros(numel, device=self._group.device)
        self._once(tensor)
        moments = [time.perf_counter()]
        for _ in range(calls):
            self._once(tensor)
            moments.append(time.perf_counter())
        seconds = statistics.median(end - begin for begin, end in itertools.pairwise(moments))
        own = torch.tensor([seconds, moments[-1] - self._begin], dtype=torch.float64, device=self._group.device)
        means: list[float] = finish(self._group.all_reduce_mean_(own)).tolist()
        self._elapsed = means[1]
        return means[0]

    def _once(self, tensor: Tensor) -> None:
        finish(self._group.all_reduce_(tensor))
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()


def rising(costs: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Without what disturbed a measurement: more bytes do not take less time."""
    least = math.inf
    found = []
    for num_bytes, seconds in reversed(costs):
        least = min(least, seconds)
        found.append((num_bytes, least))
    return tuple(reversed(found))
