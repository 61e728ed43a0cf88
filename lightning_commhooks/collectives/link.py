"""What collectives cost: seconds and processor time by the bytes that a rank sends, measured or given."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch

from lightning_commhooks.collectives.group import Group

# Begins a collective, and returns what waits for it; and what makes one for a number of bytes.
Start = Callable[[], Callable[[], object]]
Run = Callable[[int], Start]
Kind = Literal["all_reduce", "all_gather", "all_to_all"]

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
# Kinds besides the all-reduce of float32 begin with this size: below, they cost what that one costs.
_FIRST_OF_OTHERS = 2**16
_IDLE_SECONDS = 0.03
# Collectives that are under way at once, to see whether they get more out of the link than one.
_AT_ONCE = 4
# How often they are before they are timed: TCP settles slowly, and takes several times the processor before.
_SETTLE = 3


@dataclass(frozen=True)
class Cost:
    """What one collective costs a rank.

    Attributes:
        num_bytes: that it sends, by the formulas in `collectives.group`.
        seconds: from begin to end, one of many in a row.
        cpu_seconds: of this process's processors, kernel included.
        busy_seconds: of each call, when several are under way at once; `None`: as `seconds`.
    """

    num_bytes: float
    seconds: float
    cpu_seconds: float = 0.0
    busy_seconds: float | None = None

    @property
    def occupancy(self) -> float:
        """Seconds that it keeps the link from others."""
        return self.seconds if self.busy_seconds is None else min(self.seconds, self.busy_seconds)


Curve = tuple[Cost, ...]


@dataclass(frozen=True)
class Link:
    """What collectives among some ranks cost.

    Attributes:
        world_size: number of ranks that this is about.
        curves: costs at growing sizes, by kind of collective: `"all_reduce"`, and others where they differ, as
            `"all_gather"`, `"all_to_all"` and `"all_reduce:bfloat16"`.
        burst_seconds: what a link that was idle sends faster than its bandwidth allows for long, in seconds of that
            bandwidth: routers and network cards let some data through at once.
    """

    world_size: int
    curves: Mapping[str, Curve]
    burst_seconds: float = 0.0

    @classmethod
    def given(cls, *, bandwidth: float, latency: float, world_size: int) -> Link:
        """A link as it is sold, without any cost to processors.

        Args:
            bandwidth: bytes per second that a rank can send, while it receives as many.
            latency: seconds that a message takes to the next rank.
            world_size: number of ranks.

        Raises:
            ValueError: a value is out of range.
        """
        if not bandwidth > 0:
            raise ValueError(f"bandwidth must be positive, in bytes per second, is {bandwidth!r}")
        if not latency >= 0:
            raise ValueError(f"latency must be at least 0, in seconds, is {latency!r}")
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, is {world_size!r}")
        rounds = {"all_reduce": 2 * (world_size - 1), "all_gather": world_size - 1, "all_to_all": 1}
        curves = {
            kind: tuple(Cost(num_bytes, num * latency + num_bytes / bandwidth) for num_bytes in (0.0, 2.0**20))
            for kind, num in rounds.items()
        }
        return cls(world_size, curves)

    @property
    def latency(self) -> float:
        """Seconds of the smallest all-reduce."""
        return self.curves["all_reduce"][0].seconds

    @property
    def bandwidth(self) -> float:
        """Bytes per second that a rank sends in a large all-reduce of float32."""
        low, high = _last_part(self.curves["all_reduce"])
        seconds_per_byte = (high.seconds - low.seconds) / (high.num_bytes - low.num_bytes)
        return 1 / (seconds_per_byte or high.seconds / high.num_bytes)

    @property
    def takes_processors(self) -> bool:
        """Whether what collectives cost processors is known; it is not, of a link that was given."""
        return any(cost.cpu_seconds for curve in self.curves.values() for cost in curve)

    def cost(self, kind: Kind, num_bytes: float, dtype: torch.dtype = torch.float32) -> Cost:
        """What a collective costs.

        Args:
            kind: of collective.
            num_bytes: that a rank sends in it.
            dtype: what is summed, in an all-reduce.
        """
        named = f"{kind}:{dtype}".replace("torch.", "")
        return _at(self.curves.get(named) or self.curves.get(kind) or self.curves["all_reduce"], num_bytes)

    def scaled(self, world_size: int) -> Link:
        """The same network with another number of ranks: more or fewer rounds of messages, the same bandwidth."""
        if world_size == self.world_size or self.world_size == 1:
            return replace(self, world_size=world_size)
        more = (world_size - 1) / (self.world_size - 1) - 1
        curves = {
            kind: tuple(replace(cost, seconds=cost.seconds + more * curve[0].seconds) for cost in curve)
            for kind, curve in self.curves.items()
        }
        return replace(self, world_size=world_size, curves=curves)

    def no_faster_than(self, other: Link) -> Link:
        """This link, but where the other one takes longer, as long; with the processor time of this one."""
        curves = {}
        for kind, own in self.curves.items():
            theirs = other.curves.get(kind) or other.curves[kind.split(":")[0]]
            sizes = sorted({cost.num_bytes for cost in (*own, *theirs)})
            pairs = [(_at(own, size), _at(theirs, size)) for size in sizes]
            curves[kind] = tuple(
                Cost(a.num_bytes, max(a.seconds, b.seconds), a.cpu_seconds, max(a.occupancy, b.occupancy))
                for a, b in pairs
            )
        return Link(self.world_size, curves)

    def as_dict(self) -> dict[str, Any]:
        """As plain numbers, with `latency` in seconds and `bandwidth` in bytes per second."""
        curves = {kind: [asdict(cost) for cost in curve] for kind, curve in self.curves.items()}
        summary = {"world_size": self.world_size, "latency": self.latency, "bandwidth": self.bandwidth}
        return {**summary, "burst_seconds": self.burst_seconds, "curves": curves}


def _last_part(curve: Curve) -> tuple[Cost, Cost]:
    """The largest size, and the first of at least a quarter of it: beyond, costs go on along the line through both."""
    last = curve[-1]
    return next(cost for cost in curve if cost.num_bytes >= last.num_bytes / 4 or cost is curve[-2]), last


def _at(curve: Curve, num_bytes: float) -> Cost:
    """The cost of a size, on the line between its neighbours."""
    index = bisect.bisect_right(curve, num_bytes, key=lambda cost: cost.num_bytes)
    if index == 0:
        return replace(curve[0], num_bytes=num_bytes)
    low, high = (curve[index - 1], curve[index]) if index < len(curve) else _last_part(curve)
    share = (num_bytes - low.num_bytes) / (high.num_bytes - low.num_bytes)

    def between(begin: float, end: float) -> float:
        return begin + share * (end - begin)

    return Cost(
        num_bytes,
        between(low.seconds, high.seconds),
        between(low.cpu_seconds, high.cpu_seconds),
        between(low.occupancy, high.occupancy),
    )


def _rising(curve: Sequence[Cost]) -> Curve:
    """Without what disturbed a measurement: more bytes do not take less time."""
    seconds = cpu_seconds = busy_seconds = math.inf
    rising = []
    for cost in reversed(curve):
        seconds, cpu_seconds = min(seconds, cost.seconds), min(cpu_seconds, cost.cpu_seconds)
        busy_seconds = min(busy_seconds, cost.occupancy)
        rising.append(Cost(cost.num_bytes, seconds, cpu_seconds, busy_seconds))
    return tuple(reversed(rising))


def check_ranks(group: Group) -> None:
    """Refuse a group that has no link to measure.

    Raises:
        ValueError: it has one rank.
    """
    if group.size < 2:
        raise ValueError("there is no link to measure among one rank; use Link.given(bandwidth=, latency=)")


def measure_link(group: Group, budget: float = 1.5) -> Link:
    """Measure what collectives of a group cost. Collective.

    Bytes are not counted. Each size is measured in a row of calls, for what a link sustains; then once more after a
    pause, for what it lets through at once.

    Args:
        group: the ranks; more than one.
        budget: seconds. When they have passed, sizes above a megabyte are left out, unless smaller ones are all
            latency, and calls are timed once where latency is long. With 10 ms for a message it takes 3 s all the same.

    Returns:
        the costs, equal on all ranks.

    Raises:
        ValueError: the group has one rank.
    """
    check_ranks(group)
    with group.counters.paused(), torch.no_grad():
        return _Meter(group, budget).measure()


class _Meter:
    """Times collectives; all ranks take the same decisions, by collectives of their own."""

    def __init__(self, group: Group, budget: float) -> None:
        self._group = group
        self._budget = budget
        self._begin = time.perf_counter()
        self._elapsed = 0.0
        self._message_seconds = 0.0
        self._is_far = False

    def measure(self) -> Link:
        run = self._all_reduce(torch.float32)
        self._time(run(2**16), 3)  # connections, and TCP's windows, grow with use
        latency, _ = self._time(run(_SIZES[0]), _MIN_CALLS)
        self._message_seconds = latency / (2 * (self._group.size - 1))
        self._is_far = latency > _FAR
        curve = self._curve(run, _SIZES[::3] if self._is_far else _SIZES)
        largest = int(curve[-1].num_bytes)
        others = sorted({largest, *(s for s in _SIZES if _FIRST_OF_OTHERS <= s < largest)})[-1::-2][::-1]
        if self._is_far:
            others = [_SIZES[0], largest]
        curves = {"all_reduce": curve}
        if self._group.device.type == "cpu":  # sums of 16 bit are slow there
            for dtype in (torch.bfloat16, torch.float16):
                curves[f"all_reduce:{dtype}".replace("torch.", "")] = self._curve(self._all_reduce(dtype), others)
        if not (self._is_late or self._is_far):
            for _ in range(_SETTLE):
                self._time_several(self._all_gather(largest))
        curves["all_gather"] = self._curve(self._all_gather, others)
        curves["all_to_all"] = self._curve(self._all_to_all, others)
        small = tuple(cost for cost in curve if cost.num_bytes < others[0])
        curves = {kind: c if c is curve else (*small, *c) for kind, c in curves.items()}
        return Link(self._group.size, curves, self._burst(run, curve))

    def _curve(self, run: Run, sizes: Sequence[int]) -> Curve:
        curve: list[Cost] = []
        seconds = self._message_seconds
        for size in sizes:
            start = run(size)
            seconds, cpu_seconds = self._time(start, self._num_calls(start, at_least=seconds))
            busy_seconds = self._time_several(start) if run in (self._all_gather, self._all_to_all) else seconds
            curve.append(Cost(float(size), seconds, cpu_seconds, busy_seconds))
            latency, transfer = curve[0].seconds, seconds - curve[0].seconds
            is_enough = self._is_late and size >= _LARGE and transfer > _CLEAR * latency
            if is_enough or transfer > max(_LONG_ENOUGH, latency):
                break
        return _rising(curve)

    @property
    def _is_late(self) -> bool:
        return self._elapsed > self._budget

    def _num_calls(self, start: Start, at_least: float) -> int:
        """How many calls to time, of which each takes at least so many seconds."""
        if self._is_far and at_least > _SECONDS_PER_SIZE / _MIN_CALLS:
            # It is latency for the most part, which is steady.
            return 1 if self._is_late else _MIN_CALLS
        seconds, _ = self._time(start, 1)
        return max(_MIN_CALLS, min(_MAX_CALLS, int(_SECONDS_PER_SIZE / max(seconds, 1e-6))))

    def _time(self, start: Start, calls: int) -> tuple[float, float]:
        """Seconds and processor seconds of one of several calls in a row: of the median one, the mean over ranks."""
        start()()
        self._wait()
        moments, cpu_begin = [time.perf_counter()], time.process_time()
        for _ in range(calls):
            start()()
            self._wait()
            moments.append(time.perf_counter())
        cpu_seconds = (time.process_time() - cpu_begin) / calls
        seconds = statistics.median(end - begin for begin, end in itertools.pairwise(moments))
        elapsed = moments[-1] - self._begin
        seconds, cpu_seconds, self._elapsed = self._agreed(seconds, min(cpu_seconds, seconds), elapsed)
        return seconds, cpu_seconds

    def _time_several(self, start: Start) -> float:
        """Seconds of each of several calls that are under way at once, the best of some times.

        The best, for a link that others fill is at its best: TCP's windows are open then.
        """
        best = math.inf
        for _ in range(1 if self._is_far else _MIN_CALLS):
            self._agreed(0.0)
            begin = time.perf_counter()
            for wait in [start() for _ in range(_AT_ONCE)]:
                wait()
            self._wait()
            best = min(best, self._agreed((time.perf_counter() - begin) / _AT_ONCE)[0])
        return best

    def _burst(self, run: Run, curve: Curve) -> float:
        """How much less time a call takes after a pause: the most of some sizes, if it is more than noise."""
        gains = [0.0]
        for cost in curve:
            if cost.seconds - curve[0].seconds < 0.001 or cost.seconds > _IDLE_SECONDS:
                continue
            start, gain = run(int(cost.num_bytes)), []
            for _ in range(3):
                self._wait()
                time.sleep(_IDLE_SECONDS)
                self._agreed(0.0)
                begin = time.perf_counter()
                start()()
                self._wait()
                gain.append(cost.seconds - self._agreed(time.perf_counter() - begin)[0])
            gains.append(statistics.median(gain))
            if gains[-1] < gains[-2]:
                break
        return max(gains) if max(gains) > 0.0005 else 0.0

    def _agreed(self, *seconds: float) -> list[float]:
        """Means over ranks, bit-identical on all of them."""
        own = torch.tensor(seconds, dtype=torch.float64, device=self._group.device)
        means: list[float] = self._group.all_reduce_mean_(own).tolist()
        return means

    def _wait(self) -> None:
        if self._group.device.type == "cuda":
            torch.cuda.current_stream(self._group.device).synchronize()

    def _all_reduce(self, dtype: torch.dtype) -> Run:
        def of_size(num_bytes: int) -> Start:
            # A ring sends 2(w-1)/w of the payload.
            numel = max(1, round(num_bytes * self._group.size / (2 * (self._group.size - 1)) / dtype.itemsize))
            tensor = torch.zeros(numel, dtype=dtype, device=self._group.device)
            return lambda: functools.partial(self._group.all_reduce_, tensor)

        return of_size

    def _all_gather(self, num_bytes: int) -> Start:
        numel = max(1, round(num_bytes / (self._group.size - 1)))
        tensor = torch.zeros(numel, dtype=torch.uint8, device=self._group.device)
        return lambda: self._group._begin_all_gather(tensor)

    def _all_to_all(self, num_bytes: int) -> Start:
        numel = max(1, round(num_bytes / (self._group.size - 1)))
        tensor = torch.zeros((self._group.size, numel), dtype=torch.uint8, device=self._group.device)
        return lambda: self._group._begin_all_to_all(tensor)
