"""Any number of ranks in one process: their computations take turns and exchange tensors in memory.

No processes, threads or sockets. Nothing depends on chance, and ranks that would wait for each other for ever are found
out at once. Nothing about time can be learned.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from lightning_commhooks.collectives.counters import Counters
from lightning_commhooks.collectives.direct import Direct
from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.steps import Steps, Wait, advance

T = TypeVar("T")
# From a rank to another one, under a number.
_Way = tuple[int, int, int]


class StuckError(RuntimeError):
    """All ranks wait for tensors that no rank sends, or a rank expects tensors other than those sent."""


class _Message:
    """A message, done as soon as it is there."""

    def __init__(self, text: str, is_done: bool) -> None:
        self.text, self.is_done = text, is_done

    def wait(self) -> None:
        if not self.is_done:
            raise StuckError(f"{self.text}, in a call that blocks: `yield from` collectives in memory")


_Sent = defaultdict[_Way, deque[Tensor]]
_Expected = defaultdict[_Way, deque[tuple[Tensor, _Message]]]


class _Backend:
    """A stand-in for a `ProcessGroupGloo` in `Direct`. Ranks share `sent` and `expected` tensors."""

    def __init__(self, sent: _Sent, expected: _Expected, rank: int, size: int) -> None:
        self._sent, self._expected, self._rank, self._size = sent, expected, rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def send(self, tensors: Sequence[Tensor], peer: int, number: int) -> _Message:
        (tensor,), way = tensors, (self._rank, peer, number)
        if waiting := self._expected[way]:
            self._deliver(tensor, *waiting.popleft())
        else:
            self._sent[way].append(tensor.clone())
        return _Message("", True)

    def recv(self, tensors: Sequence[Tensor], peer: int, number: int) -> _Message:
        (place,), way = tensors, (peer, self._rank, number)
        text = f"rank {self._rank} waits for {place.numel()} elements of {place.dtype} from rank {peer}"
        message = _Message(text, False)
        if arrived := self._sent[way]:
            self._deliver(arrived.popleft(), place, message)
        else:
            self._expected[way].append((place, message))
        return message

    def _deliver(self, tensor: Tensor, place: Tensor, message: _Message) -> None:
        if tensor.shape != place.shape or tensor.dtype != place.dtype:
            raise StuckError(f"{message.text}, which sends {tensor.numel()} of {tensor.dtype}")
        place.copy_(tensor)
        message.is_done = True


def groups_in_memory(size: int, device: torch.device | str = "cpu") -> list[Group]:
    """Return the groups of `size` ranks in this process, each with its own node and its own counters.

    Values that ranks agree on in blocking calls, as in `bind`, have to be the same on all of them.
    """
    sent: _Sent = defaultdict(deque)
    expected: _Expected = defaultdict(deque)
    groups = []
    for rank in range(size):
        transport, nodes = Direct(_Backend(sent, expected, rank, size)), [[other] for other in range(size)]
        groups.append(Group(transport, Counters(), device, nodes=nodes, global_rank=rank, are_alike=True))
    return groups


def run_together(works: Sequence[Callable[[], Steps[T]]], seed: int = 0) -> list[T]:
    """Run a computation of each rank to its end, by turns in an arbitrary order, and return the results.

    Raises a `StuckError` if they would wait for ever, and the error of the first rank that failed.
    """
    chance = random.Random(seed)
    results: dict[int, T] = {}
    with torch.no_grad():
        running = {rank: (make(), Wait(())) for rank, make in enumerate(works)}
        while running:
            free = [rank for rank, (_, waits) in running.items() if not _missing(waits)]
            if not free:
                raise StuckError("; ".join(text for _, waits in running.values() for text in _missing(waits)))
            rank = chance.choice(free)
            steps, _ = running[rank]
            try:
                running[rank] = steps, advance(steps)
            except StopIteration as done:
                results[rank] = done.value
                del running[rank]
    return [results[rank] for rank in range(len(works))]


def _missing(waits: Wait) -> list[str]:
    return [work.text for work in waits.works if isinstance(work, _Message) and not work.is_done]
