"""Runs a bound hook on buckets, in the order in which DDP hands them over.

Collectives are issued in that order and no other, or in lanes, each with a group or numbers of its own: ranks cannot
disagree. Where the overlap with the backward pass comes from depends on the device: see [`ThreadEngine`][] and
[`StreamEngine`][].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor
from torch.futures import Future

from lightning_commhooks.collectives.errors import HookError, raise_if_capturing

T = TypeVar("T")

CLOSED = "the communication hook was closed; attach a hook to a new DistributedDataParallel"


def call_at_end_of_backward(function: Callable[[], None]) -> None:
    """Let autograd call `function` when the present backward is done; outside of one, do nothing."""
    try:
        torch.autograd.Variable._execution_engine.queue_callback(function)
    except RuntimeError:
        return


class Engine(ABC):
    """Runs work items in the order of submission, those that may overlap in the order of their lane.

    After the first failure no further work runs: this rank's collectives would not match its peers'. So that the
    peers need not wait for the timeout of the process group, a failure aborts it, of work or of what comes before it
    (`aborting`).

    Args:
        device: of the gradients.
        abort: makes collectives under way fail; it is called from any thread, perhaps more than once.
    """

    def __init__(self, device: torch.device, abort: Callable[[], None]) -> None:
        self._device = device
        self._abort = abort
        self._closed = False
        self._failure: BaseException | None = None

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

    def aside(self, function: Callable[[], T]) -> T:
        """Run `function`, which waits for no other rank, in this thread at once, and return its result.

        Without recording and autocast, as work runs, whatever the user's code that asked for it does: within autocast
        the hook's own products would be rounded.
        """
        autocast = torch.autocast(self._device.type, enabled=False)
        with self.aborting(), torch.inference_mode(False), torch.no_grad(), autocast:
            return function()

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

    def _fail(self, failure: BaseException) -> None:
        """Abort collectives under way, here and on peers; later work raises `HookError`."""
        if self._failure is None:
            self._failure = failure
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
        """Raise `HookError` if earlier work failed, the engine is closed, or a CUDA graph is being captured."""
        self._raise_if_failed()
        if self._closed:
            raise HookError(CLOSED)
        raise_if_capturing(self._device)

    def close(self) -> None:
        """Wait for submitted work, or abort it if it does not end soon, and release threads."""
        self._closed = True
