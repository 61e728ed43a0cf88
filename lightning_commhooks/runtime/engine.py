"""Engines, which run the reductions of hooks during the backward: [`ThreadEngine`][] and [`InlineEngine`][].

The reduction of a bucket is a generator that yields its waits. Buckets are numbered in the order in which DDP hands
them over, which is the same on all ranks; each communicates in a channel of that number.
"""

from __future__ import annotations

import atexit
import functools
import os
import queue
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future as HostFuture
from concurrent.futures import InvalidStateError
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.futures import Future

from lightning_commhooks.basics.ranges import named
from lightning_commhooks.collectives.counters import Timing
from lightning_commhooks.collectives.errors import HookError, keep_in_forks, raise_if_capturing, raise_if_fork_of
from lightning_commhooks.collectives.gloo_abort import Connections
from lightning_commhooks.collectives.steps import Steps, Wait, advance, finish, waiting_threads

T = TypeVar("T")

CLOSED = (
    "the communication hook was closed; attach another one, to a new wrapper if the model is in DistributedDataParallel"
)
# Number of buckets that are under way at the same time if all ranks have to use one order.
BUCKETS_AT_ONCE = 4
# How long a wait continues after a peer is gone, if nothing arrives from the remaining peers either.
PATIENCE_SECONDS = 2.0
_CHECK_SECONDS = 0.25
# Number of checks that must see a wait last before other ranks are told.
CHECKS_TO_TELL = 4
# Work that is under way when an engine closes usually waits for peers.
GRACE_SECONDS = 1.0


class Engine(ABC):
    """Runs reductions of buckets, and functions in turn with them.

    After the first failure no further work runs: this rank's collectives would not match its peers'. A failure of work,
    or of code before it (`aborting`), aborts the process group, so that peers need not wait for the group's timeout.

    The methods of `connections`, those between the ranks, are called from any thread, perhaps more than once. `timing`
    adds up the time of work and of waiting. Profiler traces have the name of the hook.

    Attributes:
        num_turns: number of buckets and calls of steps so far, equal on all ranks; `None` if ranks do not exchange it.
        is_stuck: whether a thread may wait for ranks that have gone.
    """

    def __init__(self, device: torch.device, connections: Connections, timing: Timing, name: str) -> None:
        self._device = device
        self._connections = connections
        self._timing = timing
        self._name = name
        self._closed = False
        self._process = os.getpid()
        self._failure: BaseException | None = None
        self.num_turns: int | None = None
        self.is_stuck = False

    @abstractmethod
    def submit(self, reduce: Callable[[], Steps[Tensor]], device: torch.device, is_last: bool) -> Future[Tensor]:
        """Reduce a bucket on `device`, and return a future of its gradients for DDP.

        `reduce` creates the computation. `is_last` says whether no other bucket of this backward follows, as far as is
        known; equal on all ranks.
        """

    @abstractmethod
    def call(self, function: Callable[[], T], in_step: bool = False) -> T:
        """Run `function`, which may wait for other ranks, when all buckets are done, and return its result.

        `in_step` says whether it is a part of a step, which all ranks take: see `num_turns`. Raises a `HookError`
        without running it if earlier work has failed.
        """

    def run_inline(self, function: Callable[[], T]) -> T:
        """Run `function`, which waits for no other rank, in this thread at once, and return its result.

        Like other work, it runs without gradient recording and autocast, even if the calling code uses them: autocast
        would round the hook's own matrix products.
        """
        autocast = torch.autocast(self._device.type, enabled=False)
        with self.aborting(), torch.inference_mode(False), torch.no_grad(), autocast:
            return function()

    @contextmanager
    def aborting(self) -> Iterator[None]:
        """End the work of all ranks if the body raises, in any thread: peers would wait for this rank."""
        try:
            yield
        except BaseException as failure:
            self.fail(failure)
            raise

    def fail(self, failure: BaseException) -> None:
        """End the work of all ranks."""
        # A new exception: this one collects the frames of the user's code, and would keep them alive.
        later = HookError(str(failure) or repr(failure))
        later.__cause__ = failure.__cause__
        self._fail(later)

    def _fail(self, failure: BaseException) -> None:
        """Abort collectives under way, here and on peers; later work raises `HookError`."""
        if self._failure is None:
            self._failure = failure
        if not self._is_forked:
            self._connections.fail()

    def break_off(self, failure: HookError) -> None:
        """Do no further work, because a backward has raised and peers have handed over other buckets."""
        if self._failure is None:
            # The source's own process group is left to the user, who may have caught this on all ranks.
            self._failure = failure

    def _error(self) -> HookError:
        # A new exception: the stored one would collect the frames of the user's code, and keep them alive.
        failure = self._failure
        error = HookError(str(failure))
        error.__cause__ = failure.__cause__ if isinstance(failure, HookError) else failure
        return error

    @property
    def _is_forked(self) -> bool:
        """Whether this process is a fork of the one that has the threads and connections."""
        return os.getpid() != self._process

    @property
    def has_failed(self) -> bool:
        """Whether there was a failure."""
        return self._failure is not None

    @property
    def has_lost_a_peer(self) -> bool:
        """Whether a connection to another rank is closed; always false if the backend does not expose connections."""
        return self._connections.without_a_peer() is not None

    def raise_if_unusable(self) -> None:
        """Raise `HookError` if work has failed, the engine is closed, this is a fork, or a CUDA graph is captured."""
        if self._is_forked:
            raise_if_fork_of(self._process)
        if self._failure is not None:
            raise self._error()
        if self._closed:
            raise HookError(CLOSED)
        if self._device.type == "cuda":
            raise_if_capturing(self._device)

    def wait_for(self, reduced: Future[Tensor]) -> None:
        """Wait until a bucket is reduced, on CUDA on the current stream; raises a `HookError` if that failed."""
        try:
            reduced.wait()
        except RuntimeError:  # the future has wrapped the error
            self.raise_if_unusable()
            raise

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Time the computation of a bucket, and name it in traces."""
        step, now = self._timing.step, self._timing.now
        begin = None if step is None else now()
        with named(self._name, "reduce"):
            yield
        if step is not None:
            step.work.append((begin, now()))

    def close(self) -> None:
        """Wait for submitted work, or abort it if it does not end soon, and release threads."""
        self._closed = True


class InlineEngine(Engine):
    """Runs a hook to its end, in the thread that hands a bucket over.

    With a side stream, for CUDA tensors on NCCL, the hook's kernels and collectives queue up on it. Waiting for a
    collective blocks the side stream only, so the backward continues in parallel. The stream has high priority: a
    device serves kernels in the order of their launches, and the host has usually launched the rest of the backward
    long before the device reaches a hook's kernels for a bucket, for which other ranks wait. (NCCL's own stream has the
    priority that the process group gives it.)
    """

    def __init__(
        self,
        device: torch.device,
        connections: Connections,
        timing: Timing,
        name: str,
        has_side_stream: bool = False,
    ) -> None:
        super().__init__(device, connections, timing, name)
        self._stream = torch.cuda.Stream(device, priority=-1) if has_side_stream else None

    def submit(self, reduce: Callable[[], Steps[Tensor]], device: torch.device, is_last: bool) -> Future[Tensor]:
        self.raise_if_unusable()

        def run() -> Future[Tensor]:
            future: Future[Tensor] = Future(devices=[device] if device.type == "cuda" else None)
            with self._working():
                future.set_result(finish(reduce(), self._timing.comm))
            return future

        # In parallel with the backward: its stream does not wait for this one.
        with self._on_side_stream():
            return super().run_inline(run)

    def call(self, function: Callable[[], T], in_step: bool = False) -> T:
        self.raise_if_unusable()
        return self.run_inline(function)

    def run_inline(self, function: Callable[[], T]) -> T:
        with self._on_side_stream():
            result = super().run_inline(function)
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return result

    def _on_side_stream(self) -> AbstractContextManager[object]:
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)


class _Waiters:
    """As many threads as functions that run at once. Daemons: gloo may end a wait long after its peer is gone."""

    def __init__(self) -> None:
        self._functions: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []

    def submit(self, function: Callable[[], None]) -> None:
        """Run a function that raises nothing."""
        self._functions.put(function)
        if not self._idle.acquire(blocking=False):
            thread = threading.Thread(target=self._run, name="lightning_commhooks wait", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run(self) -> None:
        while (function := self._functions.get()) is not None:
            function()
            del function  # it holds a bucket
            self._idle.release()

    @property
    def is_waiting(self) -> bool:
        """Whether one of the threads waits for other ranks."""
        return any(thread.ident in waiting_threads for thread in tuple(self._threads))

    def end(self) -> list[threading.Thread]:
        """Make the threads end, each when its function is done, and return them."""
        for _ in self._threads:
            self._functions.put(None)
        return self._threads


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

    def advance(self) -> Tensor | None:
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

    `is_ordered` says whether all ranks have to begin collectives in one order, and `aborts_at_end` whether closing the
    engine ends its connections.
    """

    def __init__(
        self,
        device: torch.device,
        connections: Connections,
        timing: Timing,
        name: str = "hook",
        is_ordered: bool = True,
        aborts_at_end: bool = True,
    ) -> None:
        super().__init__(device, connections, timing, name)
        _prepare_exit()
        self._is_ordered, self._aborts_at_end = is_ordered, aborts_at_end
        # Buckets and calls whose results a thread may wait for.
        self._unfinished: set[_Bucket] = set()
        self._called: set[HostFuture[Any]] = set()
        self._lock = threading.Lock()
        self.num_turns: int = 0
        # The numbers of the buckets and calls of steps that have no result yet.
        self._turns: dict[_Bucket | HostFuture[Any], int] = {}
        # Tells other ranks the lowest of these numbers, if it stays the same for long.
        self.tell_wait: Callable[[int], None] = lambda turn: None
        # The lowest number at the last check, and how many checks before had the same.
        self._waits: tuple[int, int] = -1, 0
        # Whether more buckets of the current backward follow.
        self._more_follow = False
        # Held while the computation of a bucket runs.
        self._computing = threading.RLock()
        self._under_way: deque[_Bucket] = deque()
        self._jobs: queue.SimpleQueue[_Bucket | Callable[[], object] | None] = queue.SimpleQueue()
        # Functions that wait until all buckets are done.
        self._calls: deque[Callable[[], object]] = deque()
        self._waiters = _Waiters()
        weakref.finalize(self, self._jobs.put, None).atexit = False
        self._thread = _start(_run, weakref.ref(self), self._jobs)
        self._no_watch = threading.Event()
        weakref.finalize(self, self._no_watch.set).atexit = False
        self._watch = _start(_watch, weakref.ref(self), self._no_watch)
        _open_engines.add(self)
        keep_in_forks(self)

    def submit(self, reduce: Callable[[], Steps[Tensor]], device: torch.device, is_last: bool = True) -> Future[Tensor]:
        bucket = _Bucket(reduce, device, is_last)
        with self._lock:
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
        with self._lock:
            self.raise_if_unusable()
            self._called.add(called)
            if in_step:
                self._begin_turn(called)
        ready, done = _record(self._device), torch.cuda.Event() if self._device.type == "cuda" else None

        def run() -> None:
            try:
                if self._failure is not None:
                    raise self._error()
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
            called.exception()  # waits
        except BaseException as interruption:
            self._fail(HookError(f"the communication hook was interrupted by {interruption!r}"))
            raise
        finally:
            with self._lock:
                self._called.discard(called)
                self._turns.pop(called, None)
        result = called.result()
        if done is not None:
            torch.cuda.current_stream(self._device).wait_event(done)
        return result

    def handle(self, job: _Bucket | Callable[[], object]) -> None:
        """Process the next job; called in the engine's thread."""
        if isinstance(job, _Bucket):
            if job.steps is None:
                self._under_way.append(job)
            self._advance(job)
        else:
            self._calls.append(job)
        if self._is_ordered:
            self._go_on_in_order(job)
        while self._calls and not self._under_way:
            self._calls.popleft()()

    def _go_on_in_order(self, job: _Bucket | Callable[[], object]) -> None:
        for bucket in [*self._under_way] if isinstance(job, _Bucket) else ():
            if bucket is not job:
                self._wait_and_advance(bucket)
        everything = not isinstance(job, _Bucket) or job.is_last
        while len(self._under_way) >= (1 if everything else BUCKETS_AT_ONCE):
            # While this thread waits for one bucket, the collectives of the other buckets are under way.
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
                with self._computing, self._working():
                    if bucket.steps is None:
                        if bucket.ready is not None:
                            torch.cuda.current_stream(self._device).wait_event(bucket.ready)
                        bucket.steps = bucket.reduce()
                    reduced = bucket.advance()
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
        with self._lock:
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
        step, now = self._timing.step, self._timing.now
        begin = None if step is None else now()
        try:
            waits.wait()
        except BaseException as failure:
            bucket.failure = failure
        else:
            if step is not None:
                step.comm.append((begin, now()))

    def break_off(self, failure: HookError) -> None:
        self._fail(failure)

    def _begin_turn(self, work: _Bucket | HostFuture[Any]) -> None:
        self._turns[work] = self.num_turns
        self.num_turns += 1

    def _note_wait(self) -> None:
        """Tell other ranks of a long wait: a rank that waits for this one elsewhere learns that neither will end."""
        with self._lock:
            first = min(self._turns.values(), default=-1)
        turn, times = self._waits
        self._waits = first, times + 1 if first == turn else 0
        if first >= 0 and self._waits[1] == CHECKS_TO_TELL:
            self.tell_wait(first)

    def without_a_peer(self) -> object | None:
        """Return `None` unless this engine waits and a peer is gone; then its byte counts, to compare."""
        self._note_wait()
        is_waiting = self._thread.ident in waiting_threads or self._waiters.is_waiting
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
        self.is_stuck = True
        with self._lock:
            buckets, called = [*self._unfinished], [*self._called]
        for bucket in buckets:
            self._end(bucket, None)
        for one in called:
            with suppress(InvalidStateError):
                one.set_exception(self._error())

    def close(self) -> None:
        if self._closed:
            return
        super().close()
        if self._is_forked:
            return
        with self._lock:
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
        self._join([self._watch])
        if self._aborts_at_end:
            # Gloo would wait 10 ms for each connection that is still open when it closes it.
            self._connections.abort()
        # A second abort, at exit or in a late backward, might hit ports that are in use again elsewhere.
        self._connections = Connections()
        _open_engines.discard(self)

    def _join(self, threads: Sequence[threading.Thread]) -> None:
        # The garbage collector may close the engine in one of its own threads.
        for thread in set(threads) - {threading.current_thread()}:
            while thread.is_alive() and not (self.is_stuck and thread.ident in waiting_threads):
                thread.join(GRACE_SECONDS)


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
def _prepare_exit() -> None:
    """At exit, close the engines before the interpreter waits for their threads, and wait for gloo's threads.

    A thread of an engine may be in a collective that a peer never joins. Functions of `atexit` run too late, after the
    threads; `concurrent.futures` ends its own threads in this way. Gloo's threads drop the tensors of their last
    collective shortly after it is done, and need the interpreter for it. If the interpreter is shutting down already,
    the process aborts: "terminate called without an active exception".
    """
    threading._register_atexit(_close_engines)  # type: ignore[attr-defined]
    atexit.register(time.sleep, 0.05)


def _close_engines() -> None:
    for engine in list(_open_engines):
        engine.close()


def _watch(engine: weakref.ref[ThreadEngine], closed: threading.Event) -> None:
    """Until an engine is closed or gone, let it give up when it has waited too long for a peer that is gone."""
    before, num_equal = None, 0
    while not closed.wait(_CHECK_SECONDS):
        own = engine()
        if own is None:
            return
        state = own.without_a_peer()
        num_equal = num_equal + 1 if state is not None and state == before else 0
        before = state
        if num_equal * _CHECK_SECONDS >= PATIENCE_SECONDS:
            own.give_up()
            return
        del own
