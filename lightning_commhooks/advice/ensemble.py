"""Ranks that are threads of one process and really exchange what they have: what does a hook make of their gradients?

One thread runs at a time, until it waits for others. So nothing depends on chance, ranks that wait for each other for
ever are found out, and of what ranks receive there is only one in memory.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_commhooks.collectives.communicator import SendToAll, Wait
from lightning_commhooks.collectives.counters import Counters
from lightning_commhooks.collectives.group import Group

WHY_NO_PROCESS_GROUP = (
    "ranks are emulated here, so there is no process group of torch.distributed: use the methods of the hook's group, "
    "or measure between real ranks"
)


class _EndedError(Exception):
    """Another rank has failed."""


class _Turns:
    """Gives threads their turns, in order of rank."""

    def __init__(self, size: int) -> None:
        self._turns = [threading.Semaphore(0) for _ in range(size)]
        # Ranks that have not ended; it is the turn of the first.
        self._running = deque(range(size))
        # Turns in a row in which nobody got on.
        self._in_vain = 0
        self._failure: BaseException | None = None

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """Call `work(rank)` for each rank, and return the results.

        Raises:
            Exception: what the first rank that failed has raised.
        """
        results = [None for _ in self._turns]

        def live(rank: int) -> None:
            self._turns[rank].acquire()
            try:
                if self._failure is None:
                    with torch.no_grad():  # gradients are on in a new thread
                        results[rank] = work(rank)
            except BaseException as failure:
                self._failure = self._failure or failure
            finally:
                self._in_vain = 0
                self._running.popleft()
                self._begin_turn()

        threads = [threading.Thread(target=live, args=(rank,), name=f"rank {rank}") for rank in self._running]
        for thread in threads:
            thread.start()
        self._turns[0].release()
        try:
            for thread in threads:
                thread.join()
        except BaseException as interruption:
            self._failure = self._failure or interruption
            raise
        if self._failure is not None:
            raise self._failure
        return results

    def wait_until(self, is_so: Callable[[], bool], what: str) -> None:
        """Let other ranks run until something is so.

        Raises:
            RuntimeError: it never will be, since all wait.
        """
        rank = self._running[0]
        while not is_so():
            if self._in_vain > len(self._turns):
                raise RuntimeError(
                    f"rank {rank} waits in {what} for ranks that never call it: all must issue the same collectives"
                )
            self._in_vain += 1
            self._running.rotate(-1)
            self._begin_turn()
            self._turns[rank].acquire()
            if self._failure is not None:
                raise _EndedError
        self._in_vain = 0

    def _begin_turn(self) -> None:
        if self._running:
            self._turns[self._running[0]].release()


@dataclass
class _Collective:
    """One collective, and what each rank has put into it, which nobody changes any more."""

    kind: str
    given: dict[int, Tensor] = field(default_factory=dict)

    def check(self, rank: int, kind: str, tensor: Tensor) -> None:
        for other, theirs in itertools.islice(self.given.items(), 1):
            if (kind, tensor.shape, tensor.dtype) != (self.kind, theirs.shape, theirs.dtype):
                raise RuntimeError(
                    f"rank {rank} calls {kind} with {tensor.dtype}{list(tensor.shape)} where rank {other} calls "
                    f"{self.kind} with {theirs.dtype}{list(theirs.shape)}: all must issue the same collectives"
                )

    def in_order(self) -> list[Tensor]:
        """What all ranks have put in, by rank."""
        return [self.given[rank] for rank in range(len(self.given))]

    @functools.cached_property
    def total(self) -> Tensor:
        """Sum over ranks, made once."""
        return functools.reduce(torch.add, self.in_order())


class _Table:
    """Where the ranks of one group exchange tensors."""

    def __init__(self, turns: _Turns, size: int) -> None:
        self.size = size
        self.turns = turns
        # By the number of collectives that a rank has started before; those that some rank has not started yet.
        self._collectives: dict[int, _Collective] = {}
        self._of_subgroups: dict[Hashable, _Table] = {}

    def of_subgroup(self, key: Hashable, size: int) -> _Table:
        """The table of a subgroup, one for all ranks that ask for this key."""
        return self._of_subgroups.setdefault(key, _Table(self.turns, size))

    def put(self, number: int, rank: int, kind: str, tensor: Tensor) -> _Collective:
        """Put a tensor into a collective.

        Raises:
            RuntimeError: it does not fit what other ranks have put in.
        """
        collective = self._collectives.setdefault(number, _Collective(kind))
        collective.check(rank, kind, tensor)
        collective.given[rank] = tensor
        if len(collective.given) == self.size:
            del self._collectives[number]
        return collective


class EnsembleGroup(Group):
    """The collectives of one rank among threads; made by [`run_ranks`][]."""

    _why_no_process_group = WHY_NO_PROCESS_GROUP

    def __init__(self, table: _Table, rank: int, counters: Counters, device: torch.device) -> None:
        super().__init__(None, counters, device)
        self.size = table.size
        self.rank = rank
        self.global_rank = rank
        # Each on a host of its own.
        self._nodes = [[rank] for rank in range(self.size)]
        self._table = table
        self._numbers = itertools.count()

    def _split(self, subgroups: tuple[tuple[int, ...], ...]) -> Group:
        own = next(ranks for ranks in subgroups if self.rank in ranks)
        table = self._table.of_subgroup((subgroups, own), len(own))
        return EnsembleGroup(table, own.index(self.rank), self.counters, self.device)

    def _sum_(self, tensor: Tensor) -> Wait:
        wait = self._give("all_reduce", tensor, lambda collective: collective.total)
        return lambda: tensor.copy_(wait())

    def _gather(self, like: Tensor) -> SendToAll:
        def send(tensor: Tensor, of_equals: Callable[[], Tensor] | None) -> Wait:
            return self._give("all_gather", tensor, lambda collective: torch.stack(collective.in_order()))

        return send

    def _exchange(self, chunks: Tensor) -> Wait:
        def take(collective: _Collective) -> Tensor:
            return torch.stack([theirs[self.rank] for theirs in collective.in_order()])

        return self._give("all_to_all", chunks, take)

    def _give(self, kind: str, tensor: Tensor, take: Callable[[_Collective], Tensor]) -> Callable[[], Tensor]:
        table = self._table
        collective = table.put(next(self._numbers), self.rank, kind, tensor.clone())

        def wait() -> Tensor:
            table.turns.wait_until(lambda: len(collective.given) == table.size, kind)
            return take(collective)

        return wait


def run_ranks(size: int, device: torch.device, work: Callable[[Group], Any]) -> list[Any]:
    """Call `work(group)` for each of some ranks, in a thread of its own, and return the results by rank.

    Whatever they exchange by methods of their groups is exchanged, in memory. Nothing about time can be learned.

    Raises:
        Exception: what the first rank that failed has raised.
        RuntimeError: ranks do not issue the same collectives.
    """
    turns = _Turns(size)
    table = _Table(turns, size)

    def live(rank: int) -> Any:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        return work(EnsembleGroup(table, rank, Counters(), device))

    return turns.run(live)
