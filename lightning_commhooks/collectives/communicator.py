"""Collectives among some ranks, with a count of the bytes each of them sends.

Collectives are generators (`steps`): `yield from` them. Counts are payload bytes sent by this rank, on the mean over
ranks, as under the usual bandwidth-optimal algorithms (Thakur et al. 2005, "Optimization of Collective Communication
Operations in MPICH"): all-reduce 2(w-1)/w of the payload, all-gather w-1 times the rank's part, all-to-all (w-1)/w of
the payload.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_commhooks.basics.ranges import named
from lightning_commhooks.collectives.backend import Backend
from lightning_commhooks.collectives.counters import Counters
from lightning_commhooks.collectives.steps import Steps, Wait, begun, finish, result

T = TypeVar("T")
Kind = Literal["all_reduce", "all_gather", "all_to_all", "reduce_scatter"]


class Transport(Protocol):
    """How tensors get from rank to rank: `Backend`, `Direct` and others. Its methods are described there."""

    is_ordered: bool
    latency: float
    size: int
    rank: int

    def channel(self, number: int, ranks: Any) -> Any: ...
    def among(self, ranks: Sequence[int], part: int) -> Any: ...
    def num_rounds(self, num_bytes: int) -> int: ...
    def sum_(self, tensor: Tensor) -> Steps[Tensor]: ...
    def expect(self, like: Tensor) -> Any: ...
    def gather(self, tensor: Tensor, expected: Any = None) -> Steps[Tensor]: ...
    def exchange(self, chunks: Tensor) -> Steps[Tensor]: ...


@dataclass
class Tally:
    """Count for one bucket so far.

    Attributes:
        sent: payload bytes.
        between_nodes: those of them that left the node.
        rounds: rounds of messages.
        numbers: how many numbers this rank gave to collectives, by dtype.
        numbers_between_nodes: those given to collectives that leave the node.
    """

    sent: float = 0.0
    between_nodes: float = 0.0
    rounds: int = 0
    numbers: Counter[torch.dtype] = field(default_factory=Counter)
    numbers_between_nodes: Counter[torch.dtype] = field(default_factory=Counter)


class Communicator:
    """Collectives over one transport.

    Args:
        transport: the ranks that average gradients together; `None` for a single process.
        counters: where bytes are counted; `None`: they are not.
        device: where the gradients are.
        process_group: of the same ranks, if there is one.

    Attributes:
        size: number of ranks.
        rank: this process's rank among them.
        global_rank: this process's rank among all processes.
        tally: what the present bucket has sent.
    """

    _why_no_process_group = "the process group of this communication hook is gone: the hook was closed"

    def __init__(
        self,
        transport: Transport | None,
        counters: Counters | None = None,
        device: torch.device | str = "cpu",
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._transport = transport
        self._process_group = process_group
        self.counters = counters if counters is not None else Counters()
        self.device = torch.device(device)
        self.size: int = transport.size if transport is not None else 1
        self.rank: int = transport.rank if transport is not None else 0
        # Ranks by node, once they are known.
        self._nodes: list[list[int]] = []
        self.global_rank: int = dist.get_rank() if transport is not None and dist.is_initialized() else self.rank
        self.tally = Tally()
        self._is_quiet = False
        # Whether the numbers given to collectives are those of gradients, in whatever form.
        self._sends_gradients = True
        # Whether other subgroups, if this is one, have as many ranks, and so wait as often.
        self._is_uniform = True

    @property
    def latency(self) -> float:
        """Seconds that a message takes between ranks that are far from each other; 0: they are near."""
        return 0.0 if self._transport is None else self._transport.latency

    @property
    def is_ordered(self) -> bool:
        """Whether all ranks have to begin collectives in the same order, those of different buckets too."""
        return self._transport is not None and self._transport.is_ordered

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group; to PyTorch, `None` would mean all processes.

        Raises:
            RuntimeError: there is none, or it was released.
        """
        if self._process_group is None:
            has_none = "these ranks have no process group: they are a subgroup, or emulated"
            raise RuntimeError(self._why_no_process_group if self._transport is None else has_none)
        return self._process_group

    def finish(self, steps: Steps[T]) -> T:
        """Run a computation to its end, and wait in this thread, which is timed."""
        return finish(steps, nullcontext if self.counters.is_evaluating else self.counters.timing.comm)

    def ring_bytes(self, tensor: Tensor) -> float:
        """Payload bytes that each rank sends in a ring all-reduce of `tensor`."""
        return 2 * (self.size - 1) / self.size * tensor.nbytes

    def inter_node_share(self, kind: Kind = "all_reduce", around_ring: bool | None = None) -> float:
        """Share of the bytes of a collective that leave the node of the rank that sends them, on the mean over ranks.

        0 as long as nodes are not known.

        Args:
            kind: of collective.
            around_ring: whether ranks send to their neighbors only; `None`: as they do here.
        """
        if len(self._nodes) < 2:
            return 0.0
        if around_ring is None:
            around_ring = kind != "all_to_all" and self.is_ordered
        if not around_ring:
            within = sum(len(node) * (len(node) - 1) for node in self._nodes)
            return 1 - within / (self.size * (self.size - 1))
        if self.device.type == "cuda":
            # NCCL's rings enter each node once.
            return len(self._nodes) / self.size
        node_of = {rank: i for i, node in enumerate(self._nodes) for rank in node}
        return sum(node_of[rank] != node_of[(rank + 1) % self.size] for rank in range(self.size)) / self.size

    def all_reduce_(self, tensor: Tensor) -> Steps[Tensor]:
        """Replace a contiguous `tensor` by its sum over ranks, bit-identical on all of them."""
        transport = self._transport
        if transport is None or self.size == 1 or not tensor.numel():
            return result(tensor)
        rounds = transport.num_rounds(tensor.nbytes)
        return self._counted("all_reduce", tensor, self.ring_bytes(tensor), rounds, transport.sum_(tensor))

    def all_reduce_mean_(self, tensor: Tensor, scale: float | Tensor = 1.0) -> Steps[Tensor]:
        """Replace a contiguous floating-point `tensor` by `scale` times its mean.

        Divides first, so that 16-bit sums fit.
        """
        return (yield from self.all_reduce_(tensor.div_(self.size / scale)))

    def all_reduce_in_float32(self, half: Tensor) -> Steps[Tensor]:
        """Sum over ranks of a 16-bit tensor, shape `(n,)`, in its dtype but rounded once only.

        Each rank receives its share from all others, sums it in float32 and sends the sum: an all-to-all and an
        all-gather, the same bytes as a ring all-reduce. Direct messages do so anyway.
        """
        if not self.is_ordered:
            return (yield from self.all_reduce_(half.clone()))
        numel = half.numel()
        # Every rank has an equal share.
        padded = half.new_zeros(-(-numel // self.size) * self.size)
        padded[:numel] = half
        share = (yield from self.all_to_all(padded.view(self.size, -1))).sum(dim=0, dtype=torch.float32)
        return (yield from self.all_gather(share.to(half.dtype))).view(-1)[:numel]

    def all_reduce_coalesced_(self, tensors: Sequence[Tensor]) -> Steps[None]:
        """Replace each tensor by its sum over ranks, with one collective per dtype.

        Args:
            tensors: contiguous tensors on one device, in the same order on every rank; empty ones are allowed.
        """
        by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for tensor in tensors:
            by_dtype[tensor.dtype].append(tensor.view(-1))
        sums = [
            (flats, begun(self.all_reduce_(flats[0] if len(flats) == 1 else torch.cat(flats))))
            for flats in by_dtype.values()
        ]
        for flats, steps in sums:
            total = yield from steps
            for flat, own in zip(flats, total.split([flat.numel() for flat in flats]), strict=True):
                if len(flats) > 1:
                    flat.copy_(own)

    def all_gather(self, tensor: Tensor, expected: object = None) -> Steps[Tensor]:
        """Gather `tensor`, shape `(n,)`, equal on all ranks, into a new tensor of shape `(w, n)`.

        Args:
            tensor: this rank's.
            expected: what `expect_all_gather` has returned, if it was called.
        """
        transport = self._transport
        if transport is None or self.size == 1:
            return result(tensor.view(1, -1).clone())
        steps = transport.gather(tensor.contiguous(), expected)
        return self._counted("all_gather", tensor, (self.size - 1) * tensor.nbytes, self._rounds_to_all(), steps)

    def expect_all_gather(self, like: Tensor) -> object:
        """Announce an `all_gather` of tensors like this one, long before there is this rank's, to save a question."""
        return None if self._transport is None or self.size == 1 else self._transport.expect(like)

    def all_gather_numbers(self, numbers: list[int], dtype: torch.dtype = torch.int64) -> list[list[int]]:
        """The numbers of each rank, sent in that dtype. Blocks, and waits for the device."""
        gathered = self.finish(self.all_gather(torch.tensor(numbers, dtype=dtype, device=self.device)))
        numbers_of_ranks: list[list[int]] = gathered.tolist()
        return numbers_of_ranks

    def all_to_all(self, chunks: Tensor) -> Steps[Tensor]:
        """Send row i of `chunks`, shape `(w, n)`, to rank i; row i of the result came from rank i."""
        transport = self._transport
        if transport is None or self.size == 1:
            return result(chunks)
        num_bytes = (self.size - 1) / self.size * chunks.nbytes
        return self._counted("all_to_all", chunks, num_bytes, 1, transport.exchange(chunks))

    def reduce_scatter(self, chunks: Tensor, in_float32: bool = False) -> Steps[Tensor]:
        """Sum over ranks of this rank's row of `chunks`, shape `(w, n)`; a new tensor of shape `(n,)`.

        NCCL sums in the dtype of `chunks`. On CPU, and with `in_float32`, it is an all-to-all, summed here in at least
        float32: gloo's own reduce-scatter is an all-reduce that throws most of its result away.
        """
        transport = self._transport
        if in_float32 or not chunks.is_cuda or self.size == 1 or not isinstance(transport, Backend):
            dtype = torch.promote_types(chunks.dtype, torch.float32)
            return (yield from self.all_to_all(chunks)).sum(dim=0, dtype=dtype)
        num_bytes = (self.size - 1) / self.size * chunks.nbytes
        steps = transport.sum_share(chunks)
        return (yield from self._counted("reduce_scatter", chunks, num_bytes, self.size - 1, steps))

    def all_reduce_sparse_mean(self, grad: Tensor) -> Steps[Tensor]:
        """Mean over ranks of a sparse COO tensor: an all-gather of padded indices and values.

        Reads the number of entries on the host, so on CUDA this synchronizes.
        """
        grad = grad.coalesce()
        if self.size == 1:
            return grad
        count = torch.tensor([grad._nnz()], device=grad.device)
        num_entries = (yield from self.all_gather(count)).view(-1).tolist()
        longest = max(num_entries)
        indices = grad.indices().new_zeros((longest, grad.sparse_dim()))
        indices[: grad._nnz()] = grad.indices().t()
        values = grad.values().new_zeros((longest, *grad.values().shape[1:]))
        values[: grad._nnz()] = grad.values() / self.size
        all_indices = (yield from self.all_gather(indices.view(-1))).view(self.size, *indices.shape)
        all_values = (yield from self.all_gather(values.view(-1))).view(self.size, *values.shape)
        return torch.sparse_coo_tensor(
            torch.cat([rows[:n] for rows, n in zip(all_indices, num_entries, strict=True)]).t(),
            torch.cat([rows[:n] for rows, n in zip(all_values, num_entries, strict=True)]),
            grad.shape,
            check_invariants=False,  # said explicitly, or PyTorch warns that it does not check
        ).coalesce()

    def _note(self, kind: Kind, given: Tensor) -> None:
        if self._sends_gradients:
            self.tally.numbers[given.dtype] += given.numel()
            if self.inter_node_share(kind):
                self.tally.numbers_between_nodes[given.dtype] += given.numel()

    def _rounds_to_all(self) -> int:
        return self.size - 1 if self.is_ordered else 1

    def _counted(
        self, kind: Kind, given: Tensor, num_bytes: float, num_rounds: int, steps: Steps[Tensor]
    ) -> Steps[Tensor]:
        """Count the bytes and numbers when a collective begins, and its rounds of messages when it has ended.

        Of collectives that are under way at once for one bucket, rounds are counted once.
        """
        self._note(kind, given)
        if not self._is_quiet:
            between_nodes = num_bytes * self.inter_node_share(kind)
            if self.counters.count(num_bytes, between_nodes):
                self.tally.sent += num_bytes
                self.tally.between_nodes += between_nodes
            else:
                num_rounds = 0
        last_round = self.tally.rounds + num_rounds
        begin = named(kind, "begin")
        while True:
            try:
                with begin:
                    waits = next(steps)
            except StopIteration as done:
                if not self._is_quiet:
                    self.counters.rounds += max(0, last_round - self.tally.rounds)
                    self.tally.rounds = max(last_round, self.tally.rounds)
                return done.value  # type: ignore[no-any-return]
            begin = nullcontext()
            yield Wait(waits.works, kind, self._is_uniform)


@contextmanager
def counted(gradients: Tensor, ranks: Communicator) -> Iterator[None]:
    """Count how a hook sends gradients that it reduces meanwhile: see `Counters.numel_uncompressed`.

    Args:
        gradients: of one bucket, flat, or the values of a sparse one.
        ranks: the collectives given to the hook.
    """
    tally, dtype, numel = ranks.tally, gradients.dtype, gradients.numel()
    sent, between = tally.sent, tally.between_nodes
    numbers, numbers_between = tally.numbers.copy(), tally.numbers_between_nodes.copy()
    yield
    if tally.sent > sent:
        given = tally.numbers - numbers
        if 0 < ranks.inter_node_share(around_ring=True) < 1 and tally.between_nodes > between:
            given = tally.numbers_between_nodes - numbers_between
        as_they_are = sum(num for form, num in given.items() if _is_as_precise(form, dtype))
        ranks.counters.numel_uncompressed += min(numel, as_they_are)
        ranks.counters.numel_compressed += max(0, numel - as_they_are)


def _is_as_precise(form: torch.dtype, dtype: torch.dtype) -> bool:
    are_floating_point = form.is_floating_point and dtype.is_floating_point
    return form == dtype or (are_floating_point and form.itemsize >= dtype.itemsize)
