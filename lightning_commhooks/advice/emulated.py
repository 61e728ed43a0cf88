"""Collectives without a network that take as long as they would over it, to predict the step times of hooks."""

from __future__ import annotations

import functools
import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lightning_commhooks.collectives.counters import Counters
from lightning_commhooks.collectives.direct import FAR, takes_one_round
from lightning_commhooks.collectives.group import Group, Kind
from lightning_commhooks.collectives.steps import Steps, Wait

# Latencies that a round of messages takes in gloo's own collectives, as measured: the sender may have to ask first.
RING_LATENCIES = 2.5
# Buckets that plain DDP has in flight at once: a gloo group has this number of threads.
_BUCKETS_OF_DDP = 2


@dataclass(frozen=True)
class Network:
    """A network between ranks, each on its own host.

    Attributes:
        bandwidth: bytes per second that a rank can send while it receives at the same rate.
        latency: seconds that a message between two ranks takes.
        world_size: number of ranks.
    """

    bandwidth: float
    latency: float
    world_size: int

    @property
    def is_far(self) -> bool:
        """Whether the latency is so high that hooks on CPU send messages directly instead of around a ring."""
        return self.latency > FAR


class _Wire:
    """The bandwidth of one rank, used by one collective after another."""

    def __init__(self, clock: Any, num_at_once: int) -> None:
        self.clock = clock
        # End times of the last `num_at_once` collectives: the next one begins after the earliest of them.
        self._ends = deque([-math.inf] * num_at_once, maxlen=num_at_once)
        self._free = -math.inf
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="lightning_commhooks_wire")
        # Ends the thread as soon as the wire is garbage-collected.
        weakref.finalize(self, self._executor.shutdown).atexit = False

    def begin(self, delay: float, busy: float, work: Callable[[], Tensor], early: float = 0.0) -> Future[Tensor]:
        """Begin a collective whose messages travel for `delay` seconds and whose bytes take `busy` seconds.

        The bytes of other collectives wait meanwhile. It began `early` seconds ago; `work` makes its result.
        """
        started = self.clock.perf_counter() - early

        def run() -> Tensor:
            with torch.no_grad():
                return self._run(max([started, *self._ends][:2]), delay, busy, work)

        return self._executor.submit(run)

    def _run(self, started: float, delay: float, busy: float, work: Callable[[], Tensor]) -> Tensor:
        end = max(started + delay, self._free) + busy
        self._ends.append(end)
        result = work()
        self.clock.sleep(max(0.0, end - self.clock.perf_counter()))
        # Later than `end` if the processors were busy.
        self._free = max(end, self.clock.perf_counter())
        return result


@functools.cache
def _cycles_per_second(device: torch.device) -> float:
    """Measure how many cycles of `torch.cuda._sleep` make a second."""
    cycles = 20_000_000
    stream = torch.cuda.current_stream(device)
    torch.cuda._sleep(1000)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record(stream)
    torch.cuda._sleep(cycles)
    end.record(stream)
    end.synchronize()
    return float(cycles / (begin.elapsed_time(end) / 1e3))


class Emulated:
    """A transport to emulated ranks: all ranks equal this one, and collectives take as long as over a network.

    Results have the right shapes, and sums assume equal ranks. `advice.errors` measures how exact a hook is.

    Args:
        network: the network between the ranks.
        rank: this rank.
        has_hook: whether a hook sends the gradients; DDP's own all-reduces differ.
        on_stream: whether collectives are queued on the current CUDA stream, as with NCCL.
        clock: a replacement for the module `time`.
        wire: a wire to share; by default, a new one.
    """

    def __init__(
        self,
        network: Network,
        rank: int = 0,
        *,
        has_hook: bool = True,
        on_stream: bool = False,
        clock: Any = time,
        wire: _Wire | None = None,
    ) -> None:
        is_direct = network.is_far and has_hook and not on_stream
        self.is_ordered, self.latency = not is_direct, network.latency if is_direct else 0.0
        self.size, self.rank = network.world_size, rank
        self._network, self._on_stream = network, on_stream
        self._of_message = network.latency * (1.0 if is_direct or on_stream else RING_LATENCIES)
        self._wire = wire or _Wire(clock, 0 if has_hook else _BUCKETS_OF_DDP)

    def channel(self, number: int, ranks: object = None) -> Emulated:
        """Return itself: all buckets share the wire."""
        return self

    def among(self, members: Sequence[int], part: int) -> Emulated:
        """Return a transport to some of the ranks, over the same wire."""
        network = Network(self._network.bandwidth, self._network.latency, len(members))
        return Emulated(network, list(members).index(self.rank), on_stream=self._on_stream, wire=self._wire)

    def num_rounds(self, num_bytes: int) -> int:
        """Return the number of rounds of messages in which a tensor is summed."""
        if self.is_ordered:
            return 2 * (self.size - 1)
        return 1 if takes_one_round(num_bytes, self.size, self.latency) else 2

    def sum_(self, tensor: Tensor) -> Steps[Tensor]:
        """Multiply a tensor by the number of ranks."""
        num_bytes = 2 * (self.size - 1) / self.size * tensor.nbytes
        return self._take("all_reduce", num_bytes, tensor, lambda: tensor.mul_(self.size))

    def expect(self, like: Tensor) -> float:
        """Return the current time, for `gather`."""
        return float(self._wire.clock.perf_counter())

    def gather(self, tensor: Tensor, expected: object = None) -> Steps[Tensor]:
        """Return one copy of the tensor for each rank."""
        num_bytes = (self.size - 1) * tensor.nbytes
        announced = expected if isinstance(expected, float) else math.inf
        return self._take("all_gather", num_bytes, tensor, lambda: tensor.repeat(self.size, 1), announced)

    def exchange(self, chunks: Tensor) -> Steps[Tensor]:
        """Return one copy of this rank's own chunk for each rank."""
        num_bytes = (self.size - 1) / self.size * chunks.nbytes
        own = chunks[self.rank : self.rank + 1]
        return self._take("all_to_all", num_bytes, chunks, lambda: own.repeat(self.size, 1))

    def _take(
        self, kind: Kind, num_bytes: float, tensor: Tensor, work: Callable[[], Tensor], announced: float = math.inf
    ) -> Steps[Tensor]:
        delay, busy = self._num_messages(kind) * self._of_message, num_bytes / self._network.bandwidth
        if self._on_stream:
            torch.cuda._sleep(int((delay + busy) * _cycles_per_second(tensor.device)))
            result = work()
            yield Wait(())
            return result
        # Receives were posted by `expect`: the messages that announce them have arrived or are in flight.
        early = min(max(0.0, self._wire.clock.perf_counter() - announced), self.latency)
        future = self._wire.begin(delay, busy, work, early)
        yield Wait([SimpleNamespace(wait=future.result)])
        return future.result()

    def _num_messages(self, kind: Kind) -> int:
        if self.latency:
            return 3 if kind == "all_reduce" and self.size > 2 else 2
        return {"all_reduce": 2 * (self.size - 1), "all_gather": self.size - 1}.get(kind, 1)


def emulated_group(transport: Emulated, counters: Counters, device: torch.device) -> Group:
    """Return the group of emulated ranks, each on its own node."""
    return Group(transport, counters, device, nodes=[[rank] for rank in range(transport.size)], are_alike=True)
