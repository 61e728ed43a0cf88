"""The ranks of a hook: collectives that count their bytes, averages of encoded numbers, and subgroups.

Collectives return a generator (`steps`): `yield from` it. `all_reduce_`, `all_reduce_mean_`, `all_reduce_coalesced`,
`all_gather` and `all_to_all` begin when they are called; the remaining collectives begin at `yield from`.

Counts are the payload bytes that a rank sends, averaged over ranks, under the usual bandwidth-optimal algorithms
(Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH"): all-reduce 2(w-1)/w of the
payload, all-gather w-1 times the rank's part, all-to-all (w-1)/w of the payload.
"""

from __future__ import annotations

import copy
import hashlib
import os
import random
import socket
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_commhooks.basics.ranges import named
from lightning_commhooks.codecs.codec import Chunk, Codec, Kernels, chunk_numel, compiled
from lightning_commhooks.collectives import process_groups as groups
from lightning_commhooks.collectives.counters import Counters
from lightning_commhooks.collectives.direct import Direct
from lightning_commhooks.collectives.gloo_abort import Connections
from lightning_commhooks.collectives.steps import Steps, Wait, finish, result

# Environment variables with the number of this process's node: of Lightning and Ray, of torchrun, and of SLURM.
_NODE_VARIABLES = ("NODE_RANK", "GROUP_RANK", "SLURM_NODEID")
T = TypeVar("T")
Kind = Literal["all_reduce", "all_gather", "all_to_all", "reduce_scatter"]


class Transport(Protocol):
    """Sends tensors between ranks; see `Backend` and `Direct` for the methods. Each collective waits at least once."""

    is_ordered: bool
    latency: float
    size: int
    rank: int

    def channel(self, number: int, ranks: Any) -> Any: ...
    def among(self, members: Sequence[int], part: int) -> Any: ...
    def num_rounds(self, num_bytes: int) -> int: ...
    def sum_(self, tensor: Tensor) -> Steps[Tensor]: ...
    def expect(self, like: Tensor) -> Any: ...
    def gather(self, tensor: Tensor, expected: Any = None) -> Steps[Tensor]: ...
    def exchange(self, chunks: Tensor) -> Steps[Tensor]: ...


@dataclass
class Tally:
    """Counts of this rank for one bucket so far.

    Attributes:
        sent: number of payload bytes sent.
        between_nodes: number of those bytes that left the node.
        rounds: number of rounds of messages.
        under_way: number of collectives that have begun and not ended.
        numbers: count of the numbers that this rank passed to collectives, by dtype.
        numbers_between_nodes: count of those passed to collectives that leave the node.
    """

    sent: float = 0.0
    between_nodes: float = 0.0
    rounds: int = 0
    under_way: int = 0
    numbers: Counter[torch.dtype] = field(default_factory=Counter)
    numbers_between_nodes: Counter[torch.dtype] = field(default_factory=Counter)


def renamed(name: str, since_2_13: str) -> Callable[..., dist.Work | None]:
    """Return a collective by its name from PyTorch 2.13 on, or by its older name."""
    return getattr(dist, since_2_13, None) or getattr(dist, name)  # type: ignore[no-any-return]


class Backend:
    """Collectives that all ranks have to begin in the same order, without channels. The latency of near ranks is 0."""

    is_ordered = True
    latency = 0.0

    def __init__(self, process_group: dist.ProcessGroup, direct: Direct | None = None) -> None:
        self._process_group, self._direct = process_group, direct
        self.size, self.rank = process_group.size(), process_group.rank()

    def channel(self, number: int, ranks: object = None) -> Backend:
        """Return itself: all buckets share the same collectives."""
        return self

    def among(self, members: Sequence[int], part: int) -> Direct | None:
        """Return collectives of some ranks; `None` if they need their own process group."""
        return None if self._direct is None else self._direct.among(members, part)

    def num_rounds(self, num_bytes: int) -> int:
        """Return the number of rounds of messages of a sum: twice around the ring."""
        return 2 * (self.size - 1)

    def sum_(self, tensor: Tensor) -> Steps[Tensor]:
        """Replace a contiguous tensor by its sum over ranks."""
        return self._run(tensor, dist.all_reduce, tensor)

    def expect(self, like: Tensor) -> None:
        """Do nothing: see `Direct.expect`."""

    def gather(self, tensor: Tensor, expected: object = None) -> Steps[Tensor]:
        """Return the contiguous tensors of all ranks, shape `(w, n)`."""
        gathered = tensor.new_empty((self.size, tensor.numel()))
        all_gather = renamed("all_gather_into_tensor", "all_gather_single")
        return self._run(gathered, all_gather, gathered.view(-1), tensor)  # gloo takes no rows

    def exchange(self, chunks: Tensor) -> Steps[Tensor]:
        """Send row i of `chunks`, shape `(w, n)`, to rank i; row i of the result comes from rank i."""
        received = torch.empty_like(chunks)
        return self._run(received, dist.all_to_all_single, received, chunks)

    def sum_share(self, chunks: Tensor) -> Steps[Tensor]:
        """Return the sum over ranks of this rank's row of `chunks`, shape `(w, n)`."""
        total = chunks.new_empty(chunks.shape[1])
        reduce_scatter = renamed("reduce_scatter_tensor", "reduce_scatter_single")
        return self._run(total, reduce_scatter, total, chunks.view(-1))

    def _run(self, result: Tensor, collective: Callable[..., dist.Work | None], *args: object) -> Steps[Tensor]:
        work = collective(*args, group=self._process_group, async_op=True)
        assert work is not None
        yield Wait([work])
        return result


class Group:
    """The ranks that a hook averages over, and their collectives.

    A group does not change: `for_bucket`, `split`, `encoding`, `not_gradients` and `quiet` return related groups.

    Args:
        transport: sends tensors between ranks; `None` for a single process.
        counters: count the bytes; `None`: new counters.
        device: the device of the gradients.
        process_group: the process group of the same ranks, if there is one.
        connections: list to which the connections of subgroups are added.
        nodes: ranks by node, if they are known.
        global_rank: this process's rank among all processes, if it is not that of `torch.distributed`.
        are_alike: see below.
        is_uniform: whether all ranks wait equally often; those of subgroups of different sizes do not.
        everyone: all ranks, if the ranks of this group are nodes. A group of nodes does not count bytes, and all ranks
            agree on compiled codecs.

    Attributes:
        size: number of ranks.
        rank: this process's rank among them.
        global_rank: this process's rank among all processes.
        are_alike: whether all ranks run in this process; then blocking calls have equal arguments on all ranks.
        transport: sends tensors between ranks; `None` for a single process, and once the hook is closed.
        bucket_number: number of the bucket that this group is for; `None`: work between buckets.
        tally: counts of that bucket.
        counts_bytes: whether bytes are counted.
        counts_gradients: whether the numbers passed to collectives are gradients, in whatever form, and are counted.
        codec: the codec of `all_reduce_factors`; `None`: factors are not encoded.
    """

    def __init__(
        self,
        transport: Transport | None,
        counters: Counters | None = None,
        device: torch.device | str = "cpu",
        process_group: dist.ProcessGroup | None = None,
        connections: list[Connections] | None = None,
        *,
        nodes: list[list[int]] | None = None,
        global_rank: int | None = None,
        are_alike: bool = False,
        is_uniform: bool = True,
        everyone: Group | None = None,
    ) -> None:
        self.transport, self.process_group_or_none = transport, process_group
        self.counters = counters if counters is not None else Counters()
        self.device = torch.device(device)
        self.size: int = transport.size if transport is not None else 1
        self.rank: int = transport.rank if transport is not None else 0
        if everyone is not None:
            global_rank, are_alike = everyone.global_rank, everyone.are_alike
        elif global_rank is None:
            global_rank = dist.get_rank() if transport is not None and dist.is_initialized() else self.rank
        self.global_rank: int = global_rank
        self.are_alike: bool = are_alike
        self.bucket_number: int | None = None
        self.tally = Tally()
        self.counts_bytes, self.counts_gradients = everyone is None, True
        self.codec: Codec | None = None
        self._is_uniform, self._everyone = is_uniform, everyone
        # Shared by all groups of the same ranks.
        self._nodes = nodes if nodes is not None else []
        self._connections = connections if connections is not None else []
        self._subgroups: dict[tuple[tuple[int, ...], ...], Group] = {}
        # Copies that hooks may keep.
        self._copies: WeakSet[Group] = WeakSet()
        self._kernels: dict[tuple[Codec, bool, bool], Kernels] = {}

    @classmethod
    def of(
        cls,
        own: groups.OwnGroup,
        counters: Counters | None,
        device: torch.device,
        connections: list[Connections] | None = None,
        **options: Any,
    ) -> Group:
        """Create the group of a process group for communication threads, and add its connections to `connections`."""
        if connections is not None:
            connections.append(own.connections)
        is_far = own.direct is not None and own.direct.latency > 0
        transport = own.direct if is_far else Backend(own.process_group, own.direct)
        return cls(transport, counters, device, own.process_group, connections, **options)

    def _with(self, **changes: object) -> Group:
        other = copy.copy(self)
        other.__dict__.update(changes)
        return other

    def for_bucket(self, bucket: int | Group) -> Group:
        """Return a group of the same ranks for one bucket, whose messages are kept apart from those of other buckets.

        Args:
            bucket: the number of the bucket, rank-uniform, or a group for it, which shares its tally.
        """
        other = ranks = self._with(bucket_number=bucket, tally=Tally())
        if isinstance(bucket, Group):
            ranks = bucket
            other.bucket_number, other.tally = ranks.bucket_number, ranks.tally
            other.counts_bytes = self.counts_bytes and ranks.counts_bytes
            other.counts_gradients = self.counts_gradients and ranks.counts_gradients
        if other.transport is not None:
            other.transport = other.transport.channel(ranks.bucket_number or 0, ranks)
        return other

    def quiet(self) -> Group:
        """Return a group of the same ranks that does not count bytes."""
        return self._with(counts_gradients=False, counts_bytes=False)

    def not_gradients(self) -> Group:
        """Return a group of the same ranks for numbers that are not gradients, such as weights or factors of gradients.

        Their bytes are counted, but whatever their dtype, they do not count as gradient elements that were sent
        uncompressed: see `Counters.numel_uncompressed`.
        """
        return self._with(counts_gradients=False)

    def all_gather_quietly(self, numbers: list[int]) -> list[list[int]]:
        """Return the numbers of each rank, without counting bytes. Blocks, and waits for the device."""
        if self.are_alike:
            return [list(numbers) for _ in range(self.size)]
        with self.counters.timing.paused():
            return self.all_gather_numbers(numbers)

    def release(self) -> list[dist.ProcessGroup | None]:
        """Release the process group, so that its threads end when no other reference to it is left.

        Returns:
            the process groups of subgroups.
        """
        released: list[dist.ProcessGroup | None] = []
        for group in self._subgroups.values():
            released += [group.process_group_or_none, *group.release()]
        for group in (self, *self._copies):
            group.process_group_or_none = group.transport = None
        self._subgroups.clear()
        return released

    def nodes(self) -> list[list[int]]:
        """Ranks by node, in order. Collective at the first call.

        Processes are on one node when they have the same host name and, from their launcher, the same node number.
        """
        if not self._nodes:
            number = next((os.environ[key] for key in _NODE_VARIABLES if key in os.environ), "0")
            digest = hashlib.blake2b(f"{socket.gethostname()} {number}".encode(), digest_size=7).digest()
            ids = [node for (node,) in self.all_gather_quietly([int.from_bytes(digest, "big")])]
            self._nodes += [[rank for rank, i in enumerate(ids) if i == node] for node in dict.fromkeys(ids)]
        return self._nodes

    def split(self, subgroups: Sequence[Sequence[int]], apart: bool = False) -> Group:
        """Return this rank's subgroup, for the same bucket as this group and with the same tally.

        Collective at the first call with these subgroups, which must be in `CommHook.bind`.

        Args:
            subgroups: ranks of this group; each rank is in one subgroup.
            apart: whether the subgroup's collectives may be in any order relative to this group's, even if both have
                the same ranks.
        """
        key = tuple(tuple(ranks) for ranks in subgroups)
        if self.size == 1 or (len(key) == 1 and not apart):
            return self
        if key not in self._subgroups:
            self._subgroups[key] = self._make_subgroup(key, next(ranks for ranks in key if self.rank in ranks))
        return self._subgroups[key] if self.bucket_number is None else self._subgroups[key].for_bucket(self)

    def _make_subgroup(self, subgroups: tuple[tuple[int, ...], ...], own: tuple[int, ...]) -> Group:
        assert self.transport is not None
        nodes = ([i for i, rank in enumerate(own) if rank in node] for node in self._nodes)
        options: dict[str, Any] = {
            "nodes": [node for node in nodes if node],
            "global_rank": self.global_rank,
            "are_alike": self.are_alike,
            "is_uniform": self._is_uniform and len({len(ranks) for ranks in subgroups}) == 1,
        }
        transport = self.transport.among(own, len(self._subgroups) + 1)
        if transport is not None:
            return Group(transport, self.counters, self.device, None, self._connections, **options)
        # All ranks take part in making groups, including a rank that is alone in its subgroup.
        name = self.all_gather_quietly([random.SystemRandom().getrandbits(62)])[0][0]
        made = groups.own_subgroup(self.process_group, subgroups, str(name), self.device)
        return Group.of(made, self.counters, self.device, self._connections, **options)

    def encoding(self, codec: Codec) -> Group:
        """Return a group of the same ranks that encodes factors. Collective at the first call with that codec."""
        self.kernels(codec, feedback=False, two_shot=True)
        other = self._with(codec=codec)
        if self.bucket_number is None:  # hooks keep no group of a bucket
            self._copies.add(other)
        return other

    @property
    def latency(self) -> float:
        """Seconds that a message takes between ranks that are far from each other; 0: they are near."""
        return 0.0 if self.transport is None else self.transport.latency

    @property
    def is_ordered(self) -> bool:
        """Whether all ranks have to begin collectives in the same order, including those of different buckets."""
        return self.transport is not None and self.transport.is_ordered

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group; to PyTorch, `None` would mean all processes.

        Raises:
            RuntimeError: there is none, or it was released.
        """
        if self.process_group_or_none is None:
            if self.transport is None:
                raise RuntimeError("the process group of this communication hook is gone: the hook was closed")
            raise RuntimeError("these ranks have no process group: they are a subgroup, or emulated")
        return self.process_group_or_none

    def finish(self, steps: Steps[T]) -> T:
        """Run a computation to its end in this thread, and measure the time of its waits."""
        return finish(steps, nullcontext if self.counters.is_evaluating else self.counters.timing.comm)

    def ring_bytes(self, tensor: Tensor) -> float:
        """Payload bytes that each rank sends in a ring all-reduce of `tensor`."""
        return 2 * (self.size - 1) / self.size * tensor.nbytes

    def dense_bytes(self, grad: Tensor) -> float:
        """Payload bytes that each rank sends for a gradient without a hook; a sparse one goes to all others."""
        if grad.is_sparse:
            return (self.size - 1) * (grad._indices().nbytes + grad._values().nbytes)
        return self.ring_bytes(grad)

    def inter_node_share(self, kind: Kind = "all_reduce", around_ring: bool | None = None) -> float:
        """Return the fraction of a collective's bytes that leave the node, averaged over ranks; 0: nodes are unknown.

        Args:
            kind: the kind of collective.
            around_ring: whether ranks send to their neighbors only; `None`: as in this group.
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
        transport = self.transport
        if transport is None or self.size == 1 or not tensor.numel():
            return result(tensor)
        rounds = transport.num_rounds(tensor.nbytes)
        return self._begin("all_reduce", tensor, self.ring_bytes(tensor), rounds, transport.sum_(tensor))

    def all_reduce_mean_(self, tensor: Tensor, scale: float | Tensor = 1.0) -> Steps[Tensor]:
        """Replace a contiguous floating-point `tensor` by `scale` times its mean.

        Divides first, so that 16-bit sums fit.
        """
        return self.all_reduce_(tensor.div_(self.size / scale))

    def all_reduce_in_float32(self, half: Tensor) -> Steps[Tensor]:
        """Return the sum over ranks of a 16-bit tensor, shape `(n,)`, in its dtype but rounded only once.

        Each rank receives its share from every other rank, sums it in float32 and sends the sum: an all-to-all and an
        all-gather, the same bytes as a ring all-reduce. A transport with direct messages always does so.
        """
        if not self.is_ordered:
            return (yield from self.all_reduce_(half.clone()))
        numel = half.numel()
        # Every rank has an equal share.
        padded = half.new_zeros(-(-numel // self.size) * self.size)
        padded[:numel] = half
        share = (yield from self.all_to_all(padded.view(self.size, -1))).sum(dim=0, dtype=torch.float32)
        return (yield from self.all_gather(share.to(half.dtype))).view(-1)[:numel]

    def all_reduce_coalesced(self, tensors: Sequence[Tensor]) -> Steps[list[Tensor]]:
        """Return the sum over ranks of each tensor, with one collective per dtype.

        Sums of one dtype are views of one tensor; the sum of a tensor that is the only one of its dtype replaces it.

        Args:
            tensors: contiguous tensors on one device, in the same order on every rank; empty ones are allowed.
        """
        by_dtype: dict[torch.dtype, list[int]] = defaultdict(list)
        for i, tensor in enumerate(tensors):
            if tensor.numel():
                by_dtype[tensor.dtype].append(i)
        steps = []
        for places in by_dtype.values():
            flats = [tensors[i].view(-1) for i in places]
            steps.append(self.all_reduce_(flats[0] if len(flats) == 1 else torch.cat(flats)))

        def split() -> Steps[list[Tensor]]:
            sums = list(tensors)
            for places, total in zip(by_dtype.values(), steps, strict=True):
                parts = (yield from total).split([tensors[i].numel() for i in places])
                for i, part in zip(places, parts, strict=True):
                    sums[i] = part.view(tensors[i].shape)
            return sums

        return split()

    def all_gather(self, tensor: Tensor, expected: object = None) -> Steps[Tensor]:
        """Gather `tensor`, shape `(n,)`, equal on all ranks, into a new tensor of shape `(w, n)`.

        Args:
            tensor: this rank's.
            expected: what `expect_all_gather` has returned, if it was called.
        """
        transport = self.transport
        if transport is None or self.size == 1:
            return result(tensor.view(1, -1).clone())
        num_bytes, num_rounds = (self.size - 1) * tensor.nbytes, self.size - 1 if self.is_ordered else 1
        return self._begin("all_gather", tensor, num_bytes, num_rounds, transport.gather(tensor.contiguous(), expected))

    def expect_all_gather(self, like: Tensor) -> object:
        """Announce an `all_gather` of tensors like this one before this rank's is ready; this saves a round trip."""
        return None if self.transport is None or self.size == 1 else self.transport.expect(like)

    def all_gather_numbers(self, numbers: list[int]) -> list[list[int]]:
        """Return the integers of each rank. Blocks, and waits for the device."""
        own = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        return self.finish(self.all_gather(own)).tolist()

    def all_to_all(self, chunks: Tensor) -> Steps[Tensor]:
        """Send row i of `chunks`, shape `(w, n)`, to rank i; row i of the result came from rank i."""
        transport = self.transport
        if transport is None or self.size == 1:
            return result(chunks)
        return self._begin("all_to_all", chunks, self.ring_bytes(chunks) / 2, 1, transport.exchange(chunks))

    def reduce_scatter(self, chunks: Tensor, in_float32: bool = False) -> Steps[Tensor]:
        """Return the sum over ranks of this rank's row of `chunks`, shape `(w, n)`: a new tensor of shape `(n,)`.

        NCCL sums in the dtype of `chunks`. On CPU, and with `in_float32`, the chunks are sent in an all-to-all and
        summed here in at least float32: gloo's own reduce-scatter is an all-reduce that throws most of its result away.
        """
        transport = self.transport
        if in_float32 or not chunks.is_cuda or self.size == 1 or not isinstance(transport, Backend):
            dtype = torch.promote_types(chunks.dtype, torch.float32)
            return (yield from self.all_to_all(chunks)).sum(dim=0, dtype=dtype)
        num_bytes, steps = self.ring_bytes(chunks) / 2, transport.sum_share(chunks)
        return (yield from self._begin("reduce_scatter", chunks, num_bytes, self.size - 1, steps))

    def all_reduce_sparse_mean(self, grad: Tensor) -> Steps[Tensor]:
        """Return the mean over ranks of a sparse COO tensor, by an all-gather of padded indices and values.

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

    def _count_numbers(self, kind: Kind, given: Tensor) -> None:
        if self.counts_gradients:
            self.tally.numbers[given.dtype] += given.numel()
            if self.inter_node_share(kind):
                self.tally.numbers_between_nodes[given.dtype] += given.numel()

    def _begin(
        self, kind: Kind, given: Tensor, num_bytes: float, num_rounds: int, steps: Steps[Tensor]
    ) -> Steps[Tensor]:
        """Begin a collective, count its bytes and numbers, and return the rest of it.

        Its rounds of messages are counted at its end: rounds that several collectives for one bucket take at the same
        time are counted once.
        """
        self._count_numbers(kind, given)
        if self.counts_bytes:
            between_nodes = num_bytes * self.inter_node_share(kind)
            if self.counters.count(num_bytes, between_nodes):
                self.tally.sent += num_bytes
                self.tally.between_nodes += between_nodes
            else:
                num_rounds = 0
        last_round = self.tally.rounds + num_rounds
        self.tally.under_way += 1
        with named(kind, "begin"):
            waits = next(steps)
        return self._rest(kind, waits, steps, last_round)

    def _rest(self, kind: Kind, waits: Wait, steps: Steps[Tensor], last_round: int) -> Steps[Tensor]:
        while True:
            yield Wait(waits.works, kind, self._is_uniform)
            try:
                waits = next(steps)
            except StopIteration as done:
                self.tally.under_way -= 1
                if self.counts_bytes:
                    self.counters.rounds += max(0, last_round - self.tally.rounds)
                    self.tally.rounds = max(last_round, self.tally.rounds)
                return done.value  # type: ignore[no-any-return]

    def num_owners(self, two_shot: bool = True) -> int:
        """Return the number of equal shares in `average_encoded_`: 1 if each rank sends everything to every other."""
        return self.size if two_shot and self.size > 2 else 1

    def kernels(self, codec: Codec, *, feedback: bool, two_shot: bool) -> Kernels:
        """Return the functions that run a codec in this group, compiled if that works on all ranks.

        Collective at the first call with these arguments. `feedback` says whether there is error feedback, and
        `two_shot` is the argument of `average_encoded_`.
        """
        key = codec, feedback, two_shot
        if key not in self._kernels:
            owners = self.num_owners(two_shot)
            own: Kernels | None = Kernels(codec)
            if self.size > 1:
                # Numbers of payloads that are decoded together.
                num_payloads = {self.size} if owners == 1 else {self.size, 1}
                own = compiled(codec, self.device, num_payloads, feedback, owners, self.rank == 0)
            # A compiled function may round sums differently, so all ranks compile it or none does.
            asked = self._everyone or self
            everywhere = all(is_compiled for (is_compiled,) in asked.all_gather_quietly([int(own is not None)]))
            self._kernels[key] = own if own is not None and everywhere else Kernels(codec)
        return self._kernels[key]

    def average_encoded_(
        self,
        chunks: Sequence[Chunk],
        kernels: Kernels,
        *,
        loss_scale: float | Tensor = 1.0,
        scale: float | Tensor = 1.0,
        two_shot: bool = True,
    ) -> Steps[Tensor]:
        """Replace the numbers of each chunk by their mean over ranks, encoded on the way and equal on all ranks.

        Two-shot, as CGX (Markov et al. 2022, https://arxiv.org/abs/2111.08617) and ZeRO++ (Wang et al. 2023,
        https://arxiv.org/abs/2306.10209, section 3.3) do it: each rank receives its share of all chunks from every
        other rank, sums it in at least float32, encodes the mean and sends it to all; 2(w-1)/w of the encoded size. Two
        ranks send all to each other instead, the same bytes and one rounding less. One chunk is encoded or decoded
        while other chunks are under way.

        Args:
            chunks: the same on every rank.
            kernels: the kernels of this group.
            loss_scale: divisor of the numbers before they are added to the residual, and factor of the mean.
            scale: factor of the numbers, with error feedback only.
            two_shot: whether to use the two-shot algorithm; if not, each rank sends everything to every other rank,
                (w-1) times the encoded size.

        Returns:
            whether all means are finite before they are multiplied, as a boolean of one element.
        """
        if not chunks:
            return torch.ones((), dtype=torch.bool, device=self.device)
        one = chunks[0].numbers.new_ones(())
        way_in, way_out = (one * (scale / loss_scale)).view(()), (one * loss_scale).view(())
        payloads = (kernels.encode(chunk.numbers, chunk.residual, way_in, chunk.seed) for chunk in chunks)
        num_payloads = 1
        if self.num_owners(two_shot) == 1:
            num_payloads, gathers = self.size, [self.all_gather(payload.view(-1)) for payload in payloads]
        else:
            gathers = yield from self._second_shots(chunks, kernels, payloads)
        finite = []
        for chunk, gather in zip(chunks, gathers, strict=True):
            factor = way_out if chunk.residual is not None else one
            gathered = (yield from gather).view(num_payloads, len(chunk.numbers), -1)
            finite.append(kernels.decode_mean(gathered, factor, chunk.numbers))
        return torch.stack(finite).all()

    def _second_shots(
        self, chunks: Sequence[Chunk], kernels: Kernels, payloads: Iterable[Tensor]
    ) -> Steps[list[Steps[Tensor]]]:
        """Average this rank's shares, and begin to send them to all ranks: each while other chunks are in flight."""
        shots, gathers = [], []
        for payload in payloads:
            rows = payload.view(self.size, -1)
            shots.append((self.all_to_all(rows), self.expect_all_gather(rows[0])))
        for chunk, (first_shot, expected) in zip(chunks, shots, strict=True):
            b, s = len(chunk.numbers) // self.size, chunk.numbers.shape[1]
            one, mean = chunk.numbers.new_ones(()), chunk.numbers.new_empty((b, s))
            kernels.decode_mean((yield from first_shot).view(self.size, b, -1), one, mean)
            own = None if chunk.residual is None else chunk.residual.view(self.size, b, s)[self.rank]
            # Times the number of ranks, by which the next mean divides it.
            share = kernels.encode_mean(mean, own, one * self.size, chunk.seed + 2**30)
            gathers.append(self.all_gather(share.view(-1), expected))
        return gathers

    def average_tensors_encoded_(self, tensors: Sequence[Tensor], kernels: Kernels) -> Steps[None]:
        """Replace tensors by their means over ranks, without error feedback: see `average_encoded_`.

        The tensors, of one floating-point dtype, have the same shapes on every rank. Each begins a block: the codec has
        a block size.
        """
        size = kernels.codec.block_size
        assert size is not None
        if not any(tensor.numel() for tensor in tensors):
            return
        filled = [-(-tensor.numel() // size) * size for tensor in tensors]
        unit = size * self.num_owners()
        dtype = torch.promote_types(tensors[0].dtype, torch.float32)
        flat = tensors[0].new_zeros(-(-sum(filled) // unit) * unit, dtype=dtype)
        places = flat[: sum(filled)].split(filled)
        for tensor, place in zip(tensors, places, strict=True):
            place[: tensor.numel()] = tensor.reshape(-1)
        pieces = flat.split(max(unit, chunk_numel(flat.device) // unit * unit))
        yield from self.average_encoded_([Chunk(piece.view(-1, size), None, seed=0) for piece in pieces], kernels)
        for tensor, place in zip(tensors, places, strict=True):
            tensor.copy_(place[: tensor.numel()].view(tensor.shape))

    def all_reduce_factors(
        self, exact: Sequence[Tensor], factors: Sequence[Tensor]
    ) -> Steps[tuple[list[Tensor], list[Tensor]]]:
        """Return the sums over ranks of two lists of tensors, which may be overwritten.

        `factors` are encoded on the way if this group has a codec: the algorithm compensates their errors, as error
        feedback does. Factors that do not fill a block are not encoded, and neither are the tensors in `exact`.
        """
        factors_too = self.not_gradients()
        for tensor in exact if self.size > 1 else ():
            self._count_numbers("all_reduce", tensor)
        if self.codec is None or self.size == 1:
            sums = yield from factors_too.all_reduce_coalesced([*exact, *factors])
            return sums[: len(exact)], sums[len(exact) :]
        kernels = self.kernels(self.codec, feedback=False, two_shot=True)
        large = [factor for factor in factors if kernels.fills_block(factor)]
        small = [factor for factor in factors if not kernels.fills_block(factor)]
        summing = factors_too.all_reduce_coalesced([*exact, *small])
        yield from self.average_tensors_encoded_(large, kernels)
        for factor in large:
            factor.mul_(self.size)
        sums = yield from summing
        of_small = iter(sums[len(exact) :])
        return sums[: len(exact)], [one if kernels.fills_block(one) else next(of_small) for one in factors]


@contextmanager
def counted(gradients: Tensor, ranks: Group, dense: float = 0.0) -> Iterator[None]:
    """Count the gradient elements that a hook sends within a `with`: see `Counters.numel_uncompressed`.

    `gradients` are the flat gradients of one bucket, or the values of a sparse gradient; `dense` are the bytes that an
    all-reduce of them sends, which are counted as well.
    """
    tally, counters, dtype, numel = ranks.tally, ranks.counters, gradients.dtype, gradients.numel()
    share = ranks.inter_node_share(around_ring=True)
    counters.bytes_dense += dense
    counters.bytes_dense_between_nodes += dense * share
    sent, between = tally.sent, tally.between_nodes
    numbers, numbers_between = tally.numbers.copy(), tally.numbers_between_nodes.copy()
    yield
    if tally.sent > sent:
        given = tally.numbers - numbers
        if 0 < share < 1 and tally.between_nodes > between:
            given = tally.numbers_between_nodes - numbers_between
        floats = {form for form in given if form.is_floating_point and dtype.is_floating_point}
        as_precise = {dtype, *(form for form in floats if form.itemsize >= dtype.itemsize)}
        as_they_are = sum(num for form, num in given.items() if form in as_precise)
        counters.numel_uncompressed += min(numel, as_they_are)
        counters.numel_compressed += max(0, numel - as_they_are)
