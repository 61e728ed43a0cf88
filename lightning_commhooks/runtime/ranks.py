"""The ranks that a hook runs among, and what runs it there."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from lightning_commhooks.collectives.counters import Counters
from lightning_commhooks.collectives.gloo_abort import AllConnections
from lightning_commhooks.collectives.group import Backend, Group
from lightning_commhooks.collectives.process_groups import (
    BackendConnections,
    OwnGroup,
    destroy,
    is_enqueued_on_stream,
    own_group,
)
from lightning_commhooks.collectives.timing import DeviceTiming, NoTiming
from lightning_commhooks.runtime.beside import Beside
from lightning_commhooks.runtime.engine import Engine
from lightning_commhooks.runtime.running import RunningHook
from lightning_commhooks.runtime.stream_engine import InlineEngine, StreamEngine
from lightning_commhooks.runtime.thread_engine import ThreadEngine


class Ranks:
    """Ranks, with an engine and connections of their own.

    Args:
        running: the hook.
        group: the ranks.
        connections: theirs.
        is_enqueued: whether their collectives are enqueued on a stream, as NCCL's are.
        owned: the process group that was made for them, if one was.

    Attributes:
        engine: runs the hook.
        beside: runs computations in the background of training.
        group: the ranks.
    """

    engine: Engine

    def __init__(
        self,
        running: RunningHook,
        group: Group,
        connections: AllConnections,
        is_enqueued: bool,
        owned: dist.ProcessGroup | None,
    ) -> None:
        self.group, self._connections, self._owned = group, connections, owned
        self._others_follow = running.source.ranks_change
        of_engine = group.device, connections, running.counters.timing, running.name
        if running.source.is_awaited or running.is_alone:
            self.engine = InlineEngine(*of_engine)
        else:
            self.engine = StreamEngine(*of_engine) if is_enqueued else ThreadEngine(*of_engine, group.is_ordered)
        self.beside = Beside(running, connections, is_enqueued)

    @classmethod
    def of_source(cls, running: RunningHook, make_group: Callable[[Counters], Group] | None) -> Ranks:
        """Make the ranks of a hook's source; `make_group`, if given, makes their collectives."""
        process_group, device, counters = running.source.process_group, running.source.device, running.counters
        connections, is_awaited = AllConnections(), running.source.is_awaited
        if running.source.ranks_change:
            counters.timing = NoTiming() if device.type == "cuda" else counters.timing
            return cls(running, Group(None, counters, device), connections, False, None)
        is_enqueued = is_enqueued_on_stream(process_group, device)
        if is_awaited or device.type == "cuda":
            counters.timing = DeviceTiming(device) if is_enqueued and not is_awaited else NoTiming()
        owned = None
        if is_awaited or is_enqueued or running.is_alone:
            group = Group(Backend(process_group), counters, device, process_group, connections)
        else:
            own = own_group(process_group, device)
            owned, group = own.process_group, Group.of(own, counters, device, connections)
        return cls(running, make_group(counters) if make_group else group, connections, is_enqueued, owned)

    @classmethod
    def of_members(cls, running: RunningHook, own: OwnGroup) -> Ranks:
        """Make the ranks of a group whose lifetime the caller manages."""
        connections = AllConnections()
        rank = own.process_group.rank()
        group = Group.of(own, running.counters, running.source.device, connections, global_rank=rank)
        return cls(running, group, connections, False, own.process_group)

    def connect(self, running: RunningHook) -> None:
        """Make a failure end the waits of other ranks, once the hook is bound.

        Not before: options that do not fit are no reason to abort DDP's own group.
        """
        if self._owned is None and not (running.source.is_awaited or running.source.ranks_change):
            self._connections.append(BackendConnections(running.source.process_group))
        self._connections.extend(running.source.other_connections)

    def close(self) -> None:
        """End the engine."""
        if not self.engine.has_failed:
            self.beside.drain()
        self.engine.close()
        self.beside.close()

    def release(self) -> None:
        """Release connections; peers that wait for this rank fail."""
        destroy([self._owned, *self.group.release()])
        self._owned = None
        # Otherwise a process ends soon.
        if self._others_follow and not self.engine.is_stuck:
            self._connections.let_go()
