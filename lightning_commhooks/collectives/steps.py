"""Computations that wait for other ranks, as generators: they yield what they wait for, and never wait themselves.

    total = yield from ranks.all_reduce_(tensor)

Whoever advances a generator waits for what it yields: an engine for many of them beside each other, `finish` for one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, TypeVar

from lightning_commhooks.basics.ranges import named

T = TypeVar("T")


# Threads that wait for other ranks at present.
waiting_threads: set[int] = set()


class Work(Protocol):
    """A collective that is under way, as `torch.distributed` returns it."""

    def wait(self) -> object:
        """Wait until it is done; on NCCL the current stream waits, not the host."""


@dataclass(frozen=True)
class Wait:
    """Works that have to be done before a computation goes on.

    Attributes:
        works: all of them.
        name: of the collective, for the traces of profilers.
        is_uniform: whether all ranks wait here, and as often as the others.
    """

    works: Sequence[Work]
    name: str = "wait"
    is_uniform: bool = True

    def wait(self) -> None:
        """Wait for all."""
        thread = threading.get_ident()
        waiting_threads.add(thread)
        try:
            with named(self.name):
                for work in self.works:
                    work.wait()
        finally:
            waiting_threads.discard(thread)


# A computation that yields what must be done before it goes on.
Steps = Generator[Wait, None, T]


def finish(steps: Steps[T], waiting: Callable[[], AbstractContextManager[object]] = nullcontext) -> T:
    """Run a computation to its end, waiting in this thread.

    Args:
        steps: the computation. What fails in a wait is raised there: it tells what it was about.
        waiting: makes what is entered for each wait, as to time it.
    """
    failure: Exception | None = None
    while True:
        try:
            waits = next(steps) if failure is None else steps.throw(failure)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
        finally:
            failure = None  # it would keep the frames that it has collected
        try:
            with waiting():
                waits.wait()
        except Exception as reason:
            failure = reason


def begun(steps: Steps[T]) -> Steps[T]:
    """Run a computation until it waits for the first time; returns the rest of it."""
    try:
        waits = next(steps)
    except StopIteration as done:
        return result(done.value)
    return _rest(waits, steps)


def _rest(waits: Wait, steps: Steps[T]) -> Steps[T]:
    yield waits
    return (yield from steps)


def result(value: T) -> Steps[T]:
    """A computation that has its result already."""
    return value
    yield  # type: ignore[unreachable]  # makes it a generator
