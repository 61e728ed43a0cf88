"""The engine for CPU tensors, and for gloo: one thread that computes."""

from __future__ import annotations

import atexit
import functools
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future as HostFuture
from concurrent.futures import InvalidStateError
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from lightning_commhooks.basics.ranges import named
from lightning_commhooks.collectives.errors import HookError, keep_in_forks
from lightning_commhooks.collectives.gloo_abort import Connections
from lightning_commhooks.collectives.steps import Steps, Wait, advance, waiting_threads
from lightning_commhooks.collectives.timing import Timing
from lightning_commhooks.runtime.engine import Engine, T
from lightning_commhooks.runtime.waiters import PATIENCE_SECONDS, Waiters, watch

# Number of buckets that are under way at the same time if all ranks have to use one order.
BUCKETS_AT_ONCE = 4
# Number of checks, at four a second, that must see a wait last before other ranks are told.
CHECKS_TO_TELL = 4
# Work that is under way when an engine closes usually waits for peers.
GRACE_SECONDS = 1.0


@functools.cache
def _let_gloo_finish_at_exit() -> None:
    """At exit, give gloo's threads the time to drop the tensors of their last collective.

    They do so shortly after the collective is done, and need the interpreter for it. If the interpreter is shutting
    down already, the process aborts: "terminate called without an active exception".
    """
    atexit.register(time.sleep, 0.05)


class _Bucket:
    """A bucket that is being reduced."""

    def __init__(self, reduce: Callable[[], Steps[Tensor]], device: torch.device, is_last: bool) -> None:
        self.reduce, self.is_last = reduce, is_last
        self.ready = _record(device)
        self.steps: Steps[Tensor] | None = None
        self.waits: Wait | None = None
        # Failure of the last wait.
        self.failure: BaseException | None = None
        # Its value is None after a failure.
        self.reduced: Future[Tensor | None] = Future(devices=[device] if device.type == "cuda" else None)

    def go_on(self) -> Tensor | None:
        """Run to the next wait and return `None`, or to the end and return the gradients."""
        assert self.steps is not None
        failure, self.failure, self.waits = self.failure, None, None
        try:
            self.waits = advance(self.steps, failure)
        except StopIteration as done:
            reduced: Tensor = done.value
            return reduced
        return None


class ThreadEngine(Engine):
    """One thread computes, for CPU tensors and for gloo; while a bucket waits for other ranks, other buckets continue.

    With direct messages, buckets continue in the order in which their waits end, because other threads do the waiting.
    Gloo's own collectives must begin in one order on all ranks, so there a bucket continues when the next ones arrive,
    by a fixed rule: each earlier bucket advances by one wait, and with `BUCKETS_AT_ONCE` buckets all advance until one
    ends.

    An interruption (Ctrl-C, a signal handler that raises) of the main thread while it waits for work is a failure, too,
    and so is a wait that does not end after a peer is gone.

    Args:
        device: the device of the gradients.
        connections: see `Engine`.
        timing: see `Engine`.
        name: see `Engine`.
        is_ordered: whether all ranks have to begin collectives in one order.
    """

    def __init__(
        self,
        device: torch.device,
        connections: Connections,
        timing: Timing[Any],
        name: str = "hook",
        is_ordered: bool = True,
    ) -> None:
        super().__init__(device, connections, timing, name)
        _let_gloo_finish_at_exit()
        _close_before_threads_are_joined()
        self._is_ordered = is_ordered
        # Buckets and calls whose results a thread may wait for.
        self._unfinished: set[_Bucket] = set()
        self._called: set[HostFuture[Any]] = set()
        self._books = threading.Lock()
        # Number of buckets and calls of steps so far, equal on all ranks.
        self._num_turns = 0
        # The numbers of those that have no result yet.
        self._turns: dict[_Bucket | HostFuture[Any], int] = {}
        # Tells other ranks the lowest of these numbers, if it stays the same for long.
        self.tell_wait: Callable[[int], None] = lambda turn: None
        # The lowest number at the last check, and how many checks before had the same.
        self._waits: tuple[int, int] = -1, 0
        # Whether more buckets of the current backward are to come.
        self._more_follow = False
        self._gave_up = False
        # Held while the computation of a bucket runs.
        self._computing = threading.RLock()
        self._under_way: deque[_Bucket] = deque()
        self._jobs: queue.SimpleQueue[_Bucket | Callable[[], object] | None] = queue.SimpleQueue()
        # Functions that wait until all buckets are done.
        self._calls: deque[Callable[[], object]] = deque()
        self._waiters = Waiters()
        weakref.finalize(self, self._jobs.put, None).atexit = False
        self._thread = _start(_run, weakref.ref(self), self._jobs)
        self._no_watch = threading.Event()
        weakref.finalize(self, self._no_watch.set).atexit = False
        self._watch = _start(watch, weakref.ref(self), self._no_watch)
        _open_engines.add(self)
        keep_in_forks(self)

    def submit(self, reduce: Callable[[], Steps[Tensor]], device: torch.device, is_last: bool = True) -> Future[Tensor]:
        bucket = _Bucket(reduce, device, is_last)
        with self._books:
            self.raise_if_unusable()
            self._unfinished.add(bucket)
            self._more_follow = not is_last
            self._begin_turn(bucket)

        def unwrap(done: Future[Tensor | None]) -> Tensor:
            reduced = done.value()
            if reduced is None:
                raise self._error()
            return reduced

        future = bucket.reduced.then(unwrap)
        self._jobs.put(bucket)
        return future

    def call(self, function: Callable[[], T], in_step: bool = False) -> T:
        called: HostFuture[T] = HostFuture()
        with self._books:
            self.raise_if_unusable()
            self._called.add(called)
            if in_step:
                self._begin_turn(called)
        ready, done = _record(self._device), torch.cuda.Event() if self._device.type == "cuda" else None

        def run() -> None:
            try:
                self._raise_if_failed()
                if ready is not None:
                    torch.cuda.current_stream(self._device).wait_event(ready)
                called.set_result(function())
            except BaseException as failure:
                try:
                    self.fail(failure)
                finally:  # the caller waits for it
                    called.set_exception(failure)
            finally:
                if done is not None:
                    done.record(torch.cuda.current_stream(self._device))

        self._jobs.put(run)
        try:
            self._wait_for(called)
        finally:
            with self._books:
                self._called.discard(called)
                self._turns.pop(called, None)
        result = called.result()
        if done is not None:
            torch.cuda.current_stream(self._device).wait_event(done)
        return result

    def handle(self, job: _Bucket | Callable[[], object]) -> None:
        """Process the next job; called in the engine's thread."""
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
            # In turns: while this thread waits for one bucket, the collectives of the others are under way.
            for bucket in [*self._under_way]:
                self._wait_and_advance(bucket)

    def _wait_and_advance(self, bucket: _Bucket) -> None:
        self._wait(bucket)
        self._advance(bucket)

    def _advance(self, bucket: _Bucket) -> None:
        """Run a bucket until it waits for other ranks, or to its end."""
        reduced = None
        try:
            if self._failure is None:
                with self._computing, self._timing.work(), named(self._name, "reduce"):
                    if bucket.steps is None:
                        if bucket.ready is not None:
                            torch.cuda.current_stream(self._device).wait_event(bucket.ready)
                        bucket.steps = bucket.reduce()
                    reduced = bucket.go_on()
        except BaseException as failure:
            self._fail(failure)
        if bucket.waits is None or self._failure is not None:
            self._end(bucket, reduced)
        elif not self._is_ordered:
            self._waiters.submit(functools.partial(self._wait_elsewhere, bucket))
        elif not bucket.waits.is_uniform:
            # Another rank may have no wait here, and would then be one wait ahead.
            self._wait_and_advance(bucket)

    def _end(self, bucket: _Bucket, reduced: Tensor | None) -> None:
        with self._books:
            if bucket not in self._unfinished:
                return  # given up already
            self._unfinished.remove(bucket)
            self._turns.pop(bucket, None)
        with suppress(ValueError):
            self._under_way.remove(bucket)
        bucket.steps = bucket.waits = None
        bucket.reduced.set_result(reduced)

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

    def break_off(self, failure: HookError) -> None:
        self._fail(failure)

    def _begin_turn(self, work: _Bucket | HostFuture[Any]) -> None:
        self._turns[work] = self._num_turns
        self._num_turns += 1

    @property
    def num_turns(self) -> int:
        return self._num_turns

    def _note_wait(self) -> None:
        """Tell other ranks of a long wait: a rank that waits for this one elsewhere learns that neither will end."""
        with self._books:
            first = min(self._turns.values(), default=-1)
        turn, times = self._waits
        self._waits = first, times + 1 if first == turn else 0
        if first >= 0 and self._waits[1] == CHECKS_TO_TELL:
            self.tell_wait(first)

    def without_a_peer(self) -> object | None:
        """Return `None` unless this engine waits and a peer is gone; then its byte counts, to compare."""
        self._note_wait()
        is_waiting = self._thread.ident in waiting_threads or self._waiters.are_among(waiting_threads)
        return self._connections.without_a_peer() if is_waiting else None

    def give_up(self) -> None:
        """End all work that waits for a peer that is gone; the waiting threads stay until gloo releases them."""
        lost = ConnectionError("another rank is gone")
        if self._computing.acquire(timeout=PATIENCE_SECONDS):
            # Their computations add context to the error.
            for bucket in tuple(self._under_way):
                bucket.failure = lost
                self._advance(bucket)
            self._computing.release()
        self._fail(HookError(str(lost)))
        self._gave_up = True
        with self._books:
            buckets, called = [*self._unfinished], [*self._called]
        for bucket in buckets:
            self._end(bucket, None)
        for one in called:
            with suppress(InvalidStateError):
                one.set_exception(self._error())

    @property
    def is_stuck(self) -> bool:
        return self._gave_up

    def close(self) -> None:
        if self._closed:
            return
        super().close()
        if self._is_forked:
            return
        with self._books:
            breaks_off = self._more_follow and bool(self._unfinished)
        if breaks_off:
            # Peers have handed over other buckets: this rank's collectives would not match theirs.
            self.break_off(HookError("the communication hook was closed in the middle of a backward"))
        ended = threading.Event()
        self._jobs.put(ended.set)
        if not ended.wait(GRACE_SECONDS):
            self._fail(HookError("the communication hook was closed before its work was done"))
        # The waiters first: they hand back buckets whose futures are still to be set.
        self._join(self._waiters.end())
        self._jobs.put(None)
        self._join([self._thread])
        self._no_watch.set()
        self._watch.join()
        # Gloo would wait 10 ms for each connection that is still open when it closes it.
        self._connections.abort()
        # A second abort, at exit or in a late backward, might hit ports that are in use again elsewhere.
        self._connections = Connections()
        _open_engines.discard(self)

    def _join(self, threads: Sequence[threading.Thread]) -> None:
        for thread in threads:
            while thread.is_alive() and not (self._gave_up and thread.ident in waiting_threads):
                thread.join(GRACE_SECONDS)

    def _wait_for(self, work: HostFuture[Any]) -> None:
        try:
            work.exception()
        except BaseException as interruption:
            self._fail(HookError(f"the communication hook was interrupted by {interruption!r}"))
            raise


def _start(function: Callable[..., None], *args: object) -> threading.Thread:
    """Start a daemon thread: at exit, engines close first and join their threads, except those that gloo holds."""
    thread = threading.Thread(target=function, args=args, name="lightning_commhooks", daemon=True)
    thread.start()
    return thread


def _run(engine: weakref.ref[ThreadEngine], jobs: queue.SimpleQueue[_Bucket | Callable[[], object] | None]) -> None:
    # Record no gradients, even in a backward with create_graph=True.
    with torch.no_grad():
        while (job := jobs.get()) is not None:
            own = engine()
            if own is not None:
                try:
                    own.handle(job)
                except BaseException as failure:  # or the waits for this thread would never end
                    with suppress(BaseException):
                        own.fail(failure)
            del own, job  # they hold results


def _record(device: torch.device) -> torch.cuda.Event | None:
    """On CUDA, record an event after the work so far on the caller's stream, for the engine to wait for."""
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
