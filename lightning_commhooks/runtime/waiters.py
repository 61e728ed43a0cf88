"""Threads that wait in addition to the engine's: for works of buckets, and for a peer that is gone."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

# How long a wait continues after a peer is gone, if nothing arrives from the remaining peers either.
PATIENCE_SECONDS = 2.0
_CHECK_SECONDS = 0.25


class Waiters:
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

    def are_among(self, threads: set[int]) -> bool:
        """Whether one of these threads is."""
        return any(thread.ident in threads for thread in tuple(self._threads))

    def end(self) -> list[threading.Thread]:
        """Make the threads end, each when its function is done, and return them."""
        for _ in self._threads:
            self._functions.put(None)
        return self._threads


class Watched(Protocol):
    """Something that [`watch`][] watches."""

    def without_a_peer(self) -> object | None:
        """`None` unless it waits and a peer is gone; then how far it is, to be compared."""

    def give_up(self) -> None:
        """End what waits; called from another thread."""


def watch(what: weakref.ref[Watched], closed: threading.Event) -> None:
    """Until it is closed or gone, let it give up when it has waited too long for a peer that is gone."""
    before, num_equal = None, 0
    while not closed.wait(_CHECK_SECONDS):
        watched = what()
        if watched is None:
            return
        state = watched.without_a_peer()
        num_equal = num_equal + 1 if state is not None and state == before else 0
        before = state
        if num_equal * _CHECK_SECONDS >= PATIENCE_SECONDS:
            watched.give_up()
            return
        del watched
