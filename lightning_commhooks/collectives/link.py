"""The duration of all-reduces as a function of the bytes that a rank sends, and its measurement."""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.steps import finish

# Bytes that a rank sends, as counted by this library.
_SIZES = tuple(2**exponent for exponent in (8, 12, 14, *range(16, 29)))
# Seconds of transfer, beyond latency, after which no larger size is measured: the time per byte is constant then.
_LONG_ENOUGH = 0.015
# After the budget, transfer only has to take this fraction of latency, which is more than latency varies.
_CLEAR = 0.1
# Seconds of the smallest all-reduce above which latency dominates small sizes, so that fewer of them are measured.
_FAR = 0.005
# Sizes up to this one are measured regardless of the budget: latency dominates smaller ones.
_LARGE = 2**20
# Limits on consecutive calls of one size, in seconds and number.
_SECONDS_PER_SIZE = 0.008
_MAX_CALLS = 40
_MIN_CALLS = 3


@dataclass(frozen=True)
class Link:
    """The measured duration of float32 all-reduces among some ranks.

    Attributes:
        world_size: number of ranks.
        costs: pairs of the bytes that a rank sends, by the formulas in `collectives.group`, and seconds, sorted.
        message_seconds: seconds that a message takes if ranks are distant and send directly; else 0.
    """

    world_size: int
    costs: tuple[tuple[float, float], ...]
    message_seconds: float = 0.0

    @property
    def latency(self) -> float:
        """Seconds of the smallest all-reduce."""
        return self.costs[0][1]

    @property
    def bandwidth(self) -> float:
        """Bytes per second that a rank sends in a large all-reduce."""
        (low, begin), (high, end) = self._last_part
        return 1 / ((end - begin) / (high - low) or end / high)

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds of an all-reduce in which a rank sends `num_bytes`, by linear interpolation."""
        index = bisect.bisect_right(self.costs, num_bytes, key=lambda cost: cost[0])
        if index == 0:
            return self.latency
        is_between = index < len(self.costs)
        (low, begin), (high, end) = self.costs[index - 1 : index + 1] if is_between else self._last_part
        return begin + (num_bytes - low) / (high - low) * (end - begin)

    @property
    def _last_part(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """The first size of at least a quarter of the largest, and the largest: the line through them extrapolates."""
        last = self.costs[-1]
        return next(cost for cost in self.costs if cost[0] >= last[0] / 4 or cost is self.costs[-2]), last

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers, with `latency` in seconds and `bandwidth` in bytes per second."""
        return {**asdict(self), "latency": self.latency, "bandwidth": self.bandwidth}


def check_ranks(group: Group) -> None:
    """Require two or more ranks, which have a link to measure; raises a `ValueError`."""
    if group.size < 2:
        raise ValueError("there is no link to measure among one rank")


def measure_link(group: Group, budget: float = 1.5) -> Link:
    """Measure the duration of a group's all-reduces, equal on all ranks. Collective. Bytes are not counted.

    After `budget` seconds, sizes above a megabyte are skipped, unless latency dominates all smaller ones, and calls
    with a long latency are timed once only.
    """
    check_ranks(group)
    with group.counters.timing.paused(), torch.no_grad():
        return _Meter(group, budget).measure()


class _Meter:
    """Times all-reduces; all ranks make the same decisions, from averaged times."""

    def __init__(self, group: Group, budget: float) -> None:
        self._group = group
        self._budget = budget
        self._begin = time.perf_counter()
        self._elapsed = 0.0

    def measure(self) -> Link:
        self._time(2**16, 3)  # opens connections and grows TCP's windows
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
        """Return the number of calls to time, each of which takes `at_least` seconds."""
        if is_far and at_least > _SECONDS_PER_SIZE / _MIN_CALLS:
            # Mostly latency, which varies little.
            return 1 if self._is_late else _MIN_CALLS
        seconds = self._time(size, 1)
        return max(_MIN_CALLS, min(_MAX_CALLS, int(_SECONDS_PER_SIZE / max(seconds, 1e-6))))

    def _time(self, num_bytes: int, calls: int) -> float:
        """Return the median seconds of several consecutive calls, averaged over ranks."""
        # A ring sends 2(w-1)/w of the payload, in elements of 4 bytes.
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
    """Remove disturbances from a measurement, so that more bytes never take less time."""
    least = math.inf
    found = []
    for num_bytes, seconds in reversed(costs):
        least = min(least, seconds)
        found.append((num_bytes, least))
    return tuple(reversed(found))
