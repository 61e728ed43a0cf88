"""Computations that wait for other ranks, as generators: they yield their waits, and never wait themselves.

    total = yield from ranks.all_reduce_(tensor)

The code that advances a generator waits for the works that it yields: an engine for many generators at a time, `finish`
for one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import GeneratorType
from typing import Any, Protocol, TypeVar

from lightning_commhooks.basics.ranges import named

T = TypeVar("T")

_AS_IN = "as in `yield from ranks.all_reduce_mean_(bucket.flat)`"

# Threads that wait for other ranks at present.
waiting_threads: set[int] = set()


class Work(Protocol):
    """A collective that is under way, as `torch.distributed` returns it."""

    def wait(self) -> object:
        """Wait until the collective is done; on NCCL the current stream waits, not the host."""


@dataclass(frozen=True)
class Wait:
    """Collectives that must be done before a computation continues.

    Attributes:
        works: the collectives.
        name: name of the collective, for profiler traces.
        is_uniform: whether all ranks wait here, and equally often.
    """

    works: Sequence[Work]
    name: str = "wait"
    is_uniform: bool = True

    def wait(self) -> None:
        """Wait for all of them."""
        thread = threading.get_ident()
        waiting_threads.add(thread)
        try:
            with named(self.name):
                for work in self.works:
                    work.wait()
        finally:
            waiting_threads.discard(thread)


# A computation that yields each `Wait` that must end before it continues.
Steps = Generator[Wait, None, T]


def checked(steps: Steps[T], hook: object, method: str) -> Steps[T]:
    """Return the result of a hook's method; raise a `TypeError` if it is no generator, whose waits would be lost."""
    if not isinstance(steps, Generator):
        raise TypeError(
            f"{type(hook).__name__}.{method} is no generator, it returned {type(steps).__name__}: wait for "
            f"each collective by `yield from`, {_AS_IN}; if there is none, end with `return` and a `yield` after it"
        )
    return steps


def advance(steps: Generator[Any, None, T], failure: BaseException | None = None) -> Wait:
    """Run a computation until it waits; if it ends, a `StopIteration` has the result.

    The error of its last wait, `failure`, is raised in the computation, which adds context to it. So is a `TypeError`
    if it yields anything but a `Wait`.
    """
    try:
        waits = next(steps) if failure is None else steps.throw(failure)
    finally:
        failure = None  # it would keep the frames that it has collected
    if isinstance(waits, Wait):
        return waits
    error = f"{_innermost(steps)} yields {type(waits).__name__}: write `yield from`, not `yield`, {_AS_IN}"
    return advance(steps, TypeError(error))


def _innermost(steps: Any) -> str:
    """The name of the function that has yielded, such as `MyHook.reduce`."""
    while isinstance(inner := steps.gi_yieldfrom, GeneratorType):
        steps = inner
    name: str = steps.__qualname__
    return name.rpartition("<locals>.")[2]


def finish(steps: Steps[T], waiting: Callable[[], AbstractContextManager[object]] = nullcontext) -> T:
    """Run a computation to its end, waiting in this thread.

    An error in a wait is raised in the computation, which adds context to it. `waiting` makes a context manager that is
    entered for each wait, for example to time it.
    """
    failure: Exception | None = None
    while True:
        try:
            waits = advance(steps, failure)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
        finally:
            failure = None  # as in `advance`
        try:
            with waiting():
                waits.wait()
        except Exception as reason:
            failure = reason


def result(value: T) -> Steps[T]:
    """Return a computation that already has its result."""
    return value
    yield  # type: ignore[unreachable]  # makes it a generator
