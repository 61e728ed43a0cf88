"""Measures what collectives cost."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.link import BUCKETS_AT_ONCE, LANES_OF_DDP, Cost, Curve, Link
from lightning_commhooks.collectives.steps import Steps, Wait, begun, finish

# A collective in the channel of that number; and what makes one for a number of bytes.
Start = Callable[[int], Steps[object]]
Run = Callable[[int], Start]

# Bytes that a rank sends, by our own count.
_SIZES = tuple(2**exponent for exponent in (8, 12, 14, *range(16, 29)))
# A size whose bytes take so long, and longer than latency does, is the last one: larger ones take as long per byte.
_LONG_ENOUGH = 0.015
# Of steps, so many times longer than latency does: buckets are large, and what is off by the byte adds up.
_OF_STEPS = 3
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


def check_ranks(group: Group) -> None:
    """Refuse a group that has no link to measure.

    Raises:
        ValueError: it has one rank.
    """
    if group.size < 2:
        raise ValueError("there is no link to measure among one rank; use Link.given(bandwidth=, latency=)")


def measure_link(group: Group, budget: float = 1.5, of_steps: bool = False) -> Link:
    """Measure what collectives of a group cost. Collective.

    Bytes are not counted. Each size is measured in a row of calls, for what a link sustains; then once more after a
    pause, for what it lets through at once.

    Args:
        group: the ranks; more than one.
        budget: seconds. When they have passed, sizes above a megabyte are left out, unless smaller ones are all
            latency, and calls are timed once where latency is long. With 10 ms for a message it takes 3 s all the same.
        of_steps: measure what else predictions of whole steps need, too, however long it takes: large sizes, what
            several all-reduces cost that are under way at once, and those of plain DDP.

    Returns:
        the costs, equal on all ranks.

    Raises:
        ValueError: the group has one rank.
    """
    check_ranks(group)
    with group.counters.paused(), torch.no_grad():
        return _Meter(group, budget, of_steps).measure()


class _Meter:
    """Times collectives; all ranks take the same decisions, by collectives of their own."""

    def __init__(self, group: Group, budget: float, of_steps: bool) -> None:
        self._group = group
        self._budget = budget
        self._of_steps = of_steps
        self._message_latency = group.latency
        self._begin = time.perf_counter()
        self._elapsed = 0.0
        self._message_seconds = 0.0
        self._is_far = False

    def measure(self) -> Link:
        run = self._all_reduce(torch.float32)
        self._time(run(2**16), 3)  # connections, and TCP's windows, grow with use
        latency, _ = self._time(run(_SIZES[0]), _MIN_CALLS)
        self._message_seconds = self._message_latency or latency / (2 * (self._group.size - 1))
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
        if self._message_latency and self._of_steps:
            # One connection carries no more than its window in a round trip, so the largest may be slower by the byte.
            curves["plain_ddp"] = self._curve(self._of_ddp, [*others, 4 * largest])
        small = tuple(cost for cost in curve if cost.num_bytes < others[0])
        curves = {kind: c if c is curve or kind == "plain_ddp" else (*small, *c) for kind, c in curves.items()}
        burst = self._burst(run, curve)
        return Link(self._group.size, curves, burst, self._message_latency)

    def _curve(self, run: Run, sizes: Sequence[int]) -> Curve:
        curve: list[Cost] = []
        seconds = self._message_seconds
        for size in sizes:
            start = run(size)
            seconds, cpu_seconds = self._time(start, self._num_calls(start, at_least=seconds))
            is_timed = self._of_steps or run in (self._all_gather, self._all_to_all)
            num = LANES_OF_DDP if run == self._of_ddp else _AT_ONCE
            # Each more than one takes so much longer.
            alone = self._time_several(start, 1) if is_timed else seconds
            more = (self._time_several(start, num) - alone) / (num - 1) if is_timed else seconds
            seconds, cpu_seconds = min(seconds, alone), min(cpu_seconds, alone)
            busy_seconds = max(0.0, min(more, seconds))
            curve.append(Cost(float(size), seconds, cpu_seconds, busy_seconds))
            latency, transfer = curve[0].seconds, seconds - curve[0].seconds
            is_enough = self._is_late and size >= _LARGE and transfer > _CLEAR * latency and not self._of_steps
            if is_enough or transfer > max(_LONG_ENOUGH, latency * (_OF_STEPS if self._of_steps else 1)):
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
        finish(start(0))
        self._wait()
        moments, cpu_begin = [time.perf_counter()], time.process_time()
        for _ in range(calls):
            finish(start(0))
            self._wait()
            moments.append(time.perf_counter())
        cpu_seconds = (time.process_time() - cpu_begin) / calls
        seconds = statistics.median(end - begin for begin, end in itertools.pairwise(moments))
        elapsed = moments[-1] - self._begin
        seconds, cpu_seconds, self._elapsed = self._agreed(seconds, min(cpu_seconds, seconds), elapsed)
        return seconds, cpu_seconds

    def _time_several(self, start: Start, num: int = _AT_ONCE) -> float:
        """Seconds of several calls that are under way at once, the best of some times.

        The best, for a link that others fill is at its best: TCP's windows are open then.
        """
        best = math.inf
        for _ in range(1 if self._is_far else _MIN_CALLS):
            self._agreed(0.0)
            begin = time.perf_counter()
            for steps in [begun(start(number)) for number in range(num)]:
                finish(steps)
            self._wait()
            best = min(best, self._agreed(time.perf_counter() - begin)[0])
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
                finish(start(0))
                self._wait()
                gain.append(cost.seconds - self._agreed(time.perf_counter() - begin)[0])
            gains.append(statistics.median(gain))
            if gains[-1] < gains[-2]:
                break
        return max(gains) if max(gains) > 0.0005 else 0.0

    def _agreed(self, *seconds: float) -> list[float]:
        """Means over ranks, bit-identical on all of them."""
        own = torch.tensor(seconds, dtype=torch.float64, device=self._group.device)
        means: list[float] = finish(self._group.all_reduce_mean_(own)).tolist()
        return means

    def _wait(self) -> None:
        if self._group.device.type == "cuda":
            torch.cuda.current_stream(self._group.device).synchronize()

    def _all_reduce(self, dtype: torch.dtype) -> Run:
        def of_size(num_bytes: int) -> Start:
            numel = self._numel_of_sum(num_bytes, dtype)
            # Those that are under way at once do not share memory.
            num = self._num_at_once if self._of_steps else 1
            tensors = [torch.zeros(numel, dtype=dtype, device=self._group.device) for _ in range(num)]
            return lambda number: self._group.channel(number).all_reduce_(tensors[number % num])

        return of_size

    @property
    def _num_at_once(self) -> int:
        return BUCKETS_AT_ONCE if self._group.device.type == "cpu" else 1

    def _of_ddp(self, num_bytes: int) -> Start:
        numel = self._numel_of_sum(num_bytes, torch.float32)
        tensors = [torch.zeros(numel) for _ in range(LANES_OF_DDP)]

        def start(number: int) -> Steps[None]:
            tensor = tensors[number % LANES_OF_DDP]
            work = dist.all_reduce(tensor, group=self._group.process_group, async_op=True)
            assert work is not None
            yield Wait([work])

        return start

    def _numel_of_sum(self, num_bytes: int, dtype: torch.dtype) -> int:
        # A ring sends 2(w-1)/w of the payload.
        return max(1, round(num_bytes * self._group.size / (2 * (self._group.size - 1)) / dtype.itemsize))

    def _all_gather(self, num_bytes: int) -> Start:
        numel = max(1, round(num_bytes / (self._group.size - 1)))
        tensor = torch.zeros(numel, dtype=torch.uint8, device=self._group.device)
        return lambda number: self._group.channel(number).all_gather(tensor)

    def _all_to_all(self, num_bytes: int) -> Start:
        numel = max(1, round(num_bytes / (self._group.size - 1)))
        tensor = torch.zeros((self._group.size, numel), dtype=torch.uint8, device=self._group.device)
        return lambda number: self._group.channel(number).all_to_all(tensor)


def _rising(curve: Sequence[Cost]) -> Curve:
    """Without what disturbed a measurement: more bytes do not take less time."""
    seconds = cpu_seconds = busy_seconds = math.inf
    rising = []
    for cost in reversed(curve):
        seconds, cpu_seconds = min(seconds, cost.seconds), min(cpu_seconds, cost.cpu_seconds)
        busy_seconds = min(busy_seconds, cost.occupancy)
        rising.append(Cost(cost.num_bytes, seconds, cpu_seconds, busy_seconds))
    return tuple(reversed(rising))
