"""Threads that run hooks take turns: one at a time, until it waits for other ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Held(threading.local):
    """What this thread has.

    Attributes:
        turn: the lock of the turn that it has, if there are several threads.
        lane: its number among them; 0 of all other threads.
    """

    turn: threading.Lock | None = None
    lane: int = 0


_held = _Held()


class Turns:
    """Of several threads, the lanes, one at a time has its turn.

    Code between two waits is one step for all of them, so that what they share needs no other lock, and they do not
    fight over processors.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @contextmanager
    def turn(self, lane: int) -> Iterator[None]:
        """Wait for this thread's turn, and have it but for the time in `waiting`."""
        with self._lock:
            _held.turn, _held.lane = self._lock, lane
            try:
                yield
            finally:
                _held.turn, _held.lane = None, 0


@contextmanager
def waiting() -> Iterator[None]:
    """While this thread waits for other ranks: others may have their turn."""
    lock = _held.turn
    if lock is None:
        yield
        return
    lock.release()
    try:
        yield
    finally:
        lock.acquire()


@contextmanager
def in_lane(number: int) -> Iterator[None]:
    """Begin collectives as the thread of that number does."""
    before, _held.lane = _held.lane, number
    try:
        yield
    finally:
        _held.lane = before


def lane() -> int:
    """The number of this thread: collectives of different threads are not in one order on all ranks."""
    return _held.lane
