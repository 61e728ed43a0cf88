"""Ranks that are threads of one process and really exchange what they have: what does a hook make of their gradients?

One thread runs at a time, until it waits for others. So nothing depends on chance, ranks that wait for each other for
ever are found out, and of what ranks receive there is only one in memory.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_commhooks.collectives.counters import Counters
from lightning_commhooks.collectives.group import Group

T = TypeVar("T")

WHY_NO_PROCESS_GROUP = (
    "ranks are emulated here, so there is no process group of torch.distributed: use the methods of the hook's group, "
    "or measure between real ranks"
)


class _EndedError(Exception):
    """Another rank has failed."""


class _Turns:
    """Gives threads their turns, in order of rank."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._turns = [threading.Semaphore(0) for _ in range(size)]
        self._ended: set[int] = set()
        # Turns in a row in which nobody got on.
        self._in_vain = 0
        self.failure: BaseException | None = None

    def run(self, work: Callable[[int], T]) -> list[T]:
        """Call `work(rank)` for each rank, and return the results.

        Raises:
            Exception: what the first rank that failed has raised.
        """
        results: dict[int, T] = {}

        def live(rank: int) -> None:
            self._turns[rank].acquire()
            try:
                if self.failure is None:
                    with torch.no_grad():  # gradients are on in a new thread
                        results[rank] = work(rank)
            except BaseException as failure:
                self.failure = self.failure or failure
            finally:
                self._ended.add(rank)
                self._in_vain = 0
                self._pass_on(rank)

        threads = [threading.Thread(target=live, args=(rank,), name=f"rank {rank}") for rank in range(self._size)]
        for thread in threads:
            thread.start()
        self._turns[0].release()
        try:
            for thread in threads:
                thread.join()
        except BaseException as interruption:
            self.failure = self.failure or interruption
            raise
        if self.failure is not None:
            raise self.failure
        return [results[rank] for rank in range(self._size)]

    def wait_until(self, rank: int, is_so: Callable[[], bool], what: str) -> None:
        """Let other ranks run until something is so.

        Raises:
            RuntimeError: it never will be, since all wait.
        """
        while not is_so():
            if self._in_vain > self._size:
                raise RuntimeError(
                    f"rank {rank} waits in {what} for ranks that never call it: all must issue the same collectives"
                )
            self._in_vain += 1
            self._pass_on(rank)
            self._turns[rank].acquire()
            if self.failure is not None:
                raise _EndedError
        self._in_vain = 0

    def _pass_on(self, rank: int) -> None:
        following = ((rank + i) % self._size for i in range(1, self._size + 1))
        heir = next((other for other in following if other not in self._ended), None)
        if heir is not None:
            self._turns[heir].release()


@dataclass
class _Collective:
    """One collective: what each rank has put into it."""

    kind: str
    given: dict[int, Tensor] = field(default_factory=dict)
    num_taken: int = 0
    total: Tensor | None = None

    def give(self, rank: int, kind: str, tensor: Tensor) -> None:
        """Put in a tensor that nobody changes any more.

        Raises:
            RuntimeError: it does not fit what other ranks have put in.
        """
        for other, theirs in self.given.items():
            if (kind, tensor.shape, tensor.dtype) != (self.kind, theirs.shape, theirs.dtype):
                raise RuntimeError(
                    f"rank {rank} calls {kind} with {tensor.dtype}{list(tensor.shape)} where rank {other} calls "
                    f"{self.kind} with {theirs.dtype}{list(theirs.shape)}: all must issue the same collectives"
                )
            break
        self.given[rank] = tensor

    def in_order(self) -> list[Tensor]:
        """What all ranks have put in, by rank."""
        return [self.given[rank] for rank in range(len(self.given))]

    def sum(self) -> Tensor:
        """Of all ranks, made once."""
        if self.total is None:
            first, *others = self.in_order()
            self.total = first.clone()
            for other in others:
                self.total.add_(other)
        return self.total


class _Table:
    """Where the ranks of one group exchange tensors."""

    def __init__(self, turns: _Turns, size: int) -> None:
        self.size = size
        self._turns = turns
        self._collectives: dict[int, _Collective] = {}
        self._further: dict[Hashable, _Table] = {}

    def further(self, key: Hashable, size: int) -> _Table:
        """One more, the same for all ranks that ask for this key."""
        return self._further.setdefault(key, _Table(self._turns, size))

    def give(
        self, number: int, rank: int, global_rank: int, kind: str, tensor: Tensor, take: Callable[[_Collective], Tensor]
    ) -> Callable[[], Tensor]:
        """Put a tensor into the collective of that number; returns what waits for the result.

        Args:
            number: of collectives that this rank has started before.
            rank: within this group.
            global_rank: among all.
            kind: of the collective.
            tensor: which nobody changes any more.
            take: makes this rank's result when all have given.
        """
        collective = self._collectives.setdefault(number, _Collective(kind))
        collective.give(rank, kind, tensor)

        def wait() -> Tensor:
            self._turns.wait_until(global_rank, lambda: len(collective.given) == self.size, kind)
            result = take(collective)
            collective.num_taken += 1
            if collective.num_taken == self.size:
                del self._collectives[number]
            return result

        return wait


class EnsembleGroup(Group):
    """The collectives of one rank among threads; made by [`run_ranks`][]."""

    _why_no_process_group = WHY_NO_PROCESS_GROUP

    def __init__(self, table: _Table, rank: int, global_rank: int, counters: Counters, device: torch.device) -> None:
        super().__init__(None, counters, device)
        self.size = table.size
        self.rank = rank
        self.global_rank = global_rank
        # Each on a host of its own.
        self._nodes = [[rank] for rank in range(self.size)]
        self._table = table
        self._numbers = itertools.count()

    def _split(self, subgroups: tuple[tuple[int, ...], ...]) -> Group:
        own = next(ranks for ranks in subgroups if self.rank in ranks)
        table = self._table.further((subgroups, own), len(own))
        return EnsembleGroup(table, own.index(self.rank), self.global_rank, self.counters, self.device)

    def _sum_(self, tensor: Tensor) -> None:
        tensor.copy_(self._give("all_reduce", tensor, lambda collective: collective.sum())())

    def _gather(self, tensor: Tensor, of_equals: Callable[[], Tensor] | None) -> Callable[[], Tensor]:
        return self._give("all_gather", tensor, lambda collective: torch.stack(collective.in_order()))

    def _exchange(self, chunks: Tensor) -> Callable[[], Tensor]:
        def take(collective: _Collective) -> Tensor:
            return torch.stack([theirs[self.rank] for theirs in collective.in_order()])

        return self._give("all_to_all", chunks, take)

    def _give(self, kind: str, tensor: Tensor, take: Callable[[_Collective], Tensor]) -> Callable[[], Tensor]:
        return self._table.give(next(self._numbers), self.rank, self.global_rank, kind, tensor.clone(), take)


def run_ranks(size: int, device: torch.device, work: Callable[[Group], Any]) -> list[Any]:
    """Call `work(group)` for each of some ranks, in a thread of its own, and return the results by rank.

    Whatever they exchange by methods of their groups is exchanged, in memory. Nothing about time can be learned.

    Args:
        size: number of ranks.
        device: where tensors are.
        work: of one rank.

    Raises:
        Exception: what the first rank that failed has raised.
        RuntimeError: ranks do not issue the same collectives.
    """
    turns = _Turns(size)
    table = _Table(turns, size)

    def live(rank: int) -> Any:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        return work(EnsembleGroup(table, rank, rank, Counters(), device))

    return turns.run(live)
