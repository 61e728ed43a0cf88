"""Messages from one rank to another over gloo."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

# Buckets that may be under way at once; groups of ranks within one; messages of each before numbers come again.
_CHANNELS, _PARTS, _NUMBERS = 2**12, 2**5, 2**13


class Messages:
    """Messages among some ranks of a gloo group that is used for nothing else but gloo's own collectives.

    A channel, in which one bucket is reduced, has numbers of its own, so that ranks may go on with their buckets in any
    order. Within it all ranks begin the same collectives in the same order.

    Args:
        backend: all ranks, a `ProcessGroupGloo`. If it has several contexts, messages take turns among them.

    Attributes:
        size: number of ranks.
        rank: this one.
        peers: the others. Not all ranks begin with the same one.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._first = self._part = self._begun = 0
        self._set_members(range(backend.size()), backend.rank())

    def _set_members(self, members: Sequence[int], rank: int) -> None:
        self._members, self.size, self.rank = members, len(members), rank
        self.peers = [(rank + distance) % self.size for distance in range(1, self.size)]

    def channel(self, number: int) -> Messages:
        """The same ranks in another channel, whose number is the same on all of them; 0 is where they begin."""
        other = copy.copy(self)
        other._first, other._begun = number % _CHANNELS * _PARTS * _NUMBERS, 0
        return other

    def among(self, ranks: Sequence[int], part: int) -> Messages:
        """Some of these ranks, this one included. Nothing is made, and nobody is asked.

        Args:
            ranks: which.
            part: tells them from other groups of ranks with some of the same; equal on all of them, at least 1.

        Raises:
            ValueError: these are a part already, or there are more groups than can be told from each other.
        """
        if self._part:
            raise ValueError("a subgroup cannot be split: split the whole group into what is needed")
        if part >= _PARTS:
            raise ValueError(f"a hook can have {_PARTS - 1} divisions into subgroups at most")
        some = copy.copy(self)
        some._part, some._begun = part, 0
        some._set_members([self._members[i] for i in ranks], ranks.index(self.rank))
        return some

    def number(self) -> int:
        """The number of the next messages."""
        self._begun += 1
        return self._first + self._part * _NUMBERS + self._begun % _NUMBERS

    def receive(self, places: Sequence[Tensor], number: int) -> list[dist.Work]:
        """Say that this rank waits for a message of each peer; empty ones are not sent."""
        pairs = zip(places, self.peers, strict=True)
        return [self._backend.recv([place], self._members[peer], number) for place, peer in pairs if place.numel()]

    def send(self, tensors: Sequence[Tensor], number: int) -> list[dist.Work]:
        """Begin to send each peer a tensor, contiguous and not to be touched before it is waited for."""
        pairs = zip(tensors, self.peers, strict=True)
        return [self._backend.send([tensor], self._members[peer], number) for tensor, peer in pairs if tensor.numel()]

    def swap(self, own: Tensor, other: Tensor, distance: int) -> None:
        """Send the rank at that distance a tensor, and wait for the one of the rank as far before."""
        number = self.number()
        arriving = self._backend.recv([other], self._members[(self.rank - distance) % self.size], number)
        sent = self._backend.send([own], self._members[(self.rank + distance) % self.size], number)
        arriving.wait()
        sent.wait()
