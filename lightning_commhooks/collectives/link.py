"""Costs of collectives: seconds and processor time by the bytes that a rank sends."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from lightning_commhooks.collectives.communicator import Kind
from lightning_commhooks.collectives.direct import FAR

# Latencies that a round of messages takes in gloo's own collectives, by measuring: the sender may have to ask first.
_RING_LATENCIES = 2.5
# Buckets that plain DDP has under way at once: PyTorch gives a gloo group as many threads.
LANES_OF_DDP = 2
# Buckets that an engine has under way at once on CPU, where ranks have to agree on an order.
BUCKETS_AT_ONCE = 4


@dataclass(frozen=True)
class Cost:
    """Cost of one collective to a rank.

    Attributes:
        num_bytes: that it sends, by the formulas in `collectives.group`.
        seconds: from begin to end, one of many in a row.
        cpu_seconds: of this process's processors, kernel included.
        busy_seconds: that it keeps the link from others that are under way at once; `None`: as `seconds`.
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
    """Costs of collectives among some ranks.

    Attributes:
        world_size: number of ranks that this is about.
        curves: costs at growing sizes, by kind of collective: `"all_reduce"`, and others where they differ, as
            `"all_gather"`, `"all_to_all"`, `"all_reduce:bfloat16"`, and `"plain_ddp"`: all-reduces without a hook.
        burst_seconds: what a link that was idle sends faster than its bandwidth allows for long, in seconds of that
            bandwidth: routers and network cards let some data through at once.
        message_seconds: that a message takes, if ranks are so far from each other that they send directly; else 0.
        num_at_once: collectives that may be under way at once; 0: any number.
    """

    world_size: int
    curves: Mapping[str, Curve]
    burst_seconds: float = 0.0
    message_seconds: float = 0.0
    num_at_once: int = 0

    @classmethod
    def given(cls, *, bandwidth: float, latency: float, world_size: int, on_cpu: bool = True) -> Link:
        """A link as it is sold, without any cost to processors.

        Args:
            bandwidth: bytes per second that a rank can send, while it receives as many.
            latency: seconds that a message takes to another rank.
            world_size: number of ranks.
            on_cpu: whether tensors are on CPU, sent by gloo: several buckets are under way at once, and messages go
                directly to far ranks.

        Raises:
            ValueError: a value is out of range.
        """
        if not bandwidth > 0:
            raise ValueError(f"bandwidth must be positive, in bytes per second, is {bandwidth!r}")
        if not latency >= 0:
            raise ValueError(f"latency must be at least 0, in seconds, is {latency!r}")
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, is {world_size!r}")
        is_far = on_cpu and latency > FAR
        a_round = latency * (_RING_LATENCIES if on_cpu else 1)
        ring = {"all_reduce": 2 * (world_size - 1), "all_gather": world_size - 1, "all_to_all": 1}
        delays = {kind: num * a_round for kind, num in ring.items()}
        if is_far:
            delays["plain_ddp"] = delays["all_reduce"]
            delays |= {"all_reduce": _sum_latencies(world_size) * latency}
            delays |= {"all_gather": 2 * latency, "all_to_all": 2 * latency}

        def cost(delay: float, num_bytes: float) -> Cost:
            seconds = num_bytes / bandwidth
            return Cost(num_bytes, delay + seconds, busy_seconds=seconds if on_cpu else None)

        curves = {kind: (cost(delay, 0.0), cost(delay, 2.0**20)) for kind, delay in delays.items()}
        message_seconds = latency if is_far else 0.0
        return cls(world_size, curves, message_seconds=message_seconds)

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

    @property
    def without_hook(self) -> Link:
        """Costs to DDP itself, which averages by all-reduces that are not ours."""
        curves = dict(self.curves)
        if "plain_ddp" in curves:
            sums = {kind: curves["plain_ddp"] for kind in curves if kind.startswith("all_reduce")}
            curves = {**curves, **sums}
        return replace(self, curves=curves, num_at_once=LANES_OF_DDP)

    def cost(self, kind: Kind, num_bytes: float, dtype: torch.dtype = torch.float32) -> Cost:
        """Cost of a collective.

        Args:
            kind: of collective.
            num_bytes: that a rank sends in it.
            dtype: what is summed, in an all-reduce.
        """
        return _at(self._curve(f"{kind}:{dtype}".replace("torch.", "")), num_bytes)

    def _curve(self, kind: str) -> Curve:
        return self.curves.get(kind) or self.curves.get(kind.split(":")[0]) or self.curves["all_reduce"]

    def scaled(self, world_size: int) -> Link:
        """The same network with another number of ranks: more or fewer rounds of messages, the same bandwidth."""
        if world_size == self.world_size or self.world_size == 1:
            return replace(self, world_size=world_size)
        of_ring = (world_size - 1) / (self.world_size - 1) - 1
        of_direct = (_sum_latencies(world_size) - _sum_latencies(self.world_size)) * self.message_seconds

        def more(kind: str) -> float:
            if not self.message_seconds or kind == "plain_ddp":
                return of_ring * self.curves[kind][0].seconds
            return of_direct if kind.startswith("all_reduce") else 0.0

        curves = {
            kind: tuple(replace(cost, seconds=cost.seconds + more(kind)) for cost in c)
            for kind, c in self.curves.items()
        }
        return replace(self, world_size=world_size, curves=curves)

    def no_faster_than(self, other: Link) -> Link:
        """This link, but where the other one takes longer, as long; with the processor time of this one."""
        curves = {}
        for kind in {**self.curves, **other.curves}:
            own, theirs = self._curve(kind), other._curve(kind)
            sizes = sorted({cost.num_bytes for cost in (*own, *theirs)})
            pairs = [(_at(own, size), _at(theirs, size)) for size in sizes]
            curves[kind] = tuple(
                Cost(a.num_bytes, max(a.seconds, b.seconds), a.cpu_seconds, max(a.occupancy, b.occupancy))
                for a, b in pairs
            )
        message_seconds = max(self.message_seconds, other.message_seconds)
        return Link(self.world_size, curves, message_seconds=message_seconds, num_at_once=self.num_at_once)

    def as_dict(self) -> dict[str, Any]:
        """As plain numbers, with `latency` in seconds and `bandwidth` in bytes per second."""
        curves = {kind: [asdict(cost) for cost in curve] for kind, curve in self.curves.items()}
        summary = {"world_size": self.world_size, "latency": self.latency, "bandwidth": self.bandwidth}
        others = {name: getattr(self, name) for name in ("burst_seconds", "message_seconds")}
        return {**summary, **others, "curves": curves}


def _sum_latencies(world_size: int) -> int:
    """How many latencies a sum by direct messages takes."""
    return 2 if world_size == 2 else 3


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
