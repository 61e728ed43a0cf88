"""Collectives without a network that take as long as a link would: what would this hook cost over that link?"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_commhooks.advice.ensemble import WHY_NO_PROCESS_GROUP
from lightning_commhooks.collectives.communicator import Kind, SendToAll, Wait
from lightning_commhooks.collectives.counters import Counters
from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.link import Cost, Link
from lightning_commhooks.collectives.turns import waiting

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

    def __init__(self, clock: HostClock, burst_seconds: float) -> None:
        self.clock = clock
        self._burst = burst_seconds
        self._saved = burst_seconds
        self._free = clock.now()
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None
        self._last: Future[Tensor] | None = None

    def run(self, collective: Callable[[], Tensor]) -> Tensor:
        """Have it done, behind all that were started."""
        if self._last is not None and not self._last.done():
            return self.start(collective)()
        with self._lock:
            return collective()

    def start(self, collective: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Have it done in the thread; returns what waits for the result."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="lightning_commhooks_wire")

        def run() -> Tensor:
            with self._lock, torch.no_grad():
                return collective()

        self._last = self._executor.submit(run)
        return self._last.result

    def close(self) -> None:
        """End the thread."""
        if self._executor is not None:
            self._executor.shutdown(wait=True)
        self._executor = None
        self._last = None

    def pass_time(self, cost: Cost, fastest: float, started: float, work: Callable[[], Tensor]) -> Tensor:
        """Take the time of one collective, and let `work`, which makes its result, be a part of it.

        What was started before keeps the link for some time from `started`, by the clock. It takes `fastest` seconds
        at least, however long the link was idle.
        """
        clock = self.clock
        cpu_begin, before = clock.cpu(), self._free
        # A token bucket, in seconds of the link.
        self._saved = min(self._burst, self._saved + max(0.0, started - before))
        end = max(started + cost.seconds, before + cost.occupancy)
        gain = min(self._saved, end - started - fastest)
        end -= gain
        self._saved -= gain
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


class EmulatedGroup(Group):
    """Ranks that are not there: results have the right shapes, every rank being like this one, and take their time.

    Counts bytes as a `Group` of that size. With a codec, error feedback and all that, a hook does with it what it does
    with real ranks, and averages made by the methods of `Group` are those of equal ranks. What a hook makes of several
    collectives by itself, or groups of two levels make of it, may be wrong, since every rank owns the same share:
    `EnsembleGroup` tells how good a hook is.

    Args:
        link: what collectives cost, among as many ranks as there are to be.
        rank: which of them this one is.
        counters: where bytes are counted.
        device: where the gradients are.
        nodes: ranks by node; each alone, if it is not given.
        node_link: what collectives cost among the ranks of one node; as `link`, if it is not given.
        on_stream: whether collectives are queued on the present CUDA stream, as with NCCL.
        clock: passes the time on the host.
    """

    _why_no_process_group = WHY_NO_PROCESS_GROUP

    def __init__(
        self,
        link: Link,
        rank: int = 0,
        counters: Counters | None = None,
        device: torch.device | str = "cpu",
        *,
        nodes: Sequence[Sequence[int]] | None = None,
        node_link: Link | None = None,
        on_stream: bool = False,
        clock: HostClock | None = None,
    ) -> None:
        super().__init__(None, counters, device)
        self.num_lanes = link.num_lanes
        self.size = link.world_size
        self.rank = rank
        self.global_rank = dist.get_rank() if dist.is_initialized() else rank
        self._link = link
        self._node_link = node_link
        self._nodes = [list(node) for node in nodes] if nodes is not None else [[rank] for rank in range(self.size)]
        self._on_stream = on_stream
        self._wire = _Wire(clock or HostClock(), link.burst_seconds)

    @property
    def latency(self) -> float:
        return self._link.message_seconds

    def release(self) -> list[dist.ProcessGroup | None]:
        self._wire.close()
        return super().release()

    def spend(self, kind: Kind, num_bytes: float) -> None:
        """Take the time of a collective that is none of the hook's, as a broadcast of buffers. Not counted."""
        if self.size > 1 and num_bytes:
            nothing = torch.empty(0, device=self.device)
            self._pass_time(kind, num_bytes, nothing, lambda: nothing)

    def _split(self, subgroups: tuple[tuple[int, ...], ...]) -> Group:
        own = next(ranks for ranks in subgroups if self.rank in ranks)
        link = self._link
        if self._node_link is not None and any(set(own) <= set(node) for node in self._nodes):
            link = self._node_link
        link, rank = link.scaled(len(own)), own.index(self.rank)
        group = EmulatedGroup(link, rank, self.counters, self.device, on_stream=self._on_stream)
        group._wire = self._wire
        return group

    def _sum_(self, tensor: Tensor) -> Wait:
        num_bytes = self.ring_bytes(tensor)
        if tensor.is_cuda or self.num_lanes > 1:
            return self._start("all_reduce", num_bytes, tensor, lambda: tensor.mul_(self.size))
        return lambda: self._pass_time("all_reduce", num_bytes, tensor, lambda: tensor.mul_(self.size))

    def _gather(self, like: Tensor) -> SendToAll:
        announced = self._wire.clock.now()

        def send(tensor: Tensor, of_equals: Callable[[], Tensor] | None) -> Wait:
            num_bytes = (self.size - 1) * tensor.numel() * tensor.element_size()
            work = of_equals or (lambda: tensor.repeat(self.size, 1))
            return self._start("all_gather", num_bytes, tensor, work, announced)

        return send

    def _exchange(self, chunks: Tensor) -> Wait:
        num_bytes = (self.size - 1) / self.size * chunks.numel() * chunks.element_size()
        own = chunks[self.rank : self.rank + 1]
        return self._start("all_to_all", num_bytes, chunks, lambda: own.repeat(self.size, 1))

    def _start(
        self,
        kind: Kind,
        num_bytes: float,
        tensor: Tensor,
        work: Callable[[], Tensor],
        announced: float = math.inf,
    ) -> Wait:
        if tensor.is_cuda:
            with self.counters.timing.comm():
                result = self._pass_time(kind, num_bytes, tensor, work)
            return lambda: result
        finish = self._wire.start(self._on_wire(kind, num_bytes, tensor.dtype, work, announced))

        def wait() -> Tensor:
            with waiting():
                return finish()

        return wait

    def _pass_time(self, kind: Kind, num_bytes: float, tensor: Tensor, work: Callable[[], Tensor]) -> Tensor:
        if self._on_stream:
            seconds = self._link.cost(kind, num_bytes, tensor.dtype).seconds
            torch.cuda._sleep(int(seconds * _cycles_per_second(self.device)))
            return work()
        if tensor.is_cuda:  # gloo waits for the device
            torch.cuda.current_stream(tensor.device).synchronize()
        return self._wire.run(self._on_wire(kind, num_bytes, tensor.dtype, work))

    def _on_wire(
        self,
        kind: Kind,
        num_bytes: float,
        dtype: torch.dtype,
        work: Callable[[], Tensor],
        announced: float = math.inf,
    ) -> Callable[[], Tensor]:
        cost, now = self._link.cost(kind, num_bytes, dtype), self._wire.clock.now()
        fastest = min(cost.seconds, self._link.latency)
        # The message by which each rank says that it waits is there already, or under way.
        early = min(max(0.0, now - announced), self._link.message_seconds)
        return functools.partial(self._wire.pass_time, cost, fastest, now - early, work)
