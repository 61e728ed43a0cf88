"""The duration of all-reduces as a function of the bytes that a rank sends."""

from __future__ import annotations

import bisect
from dataclasses import asdict, dataclass
from typing import Any


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
