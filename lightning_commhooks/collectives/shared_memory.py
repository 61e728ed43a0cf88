"""Collectives of CPU tensors among processes of one machine, which read each other's memory; on Linux only.

Gloo sends through the loopback interface also what stays on a machine: the system copies it twice, in calls of its
own. Here a rank writes what is for others to memory that they have mapped, and tells them so by a message.
"""

from __future__ import annotations

import math
import os
import random
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from lightning_commhooks.collectives.direct import HALF, Direct
from lightning_commhooks.collectives.messages import Messages
from lightning_commhooks.collectives.turns import lane

# Addresses of a process, of which memory is taken as it is needed.
_ADDRESSES = 2**36
# Memory is handed out in powers of two, from this one on.
_LEAST_BYTES = 2**16
# A tensor of no more bytes is summed by all ranks, not each share of it by one; so is any by two ranks.
_FEW_BYTES = 2**15
# Larger tensors are summed in pieces, so that what they take of memory is bounded.
_PIECE_BYTES = 2**23


class _Arena:
    """Memory of this process that others map: all of its addresses, when it is made, and never again.

    Raises:
        OSError: the system has none, or no way to map it.
    """

    def __init__(self) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no files in memory")
        self.file = os.memfd_create("lightning_commhooks")
        weakref.finalize(self, os.close, self.file)
        os.ftruncate(self.file, _ADDRESSES)
        self.bytes = _mapped("self", self.file)
        self._end = 0

    def take(self, num_bytes: int) -> int:
        """The address of so many bytes that nobody has had.

        Raises:
            OSError: there are not so many.
        """
        start = self._end
        # Or what the system does not have would end the process when it is written.
        os.posix_fallocate(self.file, start, num_bytes)
        self._end += num_bytes
        return start


def _mapped(process: int | str, file: int) -> Tensor:
    """The arena of this process or another one of this user on this machine; keeps no file open."""
    path = f"/proc/{process}/fd/{file}"
    if os.stat(path).st_size != _ADDRESSES:  # PyTorch would let it grow
        raise OSError(f"{path} is no arena")
    try:
        return torch.from_file(path, shared=True, size=_ADDRESSES, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(str(error)) from error


class _Spare:
    """Memory of one lane that has been shown, and until when it is to be left alone.

    All ranks finish the collectives of a lane in one order, so that a number of finished ones says which. After one
    that has failed there is no other.

    Args:
        arena: where memory is taken from.
        peers: the other ranks.

    Attributes:
        num_read: of how many collectives this rank has read what the others have shown.
        read_by: the same of each of the others, as they said last.
    """

    def __init__(self, arena: _Arena, peers: Sequence[int]) -> None:
        self.num_read = 0
        self.read_by = dict.fromkeys(peers, 0)
        self._arena = arena
        # Addresses by size; with the collective that each was shown for.
        self._shown: defaultdict[int, deque[tuple[int, int]]] = defaultdict(deque)

    def take(self, num_bytes: int) -> int:
        """The address of at least so many bytes, which nobody reads any more."""
        size = _rounded(num_bytes)
        shown = self._shown[size]
        if shown and shown[0][0] <= min(self.read_by.values()):
            return shown.popleft()[1]
        return self._arena.take(size)

    def put(self, start: int, num_bytes: int) -> None:
        """This rank has finished a collective, for which it had shown this memory."""
        self.num_read += 1
        self._shown[_rounded(num_bytes)].append((self.num_read, start))


def _rounded(num_bytes: int) -> int:
    return max(_LEAST_BYTES, 1 << max(0, num_bytes - 1).bit_length())


class SharedMemory:
    """Collectives through shared memory, as those of `Direct`; see `shared_memory` for where there is some.

    Args:
        messages: among the ranks.
        arena: this rank's.
        of_others: those of the others, mapped, by rank.

    Attributes:
        latency: 0, as of ranks that are near.
        num_peers: number of other ranks.
    """

    latency: float = 0.0

    def __init__(self, messages: Messages, arena: _Arena, of_others: Mapping[int, Tensor]) -> None:
        self._messages = messages
        self._size, self._rank, self._peers = messages.size, messages.rank, messages.peers
        self.num_peers = len(self._peers)
        self._arena = arena
        self._of_others = dict(of_others)
        # By lane.
        self._spare: dict[int, _Spare] = {}

    def sum_(self, flat: Tensor) -> Callable[[], Tensor]:
        """As `Direct.sum_`: in the order of ranks, 16-bit numbers in float32, bit-identical on all ranks."""
        begin = self._sum_by_shares_ if self._size > 2 and flat.nbytes > _FEW_BYTES else self._sum_at_once_
        first, *others = flat.split(_PIECE_BYTES // flat.element_size())
        wait = begin(first)

        def finish() -> Tensor:
            last = wait
            for piece in others:
                following = begin(piece)
                last()
                last = following
            last()
            return flat

        return finish

    def gather(self, numel: int, dtype: torch.dtype) -> Callable[[Tensor], Callable[[], Tensor]]:
        """As `Direct.gather`."""
        number = self._messages.number()

        def send(tensor: Tensor) -> Callable[[], Tensor]:
            read = self.show([tensor], numel, number)
            gathered = torch.empty((self._size, numel), dtype=dtype)
            gathered[self._rank] = tensor

            def finish() -> Tensor:
                with read() as memories:
                    for peer, rows in memories.items():
                        gathered[peer] = rows[0]
                return gathered

            return finish

        return send

    def exchange(self, chunks: Tensor) -> Callable[[], Tensor]:
        """As `Direct.exchange`."""
        read = self.show([chunks[peer] for peer in self._peers], chunks.shape[1])
        received = torch.empty_like(chunks)
        received[self._rank] = chunks[self._rank]

        def finish() -> Tensor:
            with read() as memories:
                for peer, rows in memories.items():
                    received[peer] = self._own(rows, peer)
            return received

        return finish

    def sum_of_rows(self, chunks: Tensor) -> Callable[[], Tensor]:
        """Begin to sum row i of `chunks`, shape `(w, n)`, over ranks for rank i, which gets that row; as `sum_` sums.

        `chunks` are not to be touched before it is finished.
        """
        return self._sum_of(list(chunks), chunks.shape[1], torch.empty_like(chunks[0]))

    def _sum_of(self, rows: Sequence[Tensor], numel: int, out: Tensor) -> Callable[[], Tensor]:
        """Begin to sum row i over ranks, of at most `numel` elements, for rank i; it is written to `out`."""
        read = self.show([rows[peer] for peer in self._peers], numel)

        def finish() -> Tensor:
            with read() as memories:
                shown = {peer: self._own(of_peer, peer)[: out.numel()] for peer, of_peer in memories.items()}
                _add_up({**shown, self._rank: rows[self._rank]}, out)
            return out

        return finish

    def _sum_at_once_(self, flat: Tensor) -> Callable[[], Tensor]:
        """Each rank sums all of it."""
        read = self.show([flat], flat.numel())

        def finish() -> Tensor:
            with read() as memories:
                _add_up({**{peer: rows[0] for peer, rows in memories.items()}, self._rank: flat}, flat)
            return flat

        return finish

    def _sum_by_shares_(self, flat: Tensor) -> Callable[[], Tensor]:
        """Each rank sums its share and shows it to all."""
        shares, number = flat.tensor_split(self._size), self._messages.number()
        # There is no larger one than the first.
        own, numel = shares[self._rank], shares[0].numel()
        wait = self._sum_of(shares, numel, own)

        def finish() -> Tensor:
            with self.show([wait()], numel, number)() as memories:
                for peer, rows in memories.items():
                    shares[peer].copy_(rows[0, : shares[peer].numel()])
            return flat

        return finish

    def _own(self, rows: Tensor, peer: int) -> Tensor:
        """Of what another rank shows to each of its peers, in their order, that for this one."""
        return rows[(self._rank - peer) % self._size - 1]

    def show(
        self, rows: Sequence[Tensor], numel: int, number: int | None = None
    ) -> Callable[[], AbstractContextManager[dict[int, Tensor]]]:
        """Write rows of at most `numel` elements each to memory, and tell the others that they are there.

        Args:
            rows: one for all, or one for each peer, on all ranks.
            numel: equal on all ranks.
            number: of the collective; `None`: the next.

        Returns:
            what waits for the rows of the others, by rank, shape `(rows, numel)`, which are there as long as its
            context is.
        """
        shape, dtype = (len(rows), numel), rows[0].dtype
        if lane() not in self._spare:
            self._spare[lane()] = _Spare(self._arena, self._peers)
        spare = self._spare[lane()]
        num_bytes = math.prod(shape) * dtype.itemsize
        start = spare.take(num_bytes)
        for place, row in zip(_viewed(self._arena.bytes[start:], shape, dtype), rows, strict=True):
            place[: row.numel()] = row
        number = self._messages.number() if number is None else number
        note = torch.tensor([start, num_bytes, spare.num_read])
        places = [torch.empty_like(note) for _ in self._peers]
        told = [*self._messages.receive(places, number), *self._messages.send([note] * len(self._peers), number)]

        @contextmanager
        def read() -> Iterator[dict[int, Tensor]]:
            self._messages.wait(told)
            shown = {}
            for peer, (of_peer, as_many, num_read) in zip(self._peers, torch.stack(places).tolist(), strict=True):
                if as_many != num_bytes:
                    raise RuntimeError(f"a rank of this node shows {as_many} bytes where this one shows {num_bytes}")
                spare.read_by[peer] = num_read
                shown[peer] = _viewed(self._of_others[peer][of_peer:], shape, dtype)
            yield shown
            spare.put(start, num_bytes)

        return read


def _viewed(memory: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    return memory[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _add_up(rows: Mapping[int, Tensor], out: Tensor) -> None:
    """Write the sum of the rows of all ranks, in their order; `out` may be one of them."""
    first, *others, last = [rows[rank] for rank in sorted(rows)]
    if out.dtype in HALF:
        total = first.to(torch.float32)
        for row in (*others, last):
            total.add_(row)
        out.copy_(total)
        return
    if others:
        first = first + others[0]
        for row in others[1:]:
            first.add_(row)
    torch.add(first, last, out=out)


def shared_memory(messages: Messages) -> SharedMemory | None:
    """Memory that the ranks share; `None` unless each of them can read what all others write. Collective."""
    secret = random.SystemRandom().getrandbits(62)
    try:
        arena = _Arena()
        start = arena.take(_LEAST_BYTES)
        arena.bytes[start:][:8].view(torch.int64).fill_(secret)
        file = arena.file
    except OSError:
        file = -1
    gather = Direct(messages).gather
    told = gather(3, torch.int64)(torch.tensor([os.getpid(), file, secret]))().tolist()
    of_others = {peer: _arena_of(*told[peer]) for peer in messages.peers}
    mapped = {peer: memory for peer, memory in of_others.items() if memory is not None}
    maps_all = torch.tensor([int(file >= 0 and len(mapped) == len(messages.peers))])
    everywhere = gather(1, maps_all.dtype)(maps_all)().all()
    return SharedMemory(messages, arena, mapped) if everywhere else None


def _arena_of(process: int, file: int, secret: int) -> Tensor | None:
    """The arena of a process of this machine; `None` if it is not one, but of another machine."""
    try:
        memory = _mapped(process, file)
    except OSError:
        return None
    return memory if int(memory[:8].view(torch.int64)) == secret else None
