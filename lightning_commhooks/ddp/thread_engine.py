"""The engine for CPU tensors, and for gloo: threads."""

from __future__ import annotations

import atexit
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future as HostFuture
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from lightning_commhooks.collectives.errors import HookError
from lightning_commhooks.collectives.turns import Turns
from lightning_commhooks.ddp.engine import Engine, T

# Work that is under way when an engine closes belongs to a backward that was broken off; usually it waits for peers.
GRACE_SECONDS = 1.0


@functools.cache
def _let_gloo_finish_at_exit() -> None:
    """At exit, give gloo's threads the time to drop the tensors of their last collective.

    They do so shortly after the collective is done, and need the interpreter for it. If that is shutting down
    already, the process aborts: "terminate called without an active exception".
    """
    atexit.register(time.sleep, 0.05)


class ThreadEngine(Engine):
    """Communication threads, for CPU tensors and for gloo: the lanes, which take turns.

    An interruption (Ctrl-C, a signal handler that raises) of the main thread while it waits for work is a failure, too.

    Args:
        device: of the gradients.
        abort: see `Engine`.
        num_lanes: how many buckets may be under way at once.
    """

    def __init__(self, device: torch.device, abort: Callable[[], None] = lambda: None, num_lanes: int = 1) -> None:
        super().__init__(device, abort)
        _let_gloo_finish_at_exit()
        _close_before_threads_are_joined()
        self._process = os.getpid()
        # Without recording, for a backward with create_graph=True.
        self._executors = [
            ThreadPoolExecutor(1, "lightning_commhooks", initializer=torch.set_grad_enabled, initargs=(False,))
            for _ in range(num_lanes)
        ]
        self._turns = Turns()
        # What was submitted last to each lane; and last of what does not overlap.
        self._last: dict[int, HostFuture[Any]] = {}
        self._last_alone: HostFuture[Any] | None = None
        _open_engines.add(self)

    def submit(
        self, work: Callable[[], Tensor], device: torch.device, index: int = 0, overlaps: bool = False
    ) -> Future[Tensor]:
        self.raise_if_unusable()
        devices: list[int | str | torch.device] | None = [device] if device.type == "cuda" else None
        raw: Future[Tensor | None] = Future(devices=devices)
        ready = _record(device)

        def run() -> None:
            result = None
            try:
                if self._failure is None:
                    if ready is not None:
                        torch.cuda.current_stream(device).wait_event(ready)
                    result = work()
            except BaseException as failure:
                self._fail(failure)
            finally:
                raw.set_result(result)

        def unwrap(done: Future[Tensor | None]) -> Tensor:
            result = done.value()
            if result is None:
                raise self._error()
            return result

        result = raw.then(unwrap)
        self._enqueue(run, index, overlaps)
        return result

    def _enqueue(self, run: Callable[[], T], index: int, overlaps: bool) -> HostFuture[T]:
        """Have a function run in a lane: the same one on all ranks."""
        lane = index % len(self._executors)
        before = [self._last_alone] if overlaps and self._last_alone is not None else []
        if not overlaps:
            before = [last for other, last in self._last.items() if other != lane]

        def in_turn() -> T:
            wait(before)
            before.clear()  # they hold results
            with self._turns.turn(lane):
                return run()

        future = self._executors[lane].submit(in_turn)
        self._last[lane] = future
        if not overlaps:
            self._last_alone = future
        return future

    def call(self, function: Callable[[], T]) -> T:
        self.raise_if_unusable()
        ready, done = _record(self._device), torch.cuda.Event() if self._device.type == "cuda" else None

        def run() -> T:
            self._raise_if_failed()
            if ready is not None:
                torch.cuda.current_stream(self._device).wait_event(ready)
            try:
                with self.aborting():
                    return function()
            finally:
                if done is not None:
                    done.record(torch.cuda.current_stream(self._device))

        called = self._enqueue(run, 0, overlaps=False)
        self._wait_for(called)
        self._last, self._last_alone = {}, None  # they hold the result
        result = called.result()
        if done is not None:
            torch.cuda.current_stream(self._device).wait_event(done)
        return result

    def close(self) -> None:
        if self._closed:
            return
        super().close()
        if self._process != os.getpid():
            return  # a forked child has not got the threads
        if wait(self._last.values(), timeout=GRACE_SECONDS).not_done:
            self._fail(HookError("the communication hook was closed before its work was done"))
        for executor in self._executors:
            executor.shutdown(wait=True)
        # Gloo would wait 10 ms for each connection that is still open when it closes it.
        self._abort()
        # Once more, at exit or when a backward comes too late, it might be somebody else's ports.
        self._abort = _nothing
        _open_engines.discard(self)

    def _wait_for(self, work: HostFuture[Any]) -> None:
        try:
            work.exception()
        except BaseException as interruption:
            self._fail(HookError(f"the communication hook was interrupted by {interruption!r}"))
            raise

    def _fail(self, failure: BaseException) -> None:
        if self._process != os.getpid():
            self._abort = _nothing  # a forked child shares the connections
        super()._fail(failure)


def _nothing() -> None:
    """In place of what aborts a group that is gone."""


def _record(device: torch.device) -> torch.cuda.Event | None:
    """What the caller's stream has to do before the work, on CUDA."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


_open_engines: weakref.WeakSet[ThreadEngine] = weakref.WeakSet()


@functools.cache
def _close_before_threads_are_joined() -> None:
    """At exit, close the engines before the interpreter waits for their threads.

    Such a thread may be in a collective that a peer never joins. Functions of `atexit` run too late, after the
    threads; `concurrent.futures` ends its own threads in this way.
    """
    threading._register_atexit(_close_engines)  # type: ignore[attr-defined]


def _close_engines() -> None:
    for engine in list(_open_engines):
        engine.close()
