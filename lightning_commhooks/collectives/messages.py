"""Messages from one rank to another over gloo."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_commhooks.collectives.turns import lane, waiting

# Numbers of messages in the first round of a thread's collectives; as many more are those of the second.
_NUMBERS = 2**23


class Messages:
    """Messages among the ranks of a gloo group that is used for nothing else but gloo's own collectives.

    All ranks begin the same collectives in the same order; each has the same number on all of them. Threads that do so
    beside each other have numbers of their own: see `turns.lane`.

    Args:
        backend: the ranks, a `ProcessGroupGloo`. If it has several contexts, messages take turns among them.

    Attributes:
        size: number of ranks.
        rank: this one.
        peers: the others. Not all ranks begin with the same one.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.size: int = backend.size()
        self.rank: int = backend.rank()
        self.peers = [(self.rank + distance) % self.size for distance in range(1, self.size)]
        # How many collectives each lane has begun.
        self._begun: dict[int, int] = {}

    def number(self) -> int:
        """The number of the next collective of this thread."""
        begun = self._begun.get(lane(), 0)
        self._begun[lane()] = begun + 1
        return 2 * _NUMBERS * lane() + begun % _NUMBERS

    def second(self, number: int) -> int:
        """The number of the second round of a collective."""
        return number + _NUMBERS

    def receive(self, places: Sequence[Tensor], number: int) -> list[dist.Work]:
        """Say that this rank waits for a message of each peer; empty ones are not sent."""
        pairs = zip(places, self.peers, strict=True)
        return [self._backend.recv([place], peer, number) for place, peer in pairs if place.numel()]

    def send(self, tensors: Sequence[Tensor], number: int) -> list[dist.Work]:
        """Begin to send each peer a tensor, contiguous and not to be touched before it is waited for."""
        pairs = zip(tensors, self.peers, strict=True)
        return [self._backend.send([tensor], peer, number) for tensor, peer in pairs if tensor.numel()]

    def swap(self, own: Tensor, other: Tensor, distance: int) -> None:
        """Send the rank at that distance a tensor, and wait for the one of the rank as far before."""
        number = self.number()
        arriving = self._backend.recv([other], (self.rank - distance) % self.size, number)
        sent = self._backend.send([own], (self.rank + distance) % self.size, number)
        self.wait([arriving, sent])

    def wait(self, works: Iterable[dist.Work]) -> None:
        """Wait until messages have been sent and received; other threads have their turn."""
        with waiting():
            for work in works:
                work.wait()
