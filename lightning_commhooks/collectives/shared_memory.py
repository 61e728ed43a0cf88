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

_LEAST_BYTES = 2**16
# A tensor of no more bytes is summed by all ranks, not each share of it by one.
_FEW_BYTES = 2**15


class _Memory:
    """Bytes that other processes can map as long as there is this object.

    Args:
        num_bytes: how many.

    Attributes:
        number: of the file, among those of this process.
        bytes: shape `(num_bytes,)`, uint8.

    Raises:
        OSError: there is not so much memory, or none to share.
    """

    def __init__(self, num_bytes: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no files in memory")
        self.number = os.memfd_create("lightning_commhooks")
        weakref.finalize(self, os.close, self.number)
        # Or what the system does not have would end the process when it is written.
        os.posix_fallocate(self.number, 0, num_bytes)
        self.bytes = _mapped("self", self.number, num_bytes)


def _mapped(process: int | str, number: int, num_bytes: int) -> Tensor:
    """Memory of this process or another one of this user on this machine; keeps no file open."""
    return torch.from_file(f"/proc/{process}/fd/{number}", shared=True, size=num_bytes, dtype=torch.uint8)


class _Spare:
    """Memory of one lane that has been shown, and until when it is to be left alone.

    All ranks finish the collectives of a lane in one order, so that a number of finished ones says which.

    Attributes:
        num_read: of how many collectives this rank has read what the others have shown.
        read_by: the same of each of the others, as they said last.
    """

    def __init__(self, peers: Sequence[int]) -> None:
        self.num_read = 0
        self.read_by = dict.fromkeys(peers, 0)
        # By size; with the collective that each was shown for.
        self._shown: defaultdict[int, deque[tuple[int, _Memory]]] = defaultdict(deque)

    def take(self, num_bytes: int) -> _Memory:
        """Memory of at least so many bytes, which nobody reads any more."""
        size = max(_LEAST_BYTES, 1 << max(0, num_bytes - 1).bit_length())
        shown = self._shown[size]
        if shown and shown[0][0] <= min(self.read_by.values()):
            return shown.popleft()[1]
        return _Memory(size)

    def put(self, memory: _Memory) -> None:
        """This rank has finished a collective, for which it had shown this memory."""
        self.num_read += 1
        self._shown[memory.bytes.numel()].append((self.num_read, memory))


class SharedMemory:
    """Collectives through shared memory, as those of `Direct`; see `shared_memory` for where there is some.

    Args:
        messages: among the ranks.
        processes: of each rank, its number on this machine.

    Attributes:
        latency: 0, as of ranks that are near.
        num_peers: number of other ranks.
    """

    latency: float = 0.0

    def __init__(self, messages: Messages, processes: Sequence[int]) -> None:
        self._messages = messages
        self._size, self._rank, self._peers = messages.size, messages.rank, messages.peers
        self.num_peers = len(self._peers)
        self._processes = list(processes)
        # By rank and number of the file.
        self._of_others: dict[tuple[int, int], Tensor] = {}
        # By lane.
        self._spare: defaultdict[int, _Spare] = defaultdict(lambda: _Spare(self._peers))

    def sum_(self, flat: Tensor) -> Callable[[], Tensor]:
        """As `Direct.sum_`: in the order of ranks, 16-bit numbers in float32, bit-identical on all ranks."""
        if self._size > 2 and flat.numel() * flat.element_size() > _FEW_BYTES:
            return self._sum_by_shares_(flat)
        read = self.show([flat], flat.numel())

        def finish() -> Tensor:
            with read() as memories:
                _add_up({**{peer: rows[0] for peer, rows in memories.items()}, self._rank: flat}, flat)
            return flat

        return finish

    def gather(self, numel: int, dtype: torch.dtype) -> Callable[[Tensor], Callable[[], Tensor]]:
        """As `Direct.gather`."""
        number = self._messages.number()

        def send(tensor: Tensor) -> Callable[[], Tensor]:
            read = self.show([tensor], numel, number)

            def finish() -> Tensor:
                gathered = torch.empty((self._size, numel), dtype=dtype)
                gathered[self._rank] = tensor
                with read() as memories:
                    for peer, rows in memories.items():
                        gathered[peer] = rows[0]
                return gathered

            return finish

        return send

    def exchange(self, chunks: Tensor) -> Callable[[], Tensor]:
        """As `Direct.exchange`."""
        read = self.show([chunks[peer] for peer in self._peers], chunks.shape[1])

        def finish() -> Tensor:
            received = torch.empty_like(chunks)
            received[self._rank] = chunks[self._rank]
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
        shape, dtype, spare = (len(rows), numel), rows[0].dtype, self._spare[lane()]
        memory = spare.take(math.prod(shape) * dtype.itemsize)
        for place, row in zip(_viewed(memory.bytes, shape, dtype), rows, strict=True):
            place[: row.numel()] = row
        number = self._messages.number() if number is None else number
        note = torch.tensor([memory.number, memory.bytes.numel(), spare.num_read])
        places = [torch.empty_like(note) for _ in self._peers]
        told = [*self._messages.receive(places, number), *self._messages.send([note] * len(self._peers), number)]

        @contextmanager
        def read() -> Iterator[dict[int, Tensor]]:
            self._messages.wait(told)
            shown = {}
            for peer, (file, num_bytes, num_read) in zip(self._peers, torch.stack(places).tolist(), strict=True):
                spare.read_by[peer] = num_read
                shown[peer] = _viewed(self._memory_of(peer, file, num_bytes), shape, dtype)
            yield shown
            spare.put(memory)

        return read

    def _memory_of(self, rank: int, number: int, num_bytes: int) -> Tensor:
        if (rank, number) not in self._of_others:
            self._of_others[rank, number] = _mapped(self._processes[rank], number, num_bytes)
        return self._of_others[rank, number]


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
    for row in others:
        first = first + row
    torch.add(first, last, out=out)


def shared_memory(messages: Messages) -> SharedMemory | None:
    """Memory that the ranks share; `None` unless each of them can read what all others write. Collective."""
    secret = random.SystemRandom().getrandbits(62)
    try:
        own = _Memory(_LEAST_BYTES)
        os.pwrite(own.number, secret.to_bytes(8, "little"), 0)
        number = own.number
    except OSError:
        number = -1
    gather = Direct(messages).gather
    told = gather(3, torch.int64)(torch.tensor([os.getpid(), number, secret]))().tolist()
    readable = torch.tensor([int(all(_is_there(*of_rank) for of_rank in told))])
    everywhere = gather(1, readable.dtype)(readable)().all()
    return SharedMemory(messages, [process for process, _, _ in told]) if everywhere else None


def _is_there(process: int, number: int, secret: int) -> bool:
    """Whether a process is on this machine, and not one of another machine that has its number there."""
    try:
        with open(f"/proc/{process}/fd/{number}", "r+b", buffering=0) as file:
            return file.read(8) == secret.to_bytes(8, "little")
    except OSError:
        return False
