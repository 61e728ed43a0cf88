"""Computations in the background of training, on their own engine: averages of models that span several steps."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from torch import Tensor
from torch.futures import Future

from lightning_commhooks.collectives.gloo_abort import AllConnections, Connections
from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.steps import Steps
from lightning_commhooks.collectives.timing import NoTiming
from lightning_commhooks.runtime.engine import Engine
from lightning_commhooks.runtime.running import RunningHook
from lightning_commhooks.runtime.stream_engine import StreamEngine
from lightning_commhooks.runtime.thread_engine import ThreadEngine

# At the end of training, a peer that is later than this loses its unfinished averages and gets an error.
_PATIENCE_SECONDS = 30.0


class _OfMainEngine(Connections):
    """Connections that the hook's main engine closes."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    def abort(self) -> None:
        pass

    def fail(self) -> None:
        self._connections.fail()

    def without_a_peer(self) -> object | None:
        return self._connections.without_a_peer()


class Beside:
    """Begins computations in the background of training, one after another.

    Args:
        running: the hook that they belong to.
        connections: connections of the hook's engine. A failure here ends the hook on all ranks, and a failure of the
            hook ends these computations.
        is_enqueued: whether their collectives are enqueued on a stream, as NCCL's are.
    """

    def __init__(self, running: RunningHook, connections: AllConnections, is_enqueued: bool) -> None:
        self._running, self._connections, self._is_enqueued = running, connections, is_enqueued
        self._engine: Engine | None = None
        # Of computations, equal on all ranks.
        self._numbers = itertools.count()
        self._under_way: list[Future[Tensor]] = []

    def begin(self, group: Group, run: Callable[[Group], Steps[None]]) -> Callable[[], None]:
        """Begin a computation; on all ranks in the same order.

        Args:
            group: its ranks, of `Group.split(..., apart=True)`.
            run: makes it, in a channel of its own.

        Returns:
            a function that waits for its end, on CUDA on the current stream, and raises a `HookError` if it failed.
        """
        if self._engine is None:
            self._engine = self._make_engine(group)
        engine, number = self._engine, next(self._numbers)

        def explained() -> Steps[Tensor]:
            ranks = group.for_bucket(1 + number)
            try:
                yield from run(ranks)
            except Exception as error:
                failure = self._running.failed(ranks, "in an average beside training", error)
                with self._running.aborting():  # the hook as well
                    raise failure from error
            return Tensor()

        future = engine.submit(explained, group.device, is_last=True)
        self._under_way = [one for one in self._under_way if not one.done()] + [future]

        def wait() -> None:
            try:
                future.wait()
            except RuntimeError:  # of the future, around the error
                engine.raise_if_unusable()
                raise

        return wait

    def _make_engine(self, group: Group) -> Engine:
        of_engine = group.device, _OfMainEngine(self._connections), NoTiming(), self._running.name
        return StreamEngine(*of_engine) if self._is_enqueued else ThreadEngine(*of_engine, group.is_ordered)

    def drain(self) -> None:
        """Give computations under way, here and on peers, time to finish before the hook's connections are closed."""
        begin = time.monotonic()
        while not all(one.done() for one in self._under_way) and time.monotonic() - begin < _PATIENCE_SECONDS:
            time.sleep(0.001)

    def close(self) -> None:
        """End the engine, after the hook's own."""
        if self._engine is not None:
            self._engine.close()
        self._under_way = []
