"""Runs the reductions of hooks during the backward pass: see [`ThreadEngine`][] and [`StreamEngine`][].

The reduction of a bucket is a generator that yields its waits. Buckets are numbered in the order in which DDP hands
them over, which is the same on all ranks; each communicates in a channel of that number.
"""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.futures import Future

from lightning_commhooks.collectives.errors import HookError, raise_if_capturing, raise_if_fork_of
from lightning_commhooks.collectives.gloo_abort import Connections
from lightning_commhooks.collectives.steps import Steps
from lightning_commhooks.collectives.timing import Timing

T = TypeVar("T")

CLOSED = (
    "the communication hook was closed; attach another one, to a new wrapper if the model is in DistributedDataParallel"
)


def call_at_end_of_backward(function: Callable[[], None]) -> bool:
    """Make autograd call `function` after the current backward; outside of one, do nothing and return `False`."""
    try:
        torch.autograd.Variable._execution_engine.queue_callback(function)
    except RuntimeError:
        return False
    return True


def call_if_backward_breaks_off(function: Callable[[], None]) -> bool:
    """Call `function` after the current backward if it raises; outside of one, do nothing and return `False`.

    If a backward raises, autograd releases its callbacks without calling them.
    """

    def is_done() -> None:
        broken_off.detach()

    broken_off = weakref.finalize(is_done, function)
    broken_off.atexit = False
    if not call_at_end_of_backward(is_done):
        broken_off.detach()
        return False
    return True


class Engine(ABC):
    """Runs reductions of buckets, and functions in turn with them.

    After the first failure no further work runs: this rank's collectives would not match its peers'. A failure of work,
    or of code before it (`aborting`), aborts the process group, so that peers need not wait for the group's timeout.

    Args:
        device: the device of the gradients.
        connections: the connections of the ranks; their methods are called from any thread, perhaps more than once.
        timing: adds up the time of work and the time of waiting.
        name: name of the hook, for profiler traces.
    """

    def __init__(self, device: torch.device, connections: Connections, timing: Timing[Any], name: str) -> None:
        self._device = device
        self._connections = connections
        self._timing = timing
        self._name = name
        self._closed = False
        self._process = os.getpid()
        self._failure: BaseException | None = None

    @abstractmethod
    def submit(self, reduce: Callable[[], Steps[Tensor]], device: torch.device, is_last: bool) -> Future[Tensor]:
        """Reduce a bucket, and return a future of its gradients for DDP.

        Args:
            reduce: creates the computation.
            device: the device of the bucket.
            is_last: whether no other bucket of this backward follows, as far as is known; equal on all ranks.
        """

    @abstractmethod
    def call(self, function: Callable[[], T], in_step: bool = False) -> T:
        """Run `function`, which may wait for other ranks, when all buckets are done, and return its result.

        Args:
            function: what to run.
            in_step: whether `function` is a part of a step, which all ranks take: see `num_turns`.

        Raises:
            HookError: earlier work failed; `function` did not run.
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

    def _raise_if_failed(self) -> None:
        if self._failure is not None:
            raise self._error()

    @property
    def _is_forked(self) -> bool:
        """Whether this process is a fork of the one that has the threads and connections."""
        return os.getpid() != self._process

    @property
    def has_failed(self) -> bool:
        """Whether there was a failure."""
        return self._failure is not None

    @property
    def num_turns(self) -> int | None:
        """Number of buckets and calls of steps so far, equal on all ranks; `None` if ranks do not exchange it."""
        return None

    @property
    def is_stuck(self) -> bool:
        """Whether a thread may wait for ranks that have gone."""
        return False

    def raise_if_unusable(self) -> None:
        """Raise `HookError` if work has failed, the engine is closed, this is a fork, or a CUDA graph is captured."""
        raise_if_fork_of(self._process)
        self._raise_if_failed()
        if self._closed:
            raise HookError(CLOSED)
        raise_if_capturing(self._device)

    def close(self) -> None:
        """Wait for submitted work, or abort it if it does not end soon, and release threads."""
        self._closed = True
