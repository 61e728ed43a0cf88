"""Runs a bound hook on buckets, in the order in which DDP hands them over.

Collectives are issued in that order and no other, or in lanes, each with a group or numbers of its own: ranks cannot
disagree. Where the overlap with the backward pass comes from depends on the device: see [`ThreadEngine`][] and
[`StreamEngine`][].
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future as HostFuture
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.futures import Future

from lightning_commhooks.collectives.errors import HookError
from lightning_commhooks.collectives.turns import Turns

T = TypeVar("T")

# Work that is under way when an engine closes belongs to a backward that was broken off; usually it waits for peers.
GRACE_SECONDS = 1.0

CLOSED = "the communication hook was closed; attach a hook to a new DistributedDataParallel"


@functools.cache
def _let_gloo_finish_at_exit() -> None:
    """At exit, give gloo's threads the time to drop the tensors of their last collective.

    They do so shortly after the collective is done, and need the interpreter for it. If that is shutting down
    already, the process aborts: "terminate called without an active exception".
    """
    atexit.register(time.sleep, 0.05)


def call_at_end_of_backward(function: Callable[[], None]) -> None:
    """Let autograd call `function` when the present backward is done; outside of one, do nothing."""
    try:
        torch.autograd.Variable._execution_engine.queue_callback(function)
    except RuntimeError:
        return


class Engine(ABC):
    """Runs work items in the order of submission, those that may overlap in the order of their lane."""

    _closed = False

    @abstractmethod
    def submit(self, work: Callable[[], Tensor], device: torch.device, index: int, overlaps: bool) -> Future[Tensor]:
        """Run `work`, return a future of its result for DDP.

        Args:
            work: reduces a bucket.
            device: of the bucket.
            index: of the bucket, the same on all ranks.
            overlaps: whether work on other buckets may go on while this waits for other ranks.
        """

    @abstractmethod
    def call(self, function: Callable[[], T]) -> T:
        """Run `function` after all submitted work and return its result.

        Raises:
            HookError: earlier work failed; `function` did not run.
        """

    @contextmanager
    def aborting(self) -> Iterator[None]:
        """Whatever raises within, in any thread, ends the work of all ranks: peers would wait for this one."""
        try:
            yield
        except BaseException as failure:
            # A new exception: this one collects the frames of the user's code, and would keep them alive.
            later = HookError(str(failure) or repr(failure))
            later.__cause__ = failure.__cause__
            self._fail(later)
            raise

    @abstractmethod
    def _fail(self, failure: BaseException) -> None:
        """Abort collectives under way, here and on peers; later work raises `HookError`."""

    def raise_if_unusable(self) -> None:
        """Raise `HookError` if earlier work failed or the engine is closed."""
        if self._closed:
            raise HookError(CLOSED)

    def close(self) -> None:
        """Wait for submitted work, or abort it if it does not end soon, and release threads."""
        self._closed = True


class ThreadEngine(Engine):
    """Communication threads, for CPU tensors and for gloo: the lanes, which take turns.

    After the first failure no further work runs: this rank's collectives would not match its peers'. So that the
    peers need not wait for the timeout of the process group, a failure aborts it, of work or of what comes before it
    (`aborting`). So does an interruption (Ctrl-C, a signal handler that raises) of the main thread while it waits for
    work.

    Args:
        device: of the gradients.
        abort: makes collectives under way fail; it is called from any thread, perhaps more than once.
        num_lanes: how many buckets may be under way at once.
    """

    def __init__(self, device: torch.device, abort: Callable[[], None] = lambda: None, num_lanes: int = 1) -> None:
        _let_gloo_finish_at_exit()
        _close_before_threads_are_joined()
        self._device = device
        self._abort = abort
        self._process = os.getpid()
        # Without recording, for a backward with create_graph=True.
        self._executors = [
            ThreadPoolExecutor(1, "lightning_commhooks", initializer=torch.set_grad_enabled, initargs=(False,))
            for _ in range(num_lanes)
        ]
        self._turns = Turns()
        self._failure: BaseException | None = None
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

    def _wait_for(self, work: HostFuture[Any]) -> None:
        try:
            work.exception()
        except BaseException as interruption:
            self._fail(HookError(f"the communication hook was interrupted by {interruption!r}"))
            raise

    def _fail(self, failure: BaseException) -> None:
        if self._failure is None:
            self._failure = failure
        if self._process == os.getpid():  # a forked child shares the connections
            self._abort()

    def _error(self) -> HookError:
        # A new exception: the stored one would collect the frames of the user's code, and keep them alive.
        failure = self._failure
        error = HookError(str(failure))
        error.__cause__ = failure.__cause__ if isinstance(failure, HookError) else failure
        return error

    def _raise_if_failed(self) -> None:
        if self._failure is not None:
            raise self._error()

    def raise_if_unusable(self) -> None:
        self._raise_if_failed()
        super().raise_if_unusable()


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


class StreamEngine(Engine):
    """A side stream, for CUDA tensors on NCCL: the hook's kernels and collectives queue up on it, inline.

    A blocking NCCL collective blocks the side stream only, so that the backward goes on beside it.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def submit(self, work: Callable[[], Tensor], device: torch.device, index: int, overlaps: bool) -> Future[Tensor]:
        self.raise_if_unusable()
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with self._context():
            future: Future[Tensor] = Future(devices=[device])
            future.set_result(work())
        return future

    def call(self, function: Callable[[], T]) -> T:
        self.raise_if_unusable()
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with self._context():
            result = function()
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        return result

    def _fail(self, failure: BaseException) -> None:
        """NCCL's own watchdog ends what peers wait for."""

    @contextmanager
    def _context(self) -> Iterator[None]:
        # A backward may run inside the user's autocast, which must not round the hook's own products.
        with torch.cuda.stream(self._stream), torch.autocast("cuda", enabled=False), torch.no_grad():
            yield
