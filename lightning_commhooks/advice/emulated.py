"""Collectives without a network that take as long as a link would: what would this hook cost over that link?"""

from __future__ import annotations

import functools
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from lightning_commhooks.collectives.communicator import Kind
from lightning_commhooks.collectives.counters import Counters
from lightning_commhooks.collectives.direct import takes_one_round
from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.link import Cost, Link
from lightning_commhooks.collectives.steps import Steps, Wait, finish

# Processor time of a collective is spent in portions, with pauses between them, of this many seconds each on the whole.
_PORTION = 0.002
# A copy that PyTorch does not divide among threads.
_COPIED_NUMEL = 2**14


class HostClock:
    """Passes the time of a collective on this processor. Another one can be put in its place in tests."""

    def __init__(self) -> None:
        self._source = torch.zeros(_COPIED_NUMEL, dtype=torch.complex128)
        self._target = torch.empty_like(self._source)

    def now(self) -> float:
        """Seconds."""
        return time.perf_counter()

    def cpu(self) -> float:
        """Processor seconds that the calling thread has used."""
        return time.thread_time()

    def sleep(self, seconds: float) -> None:
        """Let other threads run."""
        time.sleep(seconds)

    def burn(self, until: float) -> None:
        """Copy memory, without holding the interpreter, until the thread has used so many processor seconds."""
        while time.thread_time() < until:
            self._target.copy_(self._source)


class _Wire:
    """One link, used by one collective after another, and the thread of those that go on by themselves."""

    def __init__(self, clock: HostClock, link: Link) -> None:
        self.clock = clock
        self._burst = self._saved = link.burst_seconds
        # When the last ones ended: no other one begins before the first of them has, if that is limited.
        self._ends = deque([-math.inf] * link.num_at_once, maxlen=link.num_at_once)
        self._free = clock.now()
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None

    def start(self, collective: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Have it done in the thread; returns what waits for the result."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="lightning_commhooks_wire")
            # Its thread ends when nobody has the link any more, not a moment later.
            weakref.finalize(self, self._executor.shutdown).atexit = False

        def run() -> Tensor:
            with self._lock, torch.no_grad():
                return collective()

        return self._executor.submit(run).result

    def pass_time(self, cost: Cost, fastest: float, started: float, work: Callable[[], Tensor]) -> Tensor:
        """Take the time of one collective, and let `work`, which makes its result, be a part of it.

        What was started before keeps the link for some time from `started`, by the clock. It takes `fastest` seconds
        at least, however long the link was idle.
        """
        clock = self.clock
        cpu_begin, before = clock.cpu(), self._free
        if self._ends:
            started = max(started, self._ends[0])
        # A token bucket, in seconds of the link.
        self._saved = min(self._burst, self._saved + max(0.0, started - before))
        end = max(started + cost.seconds, before + cost.occupancy)
        gain = min(self._saved, end - started - fastest)
        end -= gain
        self._saved -= gain
        self._ends.append(end)
        begin = clock.now()
        result = work()
        seconds = max(0.0, end - begin)
        portions = max(1, round(seconds / _PORTION)) if cost.cpu_seconds else 1
        for portion in range(1, portions + 1):
            if cost.cpu_seconds:
                clock.burn(cpu_begin + cost.cpu_seconds * portion / portions)
            left = begin + seconds * portion / portions - clock.now()
            if left > 0:
                clock.sleep(left)
        # Later, if processors were busy with something else.
        self._free = max(end, clock.now())
        return result


@functools.cache
def _cycles_per_second(device: torch.device) -> float:
    """Cycles that `torch.cuda._sleep` waits for in a second."""
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
    """Ranks that are not there, as a transport: every rank is like this one, and collectives take their time.

    Results have the right shapes, and sums are those of equal ranks. `advice.errors` tells how good a hook is.

    Args:
        link: what collectives cost, among as many ranks as there are to be.
        rank: which of them this one is.
        nodes: ranks by node; each alone, if it is not given.
        node_link: what collectives cost among the ranks of one node; as `link`, if it is not given.
        on_stream: whether collectives are queued on the present CUDA stream, as with NCCL.
        clock: passes the time on the host.

    Attributes:
        is_ordered: see `Direct`, as the others.
        latency: see there.
        size: number of ranks.
        rank: see above.
    """

    def __init__(
        self,
        link: Link,
        rank: int = 0,
        *,
        nodes: Sequence[Sequence[int]] | None = None,
        node_link: Link | None = None,
        on_stream: bool = False,
        clock: HostClock | None = None,
    ) -> None:
        self.is_ordered, self.latency = not link.message_seconds, link.message_seconds
        self.size, self.rank = link.world_size, rank
        self._link = link
        self._node_link = node_link
        self.nodes = [list(node) for node in nodes] if nodes is not None else [[rank] for rank in range(self.size)]
        self._on_stream = on_stream
        self._wire = _Wire(clock or HostClock(), link)

    def channel(self, number: int, ranks: object = None) -> Emulated:
        """What the bucket of that number communicates by: the same link."""
        return self

    def among(self, ranks: Sequence[int], part: int) -> Emulated:
        """Some of the ranks, over the same link, or over that of a node."""
        is_node = self._node_link is not None and any(set(ranks) <= set(node) for node in self.nodes)
        link = self._node_link if is_node and self._node_link is not None else self._link
        some = Emulated(link.scaled(len(ranks)), list(ranks).index(self.rank), on_stream=self._on_stream)
        some._wire = self._wire
        return some

    def spend(self, kind: Kind, num_bytes: float, device: torch.device) -> None:
        """Take the time of a collective that is none of the hook's, as a broadcast of buffers."""
        if self.size > 1 and num_bytes:
            nothing = torch.empty(0, device=device)
            finish(self._take(kind, num_bytes, nothing, lambda: nothing))

    def num_rounds(self, num_bytes: int) -> int:
        """Rounds of messages in which a tensor is summed."""
        if self.is_ordered:
            return 2 * (self.size - 1)
        return 1 if takes_one_round(num_bytes, self.size, self.latency) else 2

    def sum_(self, tensor: Tensor) -> Steps[Tensor]:
        """Multiply a tensor by the number of ranks."""
        num_bytes = 2 * (self.size - 1) / self.size * tensor.nbytes
        return self._take("all_reduce", num_bytes, tensor, lambda: tensor.mul_(self.size))

    def expect(self, like: Tensor) -> float:
        """The present moment, for `gather`."""
        return self._wire.clock.now()

    def gather(self, tensor: Tensor, expected: object = None) -> Steps[Tensor]:
        """The tensor, as often as there are ranks."""
        num_bytes = (self.size - 1) * tensor.nbytes
        announced = expected if isinstance(expected, float) else math.inf
        return self._take("all_gather", num_bytes, tensor, lambda: tensor.repeat(self.size, 1), announced)

    def exchange(self, chunks: Tensor) -> Steps[Tensor]:
        """This rank's own chunk, as often as there are ranks."""
        num_bytes = (self.size - 1) / self.size * chunks.nbytes
        own = chunks[self.rank : self.rank + 1]
        return self._take("all_to_all", num_bytes, chunks, lambda: own.repeat(self.size, 1))

    def _take(
        self, kind: Kind, num_bytes: float, tensor: Tensor, work: Callable[[], Tensor], announced: float = math.inf
    ) -> Steps[Tensor]:
        cost = self._link.cost(kind, num_bytes, tensor.dtype)
        if self._on_stream:
            torch.cuda._sleep(int(cost.seconds * _cycles_per_second(tensor.device)))
            return work()
        if tensor.is_cuda:  # gloo waits for the device
            torch.cuda.current_stream(tensor.device).synchronize()
        now = self._wire.clock.now()
        fastest = min(cost.seconds, self._link.latency)
        # The message by which each rank says that it waits is there already, or under way.
        early = min(max(0.0, now - announced), self._link.message_seconds)
        under_way = _UnderWay(
            self._wire.start(functools.partial(self._wire.pass_time, cost, fastest, now - early, work))
        )
        yield Wait([under_way])
        return under_way.wait()


class _UnderWay:
    """A collective that goes on by itself."""

    def __init__(self, result: Callable[[], Tensor]) -> None:
        self._result = result

    def wait(self) -> Tensor:
        return self._result()


def emulated_group(transport: Emulated, counters: Counters, device: torch.device) -> Group:
    """The group of ranks that are not there."""
    group = Group(transport, counters, device)
    group._nodes, group._are_alike = transport.nodes, True
    return group
