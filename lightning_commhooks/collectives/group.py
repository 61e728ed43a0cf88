"""The ranks of a hook: collectives that count their bytes, averages of encoded numbers, and subgroups.

Collectives are generators (`steps`): `yield from` them. Counts are the payload bytes that a rank sends, averaged over
ranks, under the usual bandwidth-optimal algorithms (Thakur et al. 2005, "Optimization of Collective Communication
Operations in MPICH"): all-reduce 2(w-1)/w of the payload, all-gather w-1 times the rank's part, all-to-all (w-1)/w of
the payload.
"""

from __future__ import annotations

import copy
import hashlib
import os
import random
import socket
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_commhooks.basics.ranges import named
from lightning_commhooks.codecs.codec import Codec, Kernels, compiled
from lightning_commhooks.collectives import process_groups as groups
from lightning_commhooks.collectives.backend import Backend
from lightning_commhooks.collectives.chunk import CHUNK_NUMEL, Chunk
from lightning_commhooks.collectives.counters import Counters
from lightning_commhooks.collectives.gloo_abort import Connections
from lightning_commhooks.collectives.steps import Steps, Wait, begun, finish, result

# Environment variables with the number of this process's node: of Lightning and Ray, of torchrun, and of SLURM.
_NODE_VARIABLES = ("NODE_RANK", "GROUP_RANK", "SLURM_NODEID")
T = TypeVar("T")
Kind = Literal["all_reduce", "all_gather", "all_to_all", "reduce_scatter"]


class Transport(Protocol):
    """Sends tensors between ranks; see the implementations, such as `Backend` and `Direct`, for the methods."""

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
    """What this rank has sent for one bucket so far.

    Attributes:
        sent: number of payload bytes.
        between_nodes: number of those bytes that left the node.
        rounds: number of rounds of messages.
        numbers: count of the numbers that this rank passed to collectives, by dtype.
        numbers_between_nodes: count of those passed to collectives that leave the node.
    """

    sent: float = 0.0
    between_nodes: float = 0.0
    rounds: int = 0
    numbers: Counter[torch.dtype] = field(default_factory=Counter)
    numbers_between_nodes: Counter[torch.dtype] = field(default_factory=Counter)


class Group:
    """The ranks that a hook averages over, and their collectives.

    Related groups are made from a group, which does not change, by `for_bucket`, `together_with`, `quiet`,
    `not_gradients`, `encoding` and `split`.

    Args:
        transport: sends tensors between ranks; `None` for a single process.
        counters: count the bytes; `None`: new counters.
        device: the device of the gradients.
        process_group: the process group of the same ranks, if there is one.
        connections: list to which the connections of subgroups are added.
        nodes: ranks by node, if they are known.
        global_rank: this process's rank among all processes, if it is not that of `torch.distributed`.
        are_alike: whether all ranks run in this process; then blocking calls have equal arguments on all ranks.
        everyone: all ranks, if the ranks of this group are nodes. A group of nodes does not count bytes, and all ranks
            agree on compiled codecs.

    Attributes:
        size: number of ranks.
        rank: this process's rank among them.
        global_rank: this process's rank among all processes.
        tally: counts of the current bucket.
        codec: the codec of `all_reduce_factors_`; `None`: factors are not encoded.
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
        everyone: Group | None = None,
    ) -> None:
        self._transport = transport
        self._process_group = process_group
        self.counters = counters if counters is not None else Counters()
        self.device = torch.device(device)
        self.size: int = transport.size if transport is not None else 1
        self.rank: int = transport.rank if transport is not None else 0
        self._nodes = nodes or []
        if everyone is not None:
            global_rank, are_alike = everyone.global_rank, everyone._are_alike
        elif global_rank is None:
            global_rank = dist.get_rank() if transport is not None and dist.is_initialized() else self.rank
        self.global_rank: int = global_rank
        self.tally = Tally()
        self._is_quiet = everyone is not None
        # Whether the numbers passed to collectives represent gradients, in whatever form.
        self._sends_gradients = True
        # If this is a subgroup: whether all subgroups have equally many ranks, and so wait equally often.
        self._is_uniform = True
        self._are_alike: bool = are_alike
        self._everyone = everyone
        self.codec: Codec | None = None
        # Number of the bucket that this group is for; `None`: work between buckets.
        self._number: int | None = None
        # Shared by all groups of the same ranks.
        self._connections = connections if connections is not None else []
        self._subgroups: dict[tuple[tuple[int, ...], ...], Group] = {}
        self._encoding: dict[Codec, Group] = {}
        self._kernels: dict[tuple[Codec, bool, bool], Kernels] = {}

    @classmethod
    def of(
        cls,
        own: groups.OwnGroup,
        counters: Counters | None,
        device: torch.device,
        connections: list[Connections] | None = None,
    ) -> Group:
        """Create a group for communication threads, and add its connections to `connections`; see above."""
        if connections is not None:
            connections.append(own.connections)
        return cls(own.transport, counters, device, own.process_group, connections)

    def _with(self, **changes: Any) -> Group:
        other = copy.copy(self)
        other.__dict__.update(changes)
        return other

    def for_bucket(self, number: int) -> Group:
        """Return a group of the same ranks, with its own tally, for the bucket of a rank-uniform number."""
        bucket = self._with(_number=number, tally=Tally())
        return bucket.together_with(bucket)

    def together_with(self, ranks: Group) -> Group:
        """Return a group of these ranks for the bucket of `ranks`, with the same tally as `ranks`."""
        transport = self._transport
        return self._with(
            _number=ranks._number,
            tally=ranks.tally,
            _is_quiet=self._is_quiet or ranks._is_quiet,
            _sends_gradients=self._sends_gradients and ranks._sends_gradients,
            _transport=None if transport is None else transport.channel(ranks._number or 0, ranks),
        )

    def quiet(self) -> Group:
        """Return a group of the same ranks that does not count bytes."""
        return self._with(_sends_gradients=False, _is_quiet=True)

    def not_gradients(self) -> Group:
        """Return a group of the same ranks for numbers that are not gradients, such as weights or factors of gradients.

        Their bytes are counted, but whatever their dtype, they do not count as gradient elements that were sent
        uncompressed: see `Counters.numel_uncompressed`.
        """
        return self._with(_sends_gradients=False)

    def all_gather_quietly(self, numbers: list[int]) -> list[list[int]]:
        """Return the numbers of each rank, without counting bytes. Blocks, and waits for the device."""
        if self._are_alike:
            return [list(numbers) for _ in range(self.size)]
        with self.counters.paused():
            return self.all_gather_numbers(numbers)

    def release(self) -> list[dist.ProcessGroup | None]:
        """Release the process group, so that its threads end when no other reference to it is left.

        Returns:
            the process groups of subgroups.
        """
        released: list[dist.ProcessGroup | None] = []
        for group in self._subgroups.values():
            released += [group._process_group, *group.release()]
        for group in self._encoding.values():
            group._process_group = group._transport = None
        self._subgroups.clear()
        self._process_group = self._transport = None
        return released

    def nodes(self) -> list[list[int]]:
        """Ranks by node, in order. Collective at the first call.

        Processes are on one node when they have the same host name and, from their launcher, the same node number.
        """
        if not self._nodes:
            number = next((os.environ[key] for key in _NODE_VARIABLES if key in os.environ), "0")
            digest = hashlib.blake2b(f"{socket.gethostname()} {number}".encode(), digest_size=7).digest()
            ids = [node for (node,) in self.all_gather_quietly([int.from_bytes(digest, "big")])]
            self._nodes = [[rank for rank, i in enumerate(ids) if i == node] for node in dict.fromkeys(ids)]
        return self._nodes

    def split(self, subgroups: Sequence[Sequence[int]]) -> Group:
        """Return this rank's subgroup, for the same bucket as this group and with the same tally.

        Collective at the first call with these subgroups, which must be in `CommHook.bind`.

        Args:
            subgroups: ranks of this group; each rank is in one subgroup.
        """
        key = tuple(tuple(ranks) for ranks in subgroups)
        return self if len(key) == 1 else self._subgroup(key)

    def for_averages_under_way(self) -> Group:
        """Return a group of the same ranks for averages during training, in any order relative to other collectives.

        Collective at the first call, which must be in `CommHook.bind`.
        """
        return self if self.size == 1 else self._subgroup((tuple(range(self.size)),))

    def _subgroup(self, key: tuple[tuple[int, ...], ...]) -> Group:
        if key not in self._subgroups:
            self._subgroups[key] = self._made(key, next(ranks for ranks in key if self.rank in ranks))
        return self._subgroups[key] if self._number is None else self._subgroups[key].together_with(self)

    def _made(self, subgroups: tuple[tuple[int, ...], ...], own: tuple[int, ...]) -> Group:
        assert self._transport is not None
        nodes = ([i for i, rank in enumerate(own) if rank in node] for node in self._nodes)
        transport, process_group = self._transport.among(own, len(self._subgroups) + 1), None
        if transport is None:
            # All ranks take part in making groups, including a rank that is alone in its subgroup.
            name = self.all_gather_quietly([random.SystemRandom().getrandbits(62)])[0][0]
            made = groups.own_subgroup(self.process_group, subgroups, str(name), self.device)
            self._connections.append(made.connections)
            transport, process_group = made.transport, made.process_group
        group = Group(
            transport,
            self.counters,
            self.device,
            process_group,
            self._connections,
            nodes=[node for node in nodes if node],
            global_rank=self.global_rank,
            are_alike=self._are_alike,
        )
        group._is_uniform = self._is_uniform and len({len(ranks) for ranks in subgroups}) == 1
        return group

    def encoding(self, codec: Codec) -> Group:
        """Return a group of the same ranks that encodes factors. Collective at the first call with that codec."""
        if codec not in self._encoding:
            self.kernels(codec, feedback=False, two_shot=True)
            self._encoding[codec] = self._with(codec=codec)
        return self._encoding[codec] if self._number is None else self._encoding[codec].together_with(self)

    @property
    def latency(self) -> float:
        """Seconds that a message takes between ranks that are far from each other; 0: they are near."""
        return 0.0 if self._transport is None else self._transport.latency

    @property
    def is_ordered(self) -> bool:
        """Whether all ranks have to begin collectives in the same order, including those of different buckets."""
        return self._transport is not None and self._transport.is_ordered

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group; to PyTorch, `None` would mean all processes.

        Raises:
            RuntimeError: there is none, or it was released.
        """
        if self._process_group is None:
            if self._transport is None:
                raise RuntimeError("the process group of this communication hook is gone: the hook was closed")
            raise RuntimeError("these ranks have no process group: they are a subgroup, or emulated")
        return self._process_group

    def finish(self, steps: Steps[T]) -> T:
        """Run a computation to its end in this thread, and measure the time of its waits."""
        return finish(steps, nullcontext if self.counters.is_evaluating else self.counters.timing.comm)

    def ring_bytes(self, tensor: Tensor) -> float:
        """Payload bytes that each rank sends in a ring all-reduce of `tensor`."""
        return 2 * (self.size - 1) / self.size * tensor.nbytes

    def inter_node_share(self, kind: Kind = "all_reduce", around_ring: bool | None = None) -> float:
        """Return the fraction of a collective's bytes that leave the sending rank's node, averaged over ranks.

        It is 0 as long as the nodes are not known.

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

    def all_reduce_coalesced_(self, tensors: Sequence[Tensor]) -> Steps[None]:
        """Replace each tensor by its sum over ranks, with one collective per dtype.

        Args:
            tensors: contiguous tensors on one device, in the same order on every rank; empty ones are allowed.
        """
        by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for tensor in tensors:
            by_dtype[tensor.dtype].append(tensor.view(-1))
        sums = [
            (flats, self.all_reduce_(flats[0] if len(flats) == 1 else torch.cat(flats))) for flats in by_dtype.values()
        ]
        if len(sums) > 1:
            sums = [(flats, begun(steps)) for flats, steps in sums]
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
        """Announce an `all_gather` of tensors like this one before this rank's is ready; this saves a round trip."""
        return None if self._transport is None or self.size == 1 else self._transport.expect(like)

    def all_gather_numbers(self, numbers: list[int], dtype: torch.dtype = torch.int64) -> list[list[int]]:
        """Return the numbers of each rank, sent in that dtype. Blocks, and waits for the device."""
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
        """Return the sum over ranks of this rank's row of `chunks`, shape `(w, n)`: a new tensor of shape `(n,)`.

        NCCL sums in the dtype of `chunks`. On CPU, and with `in_float32`, the chunks are sent in an all-to-all and
        summed here in at least float32: gloo's own reduce-scatter is an all-reduce that throws most of its result away.
        """
        transport = self._transport
        if in_float32 or not chunks.is_cuda or self.size == 1 or not isinstance(transport, Backend):
            dtype = torch.promote_types(chunks.dtype, torch.float32)
            return (yield from self.all_to_all(chunks)).sum(dim=0, dtype=dtype)
        num_bytes = (self.size - 1) / self.size * chunks.nbytes
        steps = transport.sum_share(chunks)
        return (yield from self._counted("reduce_scatter", chunks, num_bytes, self.size - 1, steps))

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

        Rounds that several collectives for one bucket take at the same time are counted once.
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

    def num_owners(self, two_shot: bool = True) -> int:
        """Return the number of equal shares in `average_encoded_`: 1 if each rank sends everything to every other."""
        return self.size if two_shot and self.size > 2 else 1

    def kernels(self, codec: Codec, *, feedback: bool, two_shot: bool) -> Kernels:
        """Return the functions that run a codec in this group, compiled if that works on all ranks.

        Collective at the first call with these arguments.

        Args:
            codec: the codec.
            feedback: whether there is error feedback.
            two_shot: see `average_encoded_`.
        """
        key = codec, feedback, two_shot
        if key not in self._kernels:
            num_payloads, owners = self._num_payloads(two_shot), self.num_owners(two_shot)
            own: Kernels | None = Kernels(codec)
            if self.size > 1:
                own = compiled(codec, self.device, num_payloads, feedback, owners, self.rank == 0)
            # A compiled function may round sums differently, so all ranks compile it or none does.
            asked = self._everyone or self
            everywhere = all(is_compiled for (is_compiled,) in asked.all_gather_quietly([int(own is not None)]))
            self._kernels[key] = own if own is not None and everywhere else Kernels(codec)
        return self._kernels[key]

    def _num_payloads(self, two_shot: bool) -> set[int]:
        """Return the numbers of payloads that may be decoded together."""
        return {self.size} if self.num_owners(two_shot) == 1 else {self.size, 1}

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
        finite = []
        means = yield from self._begin_averages(chunks, kernels, way_in, two_shot)
        for chunk, steps in zip(chunks, means, strict=True):
            factor = way_out if chunk.residual is not None else one
            finite.append(kernels.decode_mean((yield from steps), factor, chunk.numbers))
        return torch.stack(finite).all()

    def average_tensors_encoded_(self, tensors: Sequence[Tensor], kernels: Kernels) -> Steps[None]:
        """Replace tensors by their means over ranks, without error feedback: see `average_encoded_`.

        Args:
            tensors: tensors of one floating-point dtype, with the same shapes on every rank. Each begins a block.
            kernels: the kernels of this group for a codec with a block size.
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
        pieces = flat.split(max(unit, CHUNK_NUMEL // unit * unit))
        yield from self.average_encoded_([Chunk(piece.view(-1, size), None, seed=0) for piece in pieces], kernels)
        for tensor, place in zip(tensors, places, strict=True):
            tensor.copy_(place[: tensor.numel()].view(tensor.shape))

    def all_reduce_factors_(self, exact: Sequence[Tensor], factors: Sequence[Tensor]) -> Steps[None]:
        """Replace each tensor by its sum over ranks; encode `factors` on the way if this group has a codec.

        Args:
            exact: as in `all_reduce_coalesced_`.
            factors: floating-point tensors whose errors the algorithm compensates, as error feedback does. Those that
                do not fill a block are not encoded.
        """
        factors_too = self.not_gradients()
        for tensor in exact if self.size > 1 else ():
            self._note("all_reduce", tensor)
        if self.codec is None or self.size == 1:
            yield from factors_too.all_reduce_coalesced_([*exact, *factors])
            return
        kernels = self.kernels(self.codec, feedback=False, two_shot=True)
        large = [factor for factor in factors if kernels.fills_block(factor)]
        small = [factor for factor in factors if not kernels.fills_block(factor)]
        sums = begun(factors_too.all_reduce_coalesced_([*exact, *small]))
        yield from self.average_tensors_encoded_(large, kernels)
        for factor in large:
            factor.mul_(self.size)
        yield from sums

    def _begin_averages(
        self, chunks: Sequence[Chunk], kernels: Kernels, factor: Tensor, two_shot: bool
    ) -> Steps[list[Steps[Tensor]]]:
        """Begin to average chunks: each is encoded while the previous ones are in flight.

        Returns:
            the rest of the computation for each chunk, which returns payloads, shape `(k, b, bytes of a block)`. Their
            mean is the average.
        """
        if self.num_owners(two_shot) == 1:
            return [
                begun(self._gather_payloads(chunk, self.size, self._encoded(chunk, kernels, factor)))
                for chunk in chunks
            ]
        shots = []
        for chunk in chunks:
            payload = self._encoded(chunk, kernels, factor).view(self.size, -1)
            shots.append((begun(self.all_to_all(payload)), self.expect_all_gather(payload[0])))
        means = []
        for chunk, (first_shot, expected) in zip(chunks, shots, strict=True):
            share = self._encoded_mean(chunk, kernels, (yield from first_shot))
            means.append(begun(self._gather_payloads(chunk, 1, share, expected)))
        return means

    def _gather_payloads(self, chunk: Chunk, num: int, own: Tensor, expected: object = None) -> Steps[Tensor]:
        return (yield from self.all_gather(own, expected)).view(num, chunk.numbers.shape[0], -1)

    def _encoded(self, chunk: Chunk, kernels: Kernels, factor: Tensor) -> Tensor:
        seed = kernels.seed(chunk.seed, self.device)
        return kernels.encode(chunk.numbers, chunk.residual, factor, seed).view(-1)

    def _encoded_mean(self, chunk: Chunk, kernels: Kernels, arrived: Tensor) -> Tensor:
        """Return this rank's share of the mean, encoded for the second shot."""
        b, s = chunk.numbers.shape
        one = chunk.numbers.new_ones(())
        mean = chunk.numbers.new_empty((b // self.size, s))
        kernels.decode_mean(arrived.view(self.size, b // self.size, -1), one, mean)
        seed = kernels.seed(chunk.seed + 2**30, self.device)
        own = None if chunk.residual is None else chunk.residual.view(self.size, b // self.size, s)[self.rank]
        # Times the number of ranks, by which the next mean divides it.
        return kernels.encode_mean(mean, own, one * self.size, seed).view(-1)


@contextmanager
def counted(gradients: Tensor, ranks: Group, dense: float = 0.0) -> Iterator[None]:
    """Count the gradient elements that a hook sends within a `with`: see `Counters.numel_uncompressed`.

    Args:
        gradients: the flat gradients of one bucket, or the values of a sparse gradient.
        ranks: the collectives that the hook gets.
        dense: bytes that an all-reduce of the same gradients sends, to count as well.
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
        as_they_are = sum(num for form, num in given.items() if _is_as_precise(form, dtype))
        counters.numel_uncompressed += min(numel, as_they_are)
        counters.numel_compressed += max(0, numel - as_they_are)


def _is_as_precise(form: torch.dtype, dtype: torch.dtype) -> bool:
    are_floating_point = form.is_floating_point and dtype.is_floating_point
    return form == dtype or (are_floating_point and form.itemsize >= dtype.itemsize)
