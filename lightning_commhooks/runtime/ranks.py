"""The ranks that a hook runs among, and what runs it there."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lightning_commhooks.collectives.counters import Counters, DeviceTiming, Timing
from lightning_commhooks.collectives.errors import HookError
from lightning_commhooks.collectives.gloo_abort import AllConnections
from lightning_commhooks.collectives.group import Backend, Group
from lightning_commhooks.collectives.process_groups import (
    BackendConnections,
    OwnGroup,
    destroy,
    is_enqueued_on_stream,
    own_group,
)
from lightning_commhooks.collectives.steps import Steps
from lightning_commhooks.runtime.engine import Engine, InlineEngine, ThreadEngine

if TYPE_CHECKING:
    from lightning_commhooks.runtime.runtime import Runtime

# At the end of training, a peer that is later than this loses its unfinished averages and gets an error.
_PATIENCE_SECONDS = 30.0


class Ranks:
    """Ranks, with an engine and connections of their own.

    `is_enqueued` says whether their collectives are enqueued on a stream, as NCCL's are. `owned` is the process group
    that was made for them, if one was.

    Attributes:
        engine: runs the hook.
        background: runs computations in the background of training.
        group: the ranks.
    """

    engine: Engine

    def __init__(
        self,
        runtime: Runtime,
        group: Group,
        connections: AllConnections,
        is_enqueued: bool,
        owned: dist.ProcessGroup | None,
    ) -> None:
        self.group, self._connections, self._owned = group, connections, owned
        self._others_follow = runtime.source.ranks_change
        timing, is_inline = runtime.counters.timing, runtime.source.is_awaited or runtime.is_alone
        of_hook = group.device, connections, timing, runtime.name
        if is_inline or is_enqueued:
            self.engine = InlineEngine(*of_hook, has_side_stream=not is_inline)
        else:
            self.engine = ThreadEngine(*of_hook, is_ordered=group.is_ordered)
        self.background = Background(runtime, connections, is_enqueued)

    @classmethod
    def of_source(cls, runtime: Runtime, make_group: Callable[[Counters], Group] | None) -> Ranks:
        """Make the ranks of a hook's source; `make_group`, if given, makes their collectives."""
        process_group, device, counters = runtime.source.process_group, runtime.source.device, runtime.counters
        connections, is_awaited = AllConnections(), runtime.source.is_awaited
        if runtime.source.ranks_change:
            counters.timing = Timing(every=0) if device.type == "cuda" else counters.timing
            return cls(runtime, Group(None, counters, device), connections, False, None)
        is_enqueued = is_enqueued_on_stream(process_group, device)
        if is_awaited or device.type == "cuda":
            counters.timing = DeviceTiming(device) if is_enqueued and not is_awaited else Timing(every=0)
        owned = None
        if is_awaited or is_enqueued or runtime.is_alone:
            group = Group(Backend(process_group), counters, device, process_group, connections)
        else:
            own = own_group(process_group, device)
            owned, group = own.process_group, Group.of(own, counters, device, connections)
        return cls(runtime, make_group(counters) if make_group else group, connections, is_enqueued, owned)

    @classmethod
    def of_members(cls, runtime: Runtime, own: OwnGroup) -> Ranks:
        """Make the ranks of a group whose lifetime the caller manages."""
        connections = AllConnections()
        rank = own.process_group.rank()
        group = Group.of(own, runtime.counters, runtime.source.device, connections, global_rank=rank)
        return cls(runtime, group, connections, False, own.process_group)

    def connect(self, runtime: Runtime) -> None:
        """Make a failure end the waits of other ranks, once the hook is bound.

        Not before: options that do not fit are no reason to abort DDP's own group.
        """
        if self._owned is None and not (runtime.source.is_awaited or runtime.source.ranks_change):
            self._connections.append(BackendConnections(runtime.source.process_group))
        if not runtime.source.ranks_change:  # the processes of a replica stay connected when another replica ends
            self._connections.extend(map(BackendConnections, runtime.source.shard_groups))

    def close(self, drains: bool = True) -> None:
        """End the engine, after computations in the background if it `drains`."""
        if not drains:
            self.background.give_up()
        elif not self.engine.has_failed:
            self.background.drain()
        self.engine.close()
        self.background.close()

    def release(self) -> None:
        """Release connections; peers that wait for this rank fail."""
        destroy([self._owned, *self.group.release()])
        self._owned = None
        # Otherwise a process ends soon.
        if self._others_follow and not (self.engine.is_stuck or self.background.is_stuck):
            self._connections.let_go()


class Background:
    """Begins computations in the background of training, one after another.

    Args:
        runtime: of the hook that they belong to.
        connections: connections of the hook's engine. A failure here ends the hook on all ranks, and a failure of the
            hook ends these computations.
        is_enqueued: whether their collectives are enqueued on a stream, as NCCL's are.
    """

    def __init__(self, runtime: Runtime, connections: AllConnections, is_enqueued: bool) -> None:
        self._runtime, self._connections, self._is_enqueued = runtime, connections, is_enqueued
        self._engine: Engine | None = None
        # Of computations, equal on all ranks.
        self._numbers = itertools.count()
        self._under_way: list[Future[Tensor]] = []
        self._ranks_change = runtime.source.ranks_change

    @property
    def is_stuck(self) -> bool:
        """Whether a thread still waits in a collective."""
        return self._engine is not None and self._engine.is_stuck

    def begin(self, group: Group, run: Callable[[Group], Steps[None]]) -> Callable[[], None]:
        """Begin a computation; on all ranks in the same order.

        Args:
            group: its ranks, of `Group.split(..., apart=True)`.
            run: makes it, in a channel of its own.

        Returns:
            a function that waits for its end, on CUDA on the current stream, and raises a `HookError` if it failed.
        """
        if self._engine is None:
            of_hook = group.device, self._connections, Timing(every=0), self._runtime.name
            if self._is_enqueued:
                self._engine = InlineEngine(*of_hook, has_side_stream=True)
            else:  # the hook's engine ends the connections
                self._engine = ThreadEngine(*of_hook, is_ordered=group.is_ordered, aborts_at_end=False)
        engine, number = self._engine, next(self._numbers)

        def explained() -> Steps[Tensor]:
            ranks = group.for_bucket(1 + number)
            try:
                yield from run(ranks)
            except Exception as error:
                failure = self._runtime.failed(ranks, "in an average during training", error)
                # The hook as well; but a replica trains alone until the vote on the average.
                with nullcontext() if self._ranks_change else self._runtime.aborting():
                    raise failure from error
            # The future waits for the devices of its result only.
            return torch.empty(0, device=group.device)

        try:
            future = engine.submit(explained, group.device, is_last=True)
        except HookError:
            if not self._ranks_change:
                raise
            return engine.raise_if_unusable
        self._under_way = [one for one in self._under_way if not one.done()] + [future]
        return functools.partial(engine.wait_for, future)

    def drain(self) -> None:
        """Give computations under way, here and on peers, time to finish before the hook's connections are closed."""
        begin = time.monotonic()
        while not all(one.done() for one in self._under_way) and time.monotonic() - begin < _PATIENCE_SECONDS:
            time.sleep(0.001)

    def give_up(self) -> None:
        """End computations under way."""
        if self._engine is not None and not all(one.done() for one in self._under_way):
            self._engine.fail(HookError("the ranks have changed"))

    def close(self) -> None:
        """End the engine, after the hook's own."""
        if self._engine is not None:
            self._engine.close()
        self._under_way = []
