"""Seconds of all-reduces by the bytes that a rank sends."""

from __future__ import annotations

import bisect
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Link:
    """Time that all-reduces of float32 take among some ranks, as measured.

    Attributes:
        world_size: number of ranks.
        costs: pairs of bytes that a rank sends, by the formulas in `collectives.group`, growing, and seconds.
        message_seconds: that a message takes, if ranks are so far from each other that they send directly; else 0.
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
        """Seconds of an all-reduce in which a rank sends so many bytes: on the line between its neighbors."""
        index = bisect.bisect_right(self.costs, num_bytes, key=lambda cost: cost[0])
        if index == 0:
            return self.latency
        is_between = index < len(self.costs)
        (low, begin), (high, end) = self.costs[index - 1 : index + 1] if is_between else self._last_part
        return begin + (num_bytes - low) / (high - low) * (end - begin)

    @property
    def _last_part(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """The largest size, and the first of at least a quarter of it: beyond, costs go on along the line."""
        last = self.costs[-1]
        return next(cost for cost in self.costs if cost[0] >= last[0] / 4 or cost is self.costs[-2]), last

    def as_dict(self) -> dict[str, Any]:
        """As plain numbers, with `latency` in seconds and `bandwidth` in bytes per second."""
        return {**asdict(self), "latency": self.latency, "bandwidth": self.bandwidth}
