"""The engine for CPU tensors, and for gloo: one thread that computes."""

from __future__ import annotations

import atexit
import functools
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future as HostFuture
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from lightning_commhooks.codecs.ranges import named
from lightning_commhooks.collectives.errors import HookError
from lightning_commhooks.collectives.link import BUCKETS_AT_ONCE
from lightning_commhooks.collectives.steps import Steps, Wait
from lightning_commhooks.collectives.timing import Timing
from lightning_commhooks.ddp.engine import Engine, T

# Work that is under way when an engine closes belongs to a backward that was broken off; usually it waits for peers.
GRACE_SECONDS = 1.0
# As many as there may be buckets under way: a wait for which there is no thread could be what a peer waits for.
_MOST_WAITS = 2**12


@functools.cache
def _let_gloo_finish_at_exit() -> None:
    """At exit, give gloo's threads the time to drop the tensors of their last collective.

    They do so shortly after the collective is done, and need the interpreter for it. If that is shutting down
    already, the process aborts: "terminate called without an active exception".
    """
    atexit.register(time.sleep, 0.05)


class _Bucket:
    """A bucket under way."""

    def __init__(self, reduce: Callable[[], Steps[Tensor]], device: torch.device, is_last: bool) -> None:
        self.reduce, self.is_last = reduce, is_last
        self.ready = _record(device)
        self.steps: Steps[Tensor] | None = None
        self.waits: Wait | None = None
        # Of the last wait.
        self.failure: BaseException | None = None
        # Its value is None after a failure.
        self.reduced: Future[Tensor | None] = Future(devices=[device] if device.type == "cuda" else None)

    def go_on(self) -> Tensor | None:
        """Run to the next wait, or to the end; returns the gradients then."""
        assert self.steps is not None
        failure, self.failure, self.waits = self.failure, None, None
        try:
            # The computation tells what it was about.
            self.waits = next(self.steps) if failure is None else self.steps.throw(failure)
        except StopIteration as done:
            reduced: Tensor = done.value
            return reduced
        return None


class ThreadEngine(Engine):
    """One thread computes, for CPU tensors and for gloo; whatever waits for other ranks lets other buckets go on.

    By direct messages, buckets go on in whatever order their waits end: other threads wait. Collectives of gloo itself
    have to begin in one order on all ranks, so there a bucket goes on when the next ones arrive, by a fixed rule: each
    earlier one goes one wait further, and of `BUCKETS_AT_ONCE` the first is finished.

    An interruption (Ctrl-C, a signal handler that raises) of the main thread while it waits for work is a failure, too.

    Args:
        device: of the gradients.
        abort: see `Engine`.
        timing: see `Engine`.
        name: see `Engine`.
        is_ordered: whether all ranks have to begin collectives in one order.
    """

    def __init__(
        self,
        device: torch.device,
        abort: Callable[[], None],
        timing: Timing[Any],
        name: str = "hook",
        is_ordered: bool = True,
    ) -> None:
        super().__init__(device, abort, timing, name)
        _let_gloo_finish_at_exit()
        _close_before_threads_are_joined()
        self._process = os.getpid()
        self._is_ordered = is_ordered
        self._under_way: deque[_Bucket] = deque()
        self._jobs: queue.SimpleQueue[_Bucket | Callable[[], object] | None] = queue.SimpleQueue()
        # Functions that wait until all buckets are done.
        self._calls: deque[Callable[[], object]] = deque()
        self._waiters = ThreadPoolExecutor(_MOST_WAITS, "lightning_commhooks wait")
        weakref.finalize(self, self._jobs.put, None).atexit = False
        self._thread = threading.Thread(target=_run, args=(weakref.ref(self), self._jobs), name="lightning_commhooks")
        self._thread.start()
        _open_engines.add(self)

    def submit(self, reduce: Callable[[], Steps[Tensor]], device: torch.device, is_last: bool = True) -> Future[Tensor]:
        self.raise_if_unusable()
        bucket = _Bucket(reduce, device, is_last)

        def unwrap(done: Future[Tensor | None]) -> Tensor:
            reduced = done.value()
            if reduced is None:
                raise self._error()
            return reduced

        future = bucket.reduced.then(unwrap)
        self._jobs.put(bucket)
        return future

    def call(self, function: Callable[[], T]) -> T:
        self.raise_if_unusable()
        ready, done = _record(self._device), torch.cuda.Event() if self._device.type == "cuda" else None
        called: HostFuture[T] = HostFuture()

        def run() -> None:
            try:
                self._raise_if_failed()
                if ready is not None:
                    torch.cuda.current_stream(self._device).wait_event(ready)
                with self.aborting():
                    called.set_result(function())
            except BaseException as failure:
                called.set_exception(failure)
            finally:
                if done is not None:
                    done.record(torch.cuda.current_stream(self._device))

        self._jobs.put(run)
        self._wait_for(called)
        result = called.result()
        if done is not None:
            torch.cuda.current_stream(self._device).wait_event(done)
        return result

    def handle(self, job: _Bucket | Callable[[], object]) -> None:
        """Do what is to be done next; called in the engine's thread."""
        if not isinstance(job, _Bucket):
            self._calls.append(job)
        elif job.steps is None:
            self._under_way.append(job)
            self._advance(job)
        else:
            self._advance(job)
        if self._is_ordered:
            self._go_on_in_order(job)
        while self._calls and not self._under_way:
            self._calls.popleft()()

    def _go_on_in_order(self, job: _Bucket | Callable[[], object]) -> None:
        if isinstance(job, _Bucket):
            for bucket in [*self._under_way]:
                if bucket is not job:
                    self._wait_and_advance(bucket)
        everything = not isinstance(job, _Bucket) or job.is_last
        while len(self._under_way) >= (1 if everything else BUCKETS_AT_ONCE):
            first = self._under_way[0]
            while first in self._under_way:
                self._wait_and_advance(first)

    def _wait_and_advance(self, bucket: _Bucket) -> None:
        self._wait(bucket)
        self._advance(bucket)

    def _advance(self, bucket: _Bucket) -> None:
        """Run a bucket until it waits for other ranks, or to its end."""
        reduced = None
        try:
            if self._failure is None:
                with self._timing.work(), named(self._name, "reduce"):
                    if bucket.steps is None:
                        if bucket.ready is not None:
                            torch.cuda.current_stream(self._device).wait_event(bucket.ready)
                        bucket.steps = bucket.reduce()
                    reduced = bucket.go_on()
        except BaseException as failure:
            self._fail(failure)
        if bucket.waits is None or self._failure is not None:
            self._under_way.remove(bucket)
            bucket.steps = bucket.waits = None
            bucket.reduced.set_result(reduced)
        elif not self._is_ordered:
            self._waiters.submit(self._wait_elsewhere, bucket)
        elif not bucket.waits.is_uniform:
            # Another rank may have nothing to wait for here, and would be a wait ahead.
            self._wait_and_advance(bucket)

    def _wait_elsewhere(self, bucket: _Bucket) -> None:
        self._wait(bucket)
        self._jobs.put(bucket)

    def _wait(self, bucket: _Bucket) -> None:
        waits = bucket.waits
        if waits is None or self._failure is not None:
            return
        try:
            with self._timing.comm(within_work=False):
                waits.wait()
        except BaseException as failure:
            bucket.failure = failure

    def close(self) -> None:
        if self._closed:
            return
        super().close()
        if self._process != os.getpid():
            return  # a forked child has not got the threads
        ended = threading.Event()
        self._jobs.put(ended.set)
        if not ended.wait(GRACE_SECONDS):
            self._fail(HookError("the communication hook was closed before its work was done"))
        # First: they hand buckets back, whose futures are still to be set.
        self._waiters.shutdown(wait=True)
        self._jobs.put(None)
        self._thread.join()
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


def _run(engine: weakref.ref[ThreadEngine], jobs: queue.SimpleQueue[_Bucket | Callable[[], object] | None]) -> None:
    # Without recording, for a backward with create_graph=True.
    with torch.no_grad():
        while (job := jobs.get()) is not None:
            own = engine()
            if own is not None:
                with suppress(BaseException), own.aborting():  # or whoever waits for this thread would wait for ever
                    own.handle(job)
            del own, job  # they hold results


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
