"""Messages from one rank to another over gloo."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

# Limits: buckets in flight at once, groups of ranks within each, and messages in each before numbers repeat.
_CHANNELS, _PARTS, _NUMBERS = 2**12, 2**5, 2**13


class Messages:
    """Messages among some ranks of a gloo group that has no other use except gloo's own collectives.

    A channel reduces one bucket and has its own message numbers, so that ranks may process their buckets in any order.
    Within a channel, all ranks begin the same collectives in the same order.

    Args:
        backend: all ranks, a `ProcessGroupGloo`. If it has several contexts, messages are distributed over them.

    Attributes:
        size: number of ranks.
        rank: this rank.
        peers: the other ranks, starting with a different one on each rank.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._first = self._part = self._begun = 0
        self._set_members(range(backend.size()), backend.rank())

    def _set_members(self, members: Sequence[int], rank: int) -> None:
        self._members, self.size, self.rank = members, len(members), rank
        self.peers = [(rank + distance) % self.size for distance in range(1, self.size)]

    def channel(self, number: int) -> Messages:
        """Return the same ranks in another channel, whose number is rank-uniform; the initial channel is 0."""
        other = copy.copy(self)
        other._first, other._begun = number % _CHANNELS * _PARTS * _NUMBERS, 0
        return other

    def among(self, ranks: Sequence[int], part: int) -> Messages:
        """Return messages among some of these ranks, including this one. Needs no communication.

        Args:
            ranks: the ranks.
            part: distinguishes overlapping groups of ranks; equal on all of these ranks, at least 1.

        Raises:
            ValueError: this object is a subgroup already, or there are too many groups.
        """
        if self._part:
            raise ValueError("a subgroup cannot be split: split the whole group instead")
        if part >= _PARTS:
            raise ValueError(f"a hook can have {_PARTS - 1} divisions into subgroups at most")
        some = copy.copy(self)
        some._part, some._begun = part, 0
        some._set_members([self._members[i] for i in ranks], ranks.index(self.rank))
        return some

    def number(self) -> int:
        """Return the number of the next messages."""
        self._begun += 1
        return self._first + self._part * _NUMBERS + self._begun % _NUMBERS

    def receive(self, places: Sequence[Tensor], number: int) -> list[dist.Work]:
        """Post a receive from each peer; empty messages are not sent."""
        pairs = zip(places, self.peers, strict=True)
        return [self._backend.recv([place], self._members[peer], number) for place, peer in pairs if place.numel()]

    def send(self, tensors: Sequence[Tensor], number: int) -> list[dist.Work]:
        """Begin to send a contiguous tensor to each peer; do not change it before the send has been waited for."""
        pairs = zip(tensors, self.peers, strict=True)
        return [self._backend.send([tensor], self._members[peer], number) for tensor, peer in pairs if tensor.numel()]

    def swap(self, own: Tensor, other: Tensor, distance: int) -> None:
        """Send a tensor to the rank `distance` places ahead, and receive one from the rank as far behind."""
        number = self.number()
        arriving = self._backend.recv([other], self._members[(self.rank - distance) % self.size], number)
        sent = self._backend.send([own], self._members[(self.rank + distance) % self.size], number)
        arriving.wait()
        sent.wait()
