"""The ranks of a hook: collectives, averages that are encoded on the way, and groups of some of them."""

from __future__ import annotations

import copy
import hashlib
import os
import random
import socket
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_commhooks.codecs.codec import Codec, Kernels, compiled
from lightning_commhooks.collectives import process_groups as groups
from lightning_commhooks.collectives.chunk import CHUNK_NUMEL, Chunk
from lightning_commhooks.collectives.communicator import Communicator, Tally, Transport
from lightning_commhooks.collectives.counters import Counters
from lightning_commhooks.collectives.gloo_abort import Connections
from lightning_commhooks.collectives.steps import Steps, begun

# Number of this process's node, as Lightning and Ray, torchrun, and SLURM tell it.
_NODE_VARIABLES = ("NODE_RANK", "GROUP_RANK", "SLURM_NODEID")


class Group(Communicator):
    """The ranks that a hook averages over; collectives as of `Communicator`.

    Args:
        transport: how tensors get from rank to rank; `None` for a single process.
        counters: where bytes are counted.
        device: where the gradients are.
        process_group: of the same ranks, if there is one.
        connections: where process groups that are made for subgroups leave theirs.
    """

    def __init__(
        self,
        transport: Transport | None,
        counters: Counters | None = None,
        device: torch.device | str = "cpu",
        process_group: dist.ProcessGroup | None = None,
        connections: list[Connections] | None = None,
    ) -> None:
        super().__init__(transport, counters, device, process_group)
        self._connections = connections if connections is not None else []
        # Shared by the same ranks in all channels.
        self._subgroups: dict[tuple[tuple[int, ...], ...], Group] = {}
        self._kernels: dict[tuple[Codec, bool, bool], Kernels] = {}
        # What `all_reduce_factors_` encodes by, and the same ranks with a codec.
        self._codec: Codec | None = None
        self._encoding: dict[Codec, Group] = {}
        # Whether this is for one bucket, and its number.
        self._is_channel, self._number = False, 0
        # Whether all ranks are in this process, so that they agree on what they agree on by blocking calls.
        self._are_alike = False
        # All ranks, for what ranks of one node may disagree on; see `nodes_as_ranks`.
        self._everyone: Group | None = None

    @classmethod
    def of(
        cls,
        own: groups.OwnGroup,
        counters: Counters | None,
        device: torch.device,
        connections: list[Connections] | None = None,
    ) -> Group:
        """The ranks of a group for communication threads, whose connections are left in `connections`; see above."""
        if connections is not None:
            connections.append(own.connections)
        return cls(own.transport, counters, device, own.process_group, connections)

    def channel(self, number: int) -> Group:
        """The same ranks for the bucket of that number, equal on all of them, with a tally of its own."""
        bucket = copy.copy(self)
        bucket._is_channel, bucket._number, bucket.tally = True, number, Tally()
        return self.on(bucket)

    def on(self, ranks: Group) -> Group:
        """These ranks in the channel of the bucket that `ranks` are for: they count together."""
        own = copy.copy(self)
        own._is_channel, own._number, own.tally = ranks._is_channel, ranks._number, ranks.tally
        own._is_quiet = self._is_quiet or ranks._is_quiet
        own._sends_gradients = self._sends_gradients and ranks._sends_gradients
        if self._transport is not None:
            own._transport = self._transport.channel(ranks._number, ranks)
        return own

    def quiet(self) -> Group:
        """The same ranks; what they send is not counted."""
        own = self.not_gradients()
        own._is_quiet = True
        return own

    def not_gradients(self) -> Group:
        """The same ranks, for numbers that are no gradients, such as weights, or factors of gradients.

        Their bytes are counted, but they do not count as gradient elements that were sent as they are, whatever their
        dtype: see `Counters.numel_uncompressed`.
        """
        own = copy.copy(self)
        own._sends_gradients = False
        return own

    def all_gather_quietly(self, numbers: list[int]) -> list[list[int]]:
        """The numbers of each rank; not counted. Blocks, and waits for the device."""
        if self._are_alike:
            return [list(numbers) for _ in range(self.size)]
        with self.counters.paused():
            return self.all_gather_numbers(numbers)

    def release(self) -> list[dist.ProcessGroup | None]:
        """Let go of the process group, so that its threads end when nobody else has it.

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

        Processes are on one node when they have the same host name and their launcher says so.
        """
        if not self._nodes:
            number = next((os.environ[key] for key in _NODE_VARIABLES if key in os.environ), "0")
            digest = hashlib.blake2b(f"{socket.gethostname()} {number}".encode(), digest_size=7).digest()
            ids = [node for (node,) in self.all_gather_quietly([int.from_bytes(digest, "big")])]
            self._nodes = [[rank for rank, i in enumerate(ids) if i == node] for node in dict.fromkeys(ids)]
        return self._nodes

    def split(self, subgroups: Sequence[Sequence[int]]) -> Group:
        """This rank's subgroup, in the channel of this group, with which it counts bytes together.

        Collective when these subgroups are asked for the first time, which is in `CommHook.bind`.

        Args:
            subgroups: ranks of this group; each rank is in one subgroup.
        """
        key = tuple(tuple(ranks) for ranks in subgroups)
        return self if len(key) == 1 else self._subgroup(key)

    def beside(self) -> Group:
        """The same ranks for what goes on beside training, in whatever order it does so with the rest.

        Collective when this is asked for the first time, which is in `CommHook.bind`.
        """
        return self if self.size == 1 else self._subgroup((tuple(range(self.size)),))

    def _subgroup(self, key: tuple[tuple[int, ...], ...]) -> Group:
        if key not in self._subgroups:
            own = next(ranks for ranks in key if self.rank in ranks)
            group = self._split(key, own)
            group.global_rank = self.global_rank
            nodes = ([i for i, rank in enumerate(own) if rank in node] for node in self._nodes)
            group._nodes = [node for node in nodes if node]
            group._is_uniform = self._is_uniform and len({len(ranks) for ranks in key}) == 1
            self._subgroups[key] = group
        return self._subgroups[key].on(self) if self._is_channel else self._subgroups[key]

    def _split(self, subgroups: tuple[tuple[int, ...], ...], own: tuple[int, ...]) -> Group:
        assert self._transport is not None
        among = self._transport.among(own, len(self._subgroups) + 1)
        if among is not None:
            group = Group(among, self.counters, self.device)
            group._are_alike = self._are_alike
            return group
        # All ranks take part in making groups, also those that are alone.
        name = self.all_gather_quietly([random.SystemRandom().getrandbits(62)])[0][0]
        made = groups.own_subgroup(self.process_group, subgroups, str(name), self.device)
        return Group.of(made, self.counters, self.device, self._connections)

    def encoding(self, codec: Codec) -> Group:
        """The same ranks, with `all_reduce_factors_` encoding. Collective when that codec is asked for first."""
        if codec not in self._encoding:
            group = copy.copy(self)
            group._codec = codec
            group.kernels(codec, feedback=False, two_shot=True)
            self._encoding[codec] = group
        return self._encoding[codec].on(self) if self._is_channel else self._encoding[codec]

    def num_owners(self, two_shot: bool = True) -> int:
        """Into how many equal shares `average_encoded_` cuts numbers: 1 if all ranks send all to each other."""
        return self.size if two_shot and self.size > 2 else 1

    def kernels(self, codec: Codec, *, feedback: bool, two_shot: bool) -> Kernels:
        """Functions that run a codec in this group, compiled if that works on all ranks.

        Collective when this is asked for the first time.

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
            # Sums of a compiled function may be rounded in another way.
            asked = self._everyone or self
            everywhere = all(is_compiled for (is_compiled,) in asked.all_gather_quietly([int(own is not None)]))
            self._kernels[key] = own if own is not None and everywhere else Kernels(codec)
        return self._kernels[key]

    def _num_payloads(self, two_shot: bool) -> set[int]:
        """How many payloads are decoded together."""
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
        """Replace the numbers of each chunk by their mean over ranks, encoded on the way, equal on all ranks.

        Two-shot, as CGX (Markov et al. 2022, https://arxiv.org/abs/2111.08617) and ZeRO++ (Wang et al. 2023,
        https://arxiv.org/abs/2306.10209, section 3.3) do it: each rank receives its share of all chunks from the
        others, sums it in at least float32, encodes the mean and sends it to all; 2(w-1)/w of the encoded size. Two
        ranks send all to each other instead, the same bytes and one rounding less. Encoding and decoding of one chunk
        go on while others are under way.

        Args:
            chunks: the same on every rank.
            kernels: of this group.
            loss_scale: what numbers are divided by before they are added to the residual, and the mean multiplied by.
            scale: what numbers are multiplied by, those with error feedback only.
            two_shot: whether there are two; if not, each rank sends all to all others, (w-1) times the encoded size.

        Returns:
            whether all means are finite before they are multiplied, boolean, one element.
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
            tensors: of one floating-point dtype; each begins a block. Same shapes on every rank.
            kernels: of this group, of a codec with a block size.
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
        """Replace each tensor by its sum over ranks; `factors` encoded on the way, if this group has a codec.

        Args:
            exact: as in `all_reduce_coalesced_`.
            factors: floating-point tensors whose errors the algorithm makes up for, as error feedback does. Those that
                do not fill a block are not encoded.
        """
        factors_too = self.not_gradients()
        for tensor in exact if self.size > 1 else ():
            self._note("all_reduce", tensor)
        if self._codec is None or self.size == 1:
            yield from factors_too.all_reduce_coalesced_([*exact, *factors])
            return
        kernels = self.kernels(self._codec, feedback=False, two_shot=True)
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
        """Begin to average chunks, each as soon as there is the next one.

        Returns:
            the rest for each: gives payloads, shape `(k, b, bytes of a block)`, of which the chunk is the mean.
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
        """The second shot: this rank's share of the mean."""
        b, s = chunk.numbers.shape
        one = chunk.numbers.new_ones(())
        mean = chunk.numbers.new_empty((b // self.size, s))
        kernels.decode_mean(arrived.view(self.size, b // self.size, -1), one, mean)
        seed = kernels.seed(chunk.seed + 2**30, self.device)
        own = None if chunk.residual is None else chunk.residual.view(self.size, b // self.size, s)[self.rank]
        # Times the number of ranks, of which the next mean will be one part.
        return kernels.encode_mean(mean, own, one * self.size, seed).view(-1)
