"""Collectives of CPU tensors over gloo in which each rank sends to each other rank directly, in one or two rounds.

Gloo's own collectives use a ring: an all-reduce takes 2(w-1) consecutive rounds of messages, whose latency dominates
small all-reduces between distant ranks. Here it takes two rounds with the same number of bytes. In each round, gloo's
sender first asks whether the receiver is ready, unless the receive has been posted. Here the receives of both rounds
are posted at the start, so a sum takes three times the latency of the link, or twice in a single round.
"""

from __future__ import annotations

import copy
import math
import os
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_commhooks.collectives.steps import Steps, Wait, finish

# Limits: buckets in flight at once, groups of ranks within each, and messages in each before numbers repeat.
_CHANNELS, _PARTS, _NUMBERS = 2**12, 2**5, 2**13
# Tensors of these dtypes are summed in float32.
HALF = (torch.float16, torch.bfloat16)
# Seconds of latency above which ranks are distant and send directly; below, latency is cheap, and gloo's ring needs
# less processor time.
FAR = 4e-3
# Additional seconds per byte if each of two ranks sums the whole tensor instead of half of it.
_SLOWER_IN_ONE_ROUND = 0.2e-9
_PIECE_BYTES = 2**20
_MESSAGE_BYTES = 2**18
# A connection carries one window of bytes per round trip, and starts with a small window after each pause.
_MAX_CONNECTIONS = 4
_LATENCY_PER_CONNECTION = 10e-3
_MAX_SPARE_BYTES = 2**26
_NUM_PINGS = 4
# Limits on additional pings, in number and seconds, if ranks seem distant, which may be due to a busy processor.
_MORE_PINGS = 16
_PING_SECONDS = 1.0
# Environment variable for a known one-way latency in ms.
_LATENCY = "COMMHOOKS_LATENCY_MS"


def takes_one_round(num_bytes: int, world_size: int, latency: float) -> bool:
    """Return whether two ranks exchange a whole tensor, instead of half of it and then half of the sum.

    Both ways send the same number of bytes. The latency, in seconds, is rank-uniform.
    """
    return world_size == 2 and num_bytes * _SLOWER_IN_ONE_ROUND <= latency


def num_pieces(num_bytes: int, world_size: int) -> int:
    """Return the number of pieces in which a tensor is summed concurrently."""
    return max(1, num_bytes // max(_PIECE_BYTES, world_size * _MESSAGE_BYTES))


def num_connections(latency: float) -> int:
    """Return the number of connections between two ranks for a latency in seconds."""
    return max(1, min(_MAX_CONNECTIONS, round(latency / _LATENCY_PER_CONNECTION)))


class Expected(NamedTuple):
    """A gather that `Direct.expect` has announced: the result, shape `(w, n)`, and the receives of its rows."""

    gathered: Tensor
    arriving: list[dist.Work]
    number: int


class Direct:
    """Collectives by direct messages among some ranks of a gloo group that only gloo's own collectives use besides.

    A channel reduces one bucket and has its own message numbers, so that ranks may process their buckets in any order.
    Within a channel, all ranks begin the same collectives in the same order.

    Args:
        backend: all ranks, a `ProcessGroupGloo`. If it has several contexts, messages are distributed over them.
        latency: seconds that a message takes, rank-uniform.

    Attributes:
        is_ordered: whether all ranks have to begin collectives in the same order.
        latency: seconds that a message takes.
        size: number of ranks.
        rank: this rank.
        peers: the other ranks, starting with a different one on each rank.
    """

    is_ordered = False

    def __init__(self, backend: Any, latency: float = 0.0) -> None:
        self.latency = latency
        self._backend = backend
        self.size, self.rank, self._members = backend.size(), backend.rank(), list(range(backend.size()))
        self.peers = _peers_of(self.rank, self.size)
        self._channel = self._subgroup = self._num_messages = 0
        # Receive buffers for reuse: the system would clear new memory each time.
        self._spare: list[Tensor] = []

    def _with(self, **changes: object) -> Direct:
        other = copy.copy(self)
        other.__dict__.update(changes, _num_messages=0)
        return other

    def channel(self, number: int, ranks: object = None) -> Direct:
        """Return the same ranks in another channel, whose number is rank-uniform; the initial channel is 0."""
        return self._with(_channel=number % _CHANNELS)

    def among(self, members: Sequence[int], part: int) -> Direct:
        """Return collectives of some of these ranks, including this one. Collective if ranks are far from each other.

        `part`, from 1 on, distinguishes overlapping groups of ranks, and is equal on all of these ranks.
        """
        if self._subgroup:
            raise ValueError("a subgroup cannot be split: split the whole group instead")
        if part >= _PARTS:
            raise ValueError(f"a hook can have {_PARTS - 1} divisions into subgroups at most")
        size, rank, own = len(members), members.index(self.rank), [self._members[i] for i in members]
        peers = _peers_of(rank, size)
        some = self._with(size=size, rank=rank, peers=peers, _members=own, _subgroup=part, _spare=[])
        if self.latency > FAR:
            some.latency = min(self.latency, measure_latency(some))
        return some

    def number(self) -> int:
        """Return the number of the next messages."""
        self._num_messages += 1
        return (self._channel * _PARTS + self._subgroup) * _NUMBERS + self._num_messages % _NUMBERS

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

    def num_rounds(self, num_bytes: int) -> int:
        """Return the number of rounds of messages in which a tensor is summed."""
        return 1 if takes_one_round(num_bytes, self.size, self.latency) else 2

    def sum_(self, tensor: Tensor) -> Steps[Tensor]:
        """Replace a contiguous tensor by its sum over ranks.

        Each rank sums its share in the order of ranks, 16-bit numbers in float32, and sends the sum to all ranks. The
        result is bit-identical on all ranks and, unlike with gloo's ring, does not depend on the position in a tensor.
        """
        flat = tensor.view(-1)
        pieces = flat.tensor_split(num_pieces(flat.nbytes, self.size))
        if self.num_rounds(flat.nbytes) == 1:
            yield from self._swap(flat, pieces)
            return tensor
        shares, last = [], []
        splits = [piece.tensor_split(self.size) for piece in pieces]
        sizes = [split[self.rank].numel() * len(self.peers) for split in splits]
        memory, received = self._take_memory(flat, sum(sizes))
        for split, place in zip(splits, received.split(sizes), strict=True):
            number, of_sums, own = self.number(), self.number(), split[self.rank]
            rows = place.view(len(self.peers), own.numel())
            arriving = self.receive(list(rows), number)
            last += self.send([split[peer] for peer in self.peers], number)
            last += self.receive([split[peer] for peer in self.peers], of_sums)
            shares.append((own, rows, arriving, of_sums))
        for own, rows, arriving, of_sums in shares:
            yield Wait(arriving)
            self._add_up(own, rows)
            last += self.send([own] * len(self.peers), of_sums)
        yield Wait(last)
        self._give_back(memory)
        return tensor

    def expect(self, like: Tensor) -> Expected:
        """Post the receives of a `gather` of tensors like this one early; this saves a round trip."""
        gathered, number = like.new_empty((self.size, like.numel())), self.number()
        return Expected(gathered, self.receive([gathered[peer] for peer in self.peers], number), number)

    def gather(self, tensor: Tensor, expected: object = None) -> Steps[Tensor]:
        """Return the contiguous tensors of all ranks, shape `(w, n)`; `expected` is the result of `expect`."""
        announced = expected if isinstance(expected, Expected) else self.expect(tensor)
        own = announced.gathered[self.rank].copy_(tensor.view(-1))
        yield Wait(announced.arriving + self.send([own] * len(self.peers), announced.number))
        return announced.gathered

    def exchange(self, chunks: Tensor) -> Steps[Tensor]:
        """Send row i of `chunks`, shape `(w, n)`, to rank i; row i of the result comes from rank i."""
        received, number = torch.empty_like(chunks), self.number()
        arriving = self.receive([received[peer] for peer in self.peers], number)
        received[self.rank] = chunks[self.rank]
        yield Wait(arriving + self.send([chunks[peer] for peer in self.peers], number))
        return received

    def _swap(self, flat: Tensor, pieces: Sequence[Tensor]) -> Steps[None]:
        """Sum the tensors of two ranks, which exchange them whole."""
        memory, received = self._take_memory(flat, flat.numel())
        places = received.split([piece.numel() for piece in pieces])
        numbers = [self.number() for _ in pieces]
        works = [self.receive([place], number) for place, number in zip(places, numbers, strict=True)]
        for piece, number, own in zip(pieces, numbers, works, strict=True):
            own += self.send([piece], number)
        for piece, place, own in zip(pieces, places, works, strict=True):
            yield Wait(own)
            piece.add_(place)
        self._give_back(memory)

    def _add_up(self, own: Tensor, of_peers: Tensor) -> None:
        """Replace this rank's part by its sum with the peers' parts, shape `(w-1, n)`."""
        rows = {**dict(zip(self.peers, of_peers, strict=True)), self.rank: own}
        in_float32 = own.dtype in HALF
        total = rows[0].to(torch.float32) if in_float32 else rows[0]
        for rank in range(1, self.size):
            if rank < self.size - 1 or in_float32:
                total.add_(rows[rank])
            else:
                torch.add(total, rows[rank], out=own)
        if in_float32:
            own.copy_(total)

    def _give_back(self, memory: Tensor) -> None:
        if memory.numel() <= _MAX_SPARE_BYTES:
            self._spare.append(memory)

    def _take_memory(self, like: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Return a buffer of bytes, and a view of it as `numel` elements."""
        num_bytes = numel * like.element_size()
        memory = self._spare.pop() if self._spare else None
        if memory is None or memory.numel() < num_bytes or memory.device != like.device:
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=like.device)
        return memory, memory[:num_bytes].view(like.dtype)


def _peers_of(rank: int, size: int) -> list[int]:
    return [(rank + distance) % size for distance in range(1, size)]


def measure_latency(ranks: Direct) -> float:
    """Measure the latency between the slowest pair of ranks, in seconds; rank-uniform. Collective.

    For each pair, it is the shortest time of several single messages: simultaneous messages between all ranks would
    measure their number. The ranks at distances 1, 2, 4, ... represent all ranks. `COMMHOOKS_LATENCY_MS` replaces the
    measurement; if it is no number of milliseconds on some rank, all ranks raise a `ValueError`.
    """
    if ranks.size == 1:
        return 0.0
    best = [math.inf] * (ranks.size - 1).bit_length()
    latency = _slowest(ranks, _ping(ranks, best, _NUM_PINGS))
    if latency > FAR:
        num = max(1, min(_MORE_PINGS, int(_PING_SECONDS / (2 * latency * len(best)))))
        latency = _slowest(ranks, _ping(ranks, best, num))
    return latency


def _ping(ranks: Direct, best: list[float], num: int) -> float:
    """Update the best round trips at distances of `2**i` ranks; return the largest latency of a message."""
    own, other = torch.zeros(2, 1, device="cpu")
    for i in range(len(best)):
        for _ in range(num):
            begin = time.perf_counter()
            ranks.swap(own, other, 2**i)
            best[i] = min(best[i], time.perf_counter() - begin)
    # A round trip is a request and a message.
    return max(best) / 2


def _slowest(ranks: Direct, measured: float) -> float:
    text = os.environ.get(_LATENCY)
    try:
        latency = measured if text is None else float(text) / 1e3
    except ValueError:
        latency = math.nan
    # NaN, so that all ranks notice.
    own = torch.tensor([latency if latency >= 0 else math.nan], dtype=torch.float64, device="cpu")
    slowest = float(finish(ranks.gather(own)).max())
    if not 0 <= slowest < math.inf:
        raise ValueError(
            f"the environment variable {_LATENCY} must be a number of milliseconds of at least 0 on all ranks, got "
            f"{text!r} on this one"
        )
    return slowest
