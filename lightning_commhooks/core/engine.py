"""Runs a bound hook on buckets, one after another, in the order in which DDP hands them over.

Collectives are issued in that order and no other, so ranks cannot disagree. Where the overlap with the
backward pass comes from depends on the device: see [`ThreadEngine`][] and [`StreamEngine`][].
"""

from __future__ import annotations

import atexit
import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor
from torch.futures import Future

T = TypeVar("T")


@functools.cache
def _let_gloo_finish_at_exit() -> None:
    """At exit, give gloo's threads the time to drop the tensors of their last collective.

    They do so shortly after the collective is done, and need the interpreter for it. If that is shutting down
    already, the process aborts: "terminate called without an active exception".
    """
    atexit.register(time.sleep, 0.05)


class HookError(RuntimeError):
    """A communication hook failed; the message names hook, step and bucket, `__cause__` is the reason."""


def call_at_end_of_backward(function: Callable[[], None]) -> None:
    """Let autograd call `function` when the present backward is done; outside of one, do nothing."""
    try:
        torch.autograd.Variable._execution_engine.queue_callback(function)
    except RuntimeError:
        return


class Engine(ABC):
    """Runs work items in the order of submission."""

    @abstractmethod
    def submit(self, work: Callable[[], Tensor], device: torch.device) -> Future[Tensor]:
        """Run `work`, return a future of its result for DDP."""

    @abstractmethod
    def call(self, function: Callable[[], T]) -> T:
        """Run `function` after all submitted work and return its result."""

    @abstractmethod
    def close(self) -> None:
        """Wait for submitted work and release threads. Later submissions raise `HookError`."""


class ThreadEngine(Engine):
    """One communication thread, for CPU tensors and for gloo.

    After the first failure no further work runs: this rank's collectives would not match its peers'.
    """

    def __init__(self) -> None:
        _let_gloo_finish_at_exit()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="lightning_commhooks")
        self._failure: BaseException | None = None
        self._closed = False

    def submit(self, work: Callable[[], Tensor], device: torch.device) -> Future[Tensor]:
        self._raise_if_unusable()
        devices: list[int | str | torch.device] | None = [device] if device.type == "cuda" else None
        raw: Future[Tensor | None] = Future(devices=devices)
        ready = torch.cuda.current_stream(device).record_event() if devices else None

        def run() -> None:
            try:
                if self._failure is None:
                    if ready is not None:
                        torch.cuda.current_stream(device).wait_event(ready)
                    raw.set_result(work())
                    return
            except BaseException as failure:
                self._failure = failure
            raw.set_result(None)

        def unwrap(done: Future[Tensor | None]) -> Tensor:
            result = done.value()
            if result is None:
                assert self._failure is not None
                raise HookError(str(self._failure)) from self._failure
            return result

        result = raw.then(unwrap)
        self._executor.submit(run)
        return result

    def call(self, function: Callable[[], T]) -> T:
        self._raise_if_unusable()

        def run() -> T:
            self._raise_if_unusable()
            return function()

        return self._executor.submit(run).result()

    def close(self) -> None:
        self._closed = True
        self._executor.shutdown(wait=True)

    def _raise_if_unusable(self) -> None:
        if self._failure is not None:
            # A new exception: the stored one would collect the frames of the user's code, and keep them alive.
            raise HookError(str(self._failure)) from self._failure.__cause__
        _raise_if_closed(self._closed)


class StreamEngine(Engine):
    """A side stream, for CUDA tensors on NCCL: the hook's kernels and collectives queue up on it, inline.

    A blocking NCCL collective blocks the side stream only, so that the backward goes on beside it.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._closed = False

    def submit(self, work: Callable[[], Tensor], device: torch.device) -> Future[Tensor]:
        _raise_if_closed(self._closed)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with self._context():
            future: Future[Tensor] = Future(devices=[device])
            future.set_result(work())
        return future

    def call(self, function: Callable[[], T]) -> T:
        _raise_if_closed(self._closed)
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with self._context():
            result = function()
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        return result

    def close(self) -> None:
        self._closed = True

    @contextmanager
    def _context(self) -> Iterator[None]:
        # A backward may run inside the user's autocast, which must not round the hook's own products.
        with torch.cuda.stream(self._stream), torch.autocast("cuda", enabled=False), torch.no_grad():
            yield


def _raise_if_closed(closed: bool) -> None:
    if closed:
        raise HookError("the communication hook was closed; attach a hook to a new DistributedDataParallel")
