"""Collectives among the ranks of one process group, with a count of the bytes each of them sends.

Public ones block, but those that begin something: on CPU tensors they return when the result is there, on NCCL they
block the current stream only. CPU tensors of ranks that are far from each other go directly from one to another
(`direct`). Counts are payload bytes sent by this rank, on the mean over ranks, as under the usual bandwidth-optimal
algorithms (Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH"): all-reduce 2(w-1)/w of
the payload, all-gather w-1 times the rank's part, all-to-all (w-1)/w of the payload.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_commhooks.codecs.ranges import named
from lightning_commhooks.collectives.counters import Counters
from lightning_commhooks.collectives.direct import Direct, takes_one_round
from lightning_commhooks.collectives.turns import lane, waiting

# Waits for a result.
Wait = Callable[[], Tensor]
# Sends this rank's tensor to all others; takes what the result would be if all ranks were equal, too.
SendToAll = Callable[[Tensor, Callable[[], Tensor] | None], Wait]
Kind = Literal["all_reduce", "all_gather", "all_to_all"]


def renamed(name: str, since_2_13: str) -> Callable[..., dist.Work | None]:
    """The collective of that name, by the one that it has from PyTorch 2.13 on, if there is."""
    collective: Callable[..., dist.Work | None] = getattr(dist, since_2_13, None) or getattr(dist, name)
    return collective


class Communicator:
    """Collectives over one process group.

    Args:
        process_group: the ranks that average gradients together; `None` for a single process.
        counters: where bytes are counted.
        device: where the gradients are.
        transport: by what CPU tensors go between far ranks, if not by gloo's own collectives.
        lanes: the process group of each thread, if several communicate beside each other.

    Attributes:
        num_lanes: how many threads may communicate beside each other.
        size: number of ranks.
        rank: this process's rank among them.
        global_rank: this process's rank among all processes.
    """

    _why_no_process_group = "the process group of this communication hook is gone: the hook was closed"

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        counters: Counters | None = None,
        device: torch.device | str = "cpu",
        transport: Direct | None = None,
        lanes: Sequence[dist.ProcessGroup] = (),
    ) -> None:
        self._process_group = process_group
        self._transport = transport
        self._lanes = tuple(lanes)
        self.num_lanes = len(lanes) or 1
        self.counters = counters if counters is not None else Counters()
        self.device = torch.device(device)
        self.size: int = process_group.size() if process_group is not None else 1
        self.rank: int = process_group.rank() if process_group is not None else 0
        # Ranks by node, once they are known.
        self._nodes: list[list[int]] = []
        self.global_rank: int = dist.get_rank() if process_group is not None else 0

    @property
    def latency(self) -> float:
        """Seconds that a message takes between ranks that are far from each other; 0: they are near."""
        return 0.0 if self._transport is None else self._transport.latency

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group; to PyTorch, `None` would mean all processes.

        Raises:
            RuntimeError: there is none, or it was released.
        """
        if self._process_group is None:
            raise RuntimeError(self._why_no_process_group)
        return self._process_group

    def ring_bytes(self, tensor: Tensor) -> float:
        """Payload bytes that each rank sends in a ring all-reduce of `tensor`."""
        return 2 * (self.size - 1) / self.size * tensor.nbytes

    def leaving(self, kind: Kind = "all_reduce", around_ring: bool | None = None) -> float:
        """Share of the bytes of a collective that leave the node of the rank that sends them, on the mean over ranks.

        0 as long as nodes are not known.

        Args:
            kind: of collective.
            around_ring: whether ranks send to their neighbors only; `None`: as they do here.
        """
        if len(self._nodes) < 2:
            return 0.0
        if around_ring is None:
            around_ring = kind != "all_to_all" and not self.latency
        if not around_ring:
            within = sum(len(node) * (len(node) - 1) for node in self._nodes)
            return 1 - within / (self.size * (self.size - 1))
        if self.device.type == "cuda":
            # NCCL's rings enter each node once.
            return len(self._nodes) / self.size
        node_of = {rank: i for i, node in enumerate(self._nodes) for rank in node}
        return sum(node_of[rank] != node_of[(rank + 1) % self.size] for rank in range(self.size)) / self.size

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """Replace a contiguous `tensor` by its sum over ranks, bit-identical on all of them."""
        self._begin_all_reduce_(tensor)()
        return tensor

    def all_reduce_mean_(self, tensor: Tensor, scale: float | Tensor = 1.0) -> Tensor:
        """Replace a contiguous floating-point `tensor` by `scale` times its mean.

        Divides first, so that 16-bit sums fit.
        """
        return self.all_reduce_(tensor.div_(self.size / scale))

    def all_reduce_in_float32(self, half: Tensor) -> Tensor:
        """Sum over ranks of a 16-bit tensor, shape `(n,)`, in its dtype but rounded once only.

        Each rank receives its share from all others, sums it in float32 and sends the sum: an all-to-all and an
        all-gather, the same bytes as a ring all-reduce. Direct messages do so anyway.
        """
        if self.latency:
            return self.all_reduce_(half.clone())
        numel = half.numel()
        # Every rank has an equal share.
        padded = half.new_zeros(-(-numel // self.size) * self.size)
        padded[:numel] = half
        chunks = padded.view(self.size, -1)
        share = self.all_to_all(chunks).sum(dim=0, dtype=torch.float32)
        return self._begin_all_gather(share.to(half.dtype), lambda: chunks * self.size)().view(-1)[:numel]

    def all_reduce_coalesced_(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over ranks, with one collective per dtype.

        Args:
            tensors: contiguous tensors on one device, in the same order on every rank; empty ones are allowed.
        """
        self.begin_all_reduce_coalesced_(tensors)()

    def begin_all_reduce_coalesced_(self, tensors: Sequence[Tensor]) -> Callable[[], None]:
        """Begin `all_reduce_coalesced_`, and go on with other work and other collectives meanwhile.

        Args:
            tensors: as there; not to be touched before it is finished.

        Returns:
            what finishes it.
        """
        by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for tensor in tensors:
            by_dtype[tensor.dtype].append(tensor.view(-1))
        begun = [
            (flats, self._begin_all_reduce_(flats[0] if len(flats) == 1 else torch.cat(flats)))
            for flats in by_dtype.values()
        ]

        def finish() -> None:
            for flats, wait in begun:
                total = wait()
                for flat, own in zip(flats, total.split([flat.numel() for flat in flats]), strict=True):
                    if len(flats) > 1:
                        flat.copy_(own)

        return finish

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Gather `tensor`, shape `(n,)`, equal on all ranks, into a new tensor of shape `(w, n)`."""
        return self._begin_all_gather(tensor)()

    def all_gather_numbers(self, numbers: list[int], dtype: torch.dtype = torch.int64) -> list[list[int]]:
        """The numbers of each rank, sent in that dtype. Waits for the device."""
        gathered: list[list[int]] = self.all_gather(torch.tensor(numbers, dtype=dtype, device=self.device)).tolist()
        return gathered

    def all_gather_quietly(self, numbers: list[int]) -> list[list[int]]:
        """The numbers of each rank; not counted. Waits for the device."""
        with self.counters.paused():
            return self.all_gather_numbers(numbers)

    def all_to_all(self, chunks: Tensor) -> Tensor:
        """Send row i of `chunks`, shape `(w, n)`, to rank i; row i of the result came from rank i."""
        return self._begin_all_to_all(chunks)()

    def all_reduce_sparse_mean(self, grad: Tensor) -> Tensor:
        """Mean over ranks of a sparse COO tensor: an all-gather of padded indices and values.

        Reads the number of entries on the host, so on CUDA this synchronizes.
        """
        grad = grad.coalesce()
        if self.size == 1:
            return grad
        num_entries = self.all_gather(torch.tensor([grad._nnz()], device=grad.device)).view(-1).tolist()
        longest = max(num_entries)
        indices = grad.indices().new_zeros((longest, grad.sparse_dim()))
        indices[: grad._nnz()] = grad.indices().t()
        values = grad.values().new_zeros((longest, *grad.values().shape[1:]))
        values[: grad._nnz()] = grad.values() / self.size
        all_indices = self.all_gather(indices.view(-1)).view(self.size, *indices.shape)
        all_values = self.all_gather(values.view(-1)).view(self.size, *values.shape)
        return torch.sparse_coo_tensor(
            torch.cat([rows[:n] for rows, n in zip(all_indices, num_entries, strict=True)]).t(),
            torch.cat([rows[:n] for rows, n in zip(all_values, num_entries, strict=True)]),
            grad.shape,
            check_invariants=False,  # said explicitly, or PyTorch warns that it does not check
        ).coalesce()

    def _begin_all_reduce_(self, tensor: Tensor) -> Wait:
        """Begin an `all_reduce_`. Returns what waits for the result."""
        if self.size == 1 or not tensor.numel():
            return lambda: tensor
        self._count("all_reduce", self.ring_bytes(tensor))
        with named("all_reduce", "begin"):
            wait = self._sum_(tensor)
        return self._counted(wait, "all_reduce", tensor.nbytes)

    def _begin_all_gather(self, tensor: Tensor, of_equals: Callable[[], Tensor] | None = None) -> Wait:
        """Begin an `all_gather`, which goes on by itself. Returns what waits for the result.

        Args:
            tensor: this rank's, shape `(n,)`.
            of_equals: what the result would be, shape `(w, n)`, if all ranks had what this one has; `None`: w times
                its own tensor. Only emulated ranks need it.
        """
        return self._expect_all_gather(tensor)(tensor, of_equals)

    def _expect_all_gather(self, like: Tensor) -> SendToAll:
        """Announce an `all_gather` of tensors like this one, long before there is this rank's, to save a round trip.

        Returns:
            what begins it, with the arguments of `_begin_all_gather`.
        """
        if self.size == 1:
            return lambda tensor, of_equals: tensor.view(1, -1).clone
        send = self._gather(like)

        def begin(tensor: Tensor, of_equals: Callable[[], Tensor] | None) -> Wait:
            self._count("all_gather", (self.size - 1) * tensor.nbytes)
            with named("all_gather", "begin"):
                wait = send(tensor.contiguous(), of_equals)
            return self._counted(wait, "all_gather", tensor.nbytes)

        return begin

    def _begin_all_to_all(self, chunks: Tensor) -> Wait:
        if self.size == 1:
            return lambda: chunks
        self._count("all_to_all", (self.size - 1) / self.size * chunks.nbytes)
        with named("all_to_all", "begin"):
            wait = self._exchange(chunks)
        return self._counted(wait, "all_to_all", chunks.nbytes)

    def _count(self, kind: Kind, num_bytes: float) -> None:
        self.counters.count(num_bytes, num_bytes * self.leaving(kind))

    def _counted(self, wait: Wait, kind: Kind, num_bytes: int) -> Wait:
        """Count the rounds of messages when it is waited for, and the time, if they belong to a step."""
        is_counted = not self.counters.is_evaluating
        end = self.counters.rounds_in_lane[lane()] + self._num_rounds(kind, num_bytes)

        def counted() -> Tensor:
            with named(kind), self.counters.timing.comm() if is_counted else nullcontext():
                result = wait()
            if is_counted:
                self.counters.waited_for(end)
            return result

        return counted

    def _num_rounds(self, kind: Kind, num_bytes: int) -> int:
        if kind == "all_to_all":
            return 1
        if not self.latency:
            return (2 if kind == "all_reduce" else 1) * (self.size - 1)
        return 2 if kind == "all_reduce" and not takes_one_round(num_bytes, self.size, self.latency) else 1

    # What is different among emulated ranks. There are several ranks; nothing is counted.

    def _sum_(self, tensor: Tensor) -> Wait:
        if self._transport is not None:
            return self._transport.sum_(tensor.view(-1))
        return self._begun(tensor, dist.all_reduce, tensor)

    def _gather(self, like: Tensor) -> SendToAll:
        if self._transport is not None:
            send = self._transport.gather(like.numel(), like.dtype)
            return lambda tensor, of_equals: send(tensor)
        return lambda tensor, of_equals: self._ring_gather(tensor)

    def _ring_gather(self, tensor: Tensor) -> Wait:
        gathered = tensor.new_empty((self.size, tensor.numel()))
        all_gather = renamed("all_gather_into_tensor", "all_gather_single")
        return self._begun(gathered, all_gather, gathered.view(-1), tensor)  # gloo takes no rows

    def _exchange(self, chunks: Tensor) -> Wait:
        if self._transport is not None:
            return self._transport.exchange(chunks)
        received = torch.empty_like(chunks)
        return self._begun(received, dist.all_to_all_single, received, chunks)

    def _begun(self, result: Tensor, collective: Callable[..., dist.Work | None], *args: object) -> Wait:
        group = self._lanes[lane()] if self._lanes else self.process_group
        work = collective(*args, group=group, async_op=True)
        assert work is not None

        def wait() -> Tensor:
            with waiting():
                work.wait()
            return result

        return wait
