"""What a hook may do with its ranks: collectives, averages that are encoded on the way, and groups of some of them."""

from __future__ import annotations

import copy
import hashlib
import os
import random
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_commhooks.codecs.codec import Codec, Kernels, compiled
from lightning_commhooks.collectives import process_groups as groups
from lightning_commhooks.collectives.chunk import CHUNK_NUMEL, Chunk
from lightning_commhooks.collectives.communicator import Communicator, Wait
from lightning_commhooks.collectives.counters import Counters
from lightning_commhooks.collectives.direct import Direct

# Number of this process's node, as Lightning and Ray, torchrun, and SLURM tell it.
_NODE_VARIABLES = ("NODE_RANK", "GROUP_RANK", "SLURM_NODEID")


@dataclass
class _FirstShot:
    """What the ranks send to the owners of shares.

    Attributes:
        payload: this rank's, shape `(w, n)`.
        arriving: waits for its share of all.
        send_mean: begins the second shot.
    """

    payload: Tensor
    arriving: Wait
    send_mean: Callable[[Tensor, Callable[[], Tensor] | None], Wait]


class Group(Communicator):
    """The ranks that a hook averages over; collectives as of `Communicator`.

    Args:
        process_group: the ranks that average gradients together; `None` for a single process.
        counters: where bytes are counted.
        device: where the gradients are.
        aborts: where groups that are split off leave a function that aborts them.
        transport: by what CPU tensors go between far ranks, if not by gloo's own collectives.
        lanes: the process group of each thread, if several communicate beside each other.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        counters: Counters | None = None,
        device: torch.device | str = "cpu",
        aborts: list[Callable[[], None]] | None = None,
        transport: Direct | None = None,
        lanes: Sequence[dist.ProcessGroup] = (),
    ) -> None:
        super().__init__(process_group, counters, device, transport, lanes)
        self._aborts = aborts if aborts is not None else []
        self._split_off: dict[tuple[tuple[int, ...], ...], Group] = {}
        # What `all_reduce_factors_` encodes by, and the same ranks with a codec.
        self._codec: Codec | None = None
        self._encoding: dict[Codec, Group] = {}
        self._kernels: dict[tuple[Codec, bool, bool], Kernels] = {}

    @classmethod
    def of(
        cls,
        own: groups.OwnGroup,
        counters: Counters | None,
        device: torch.device,
        aborts: list[Callable[[], None]] | None = None,
    ) -> Group:
        """The ranks of a group for communication threads. Leaves what aborts it in `aborts`; arguments as above."""
        if aborts is not None:
            aborts.append(own.abort)
        return cls(own.process_group, counters, device, aborts, own.transport, own.lanes)

    def release(self) -> list[dist.ProcessGroup | None]:
        """Let go of the process group, so that its threads end when nobody else has it.

        Returns:
            the process groups of the groups that were split off.
        """
        released: list[dist.ProcessGroup | None] = []
        for group in self._split_off.values():
            released += [group._process_group, *group.release()]
        self._split_off.clear()
        for group in self._encoding.values():
            released += group.release()
        self._process_group = self._transport = None
        self._lanes = ()
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
        """This rank's subgroup, which counts bytes together with this group.

        Collective when these subgroups are asked for the first time.

        Args:
            subgroups: ranks of this group; each rank is in one subgroup.
        """
        key = tuple(tuple(ranks) for ranks in subgroups)
        if len(key) == 1:
            return self
        if key not in self._split_off:
            own = next(ranks for ranks in key if self.rank in ranks)
            group = self._split(key)
            group.global_rank = self.global_rank
            nodes = ([i for i, rank in enumerate(own) if rank in node] for node in self._nodes)
            group._nodes = [node for node in nodes if node]
            self._split_off[key] = group
        return self._split_off[key]

    def _split(self, subgroups: tuple[tuple[int, ...], ...]) -> Group:
        # All ranks take part in making groups, also those that are alone.
        name = self.all_gather_quietly([random.SystemRandom().getrandbits(62)])[0][0]
        own = groups.own_subgroup(self.process_group, subgroups, str(name), self.device, self.num_lanes > 1)
        return Group.of(own, self.counters, self.device, self._aborts)

    def encoding(self, codec: Codec) -> Group:
        """The same ranks, with `all_reduce_factors_` encoding; counts bytes together with this group. Collective."""
        if codec not in self._encoding:
            group = copy.copy(self)
            group._codec, group._encoding = codec, {}
            group.kernels(codec, feedback=False, two_shot=True)
            self._encoding[codec] = group
        return self._encoding[codec]

    def num_owners(self, two_shot: bool = True) -> int:
        """Into how many equal shares `average_encoded_` cuts numbers: 1 if all ranks send all to each other."""
        return self.size if two_shot and self.size > 2 else 1

    def kernels(self, codec: Codec, *, feedback: bool, two_shot: bool) -> Kernels:
        """What runs a codec in this group, compiled if that works on all ranks.

        Collective when this is asked for the first time.

        Args:
            codec: the codec.
            feedback: whether there is error feedback.
            two_shot: see `average_encoded_`.
        """
        key = codec, feedback, two_shot
        if key not in self._kernels:
            num_payloads, owners = self._num_payloads(two_shot), self.num_owners(two_shot)
            own = compiled(codec, self.device, num_payloads, feedback, owners, self.rank == 0)
            # Sums of a compiled function may be rounded in another way.
            everywhere = all(is_compiled for (is_compiled,) in self.all_gather_quietly([int(own is not None)]))
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
    ) -> Tensor:
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
        waits = self._begin_averages(chunks, kernels, way_in, two_shot)
        for chunk, wait in zip(chunks, waits, strict=True):
            factor = way_out if chunk.residual is not None else one
            finite.append(kernels.decode_mean(wait(), factor, chunk.numbers))
        return torch.stack(finite).all()

    def average_tensors_encoded_(self, tensors: Sequence[Tensor], kernels: Kernels) -> None:
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
        self.average_encoded_([Chunk(piece.view(-1, size), None, seed=0) for piece in pieces], kernels)
        for tensor, place in zip(tensors, places, strict=True):
            tensor.copy_(place[: tensor.numel()].view(tensor.shape))

    def all_reduce_factors_(self, exact: Sequence[Tensor], factors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over ranks; `factors` encoded on the way, if this group has a codec.

        Args:
            exact: as in `all_reduce_coalesced_`.
            factors: floating-point tensors whose errors the algorithm makes up for, as error feedback does. Those that
                do not fill a block are not encoded.
        """
        if self._codec is None or self.size == 1:
            self.all_reduce_coalesced_([*exact, *factors])
            return
        kernels = self.kernels(self._codec, feedback=False, two_shot=True)
        large = [factor for factor in factors if kernels.fills_block(factor)]
        small = [factor for factor in factors if not kernels.fills_block(factor)]
        finish = self.begin_all_reduce_coalesced_([*exact, *small])
        self.average_tensors_encoded_(large, kernels)
        for factor in large:
            factor.mul_(self.size)
        finish()

    def _begin_averages(
        self, chunks: Sequence[Chunk], kernels: Kernels, factor: Tensor, two_shot: bool
    ) -> list[Callable[[], Tensor]]:
        """Begin to average chunks, each as soon as there is the next one.

        Returns:
            what waits for the payloads of one, shape `(k, b, bytes of a block)`, of which it is the mean.
        """
        if self.num_owners(two_shot) == 1:
            gathers = [(chunk, self._begin_all_gather(self._encoded(chunk, kernels, factor))) for chunk in chunks]
            return [_payloads(wait, self.size, chunk) for chunk, wait in gathers]
        shots = [(chunk, self._send_to_owners(chunk, kernels, factor)) for chunk in chunks]
        return [_payloads(self._send_mean(chunk, kernels, shot), 1, chunk) for chunk, shot in shots]

    def _encoded(self, chunk: Chunk, kernels: Kernels, factor: Tensor) -> Tensor:
        seed = kernels.seed(chunk.seed, self.device)
        return kernels.encode(chunk.numbers, chunk.residual, factor, seed).view(-1)

    def _send_to_owners(self, chunk: Chunk, kernels: Kernels, factor: Tensor) -> _FirstShot:
        payload = self._encoded(chunk, kernels, factor).view(self.size, -1)
        arriving = self._begin_all_to_all(payload)
        return _FirstShot(payload, arriving, self._expect_all_gather(payload[0]))

    def _send_mean(self, chunk: Chunk, kernels: Kernels, shot: _FirstShot) -> Wait:
        """The second shot: this rank's share of the mean."""
        b, s = chunk.numbers.shape
        one = chunk.numbers.new_ones(())
        mean = chunk.numbers.new_empty((b // self.size, s))
        kernels.decode_mean(shot.arriving().view(self.size, b // self.size, -1), one, mean)
        seed = kernels.seed(chunk.seed + 2**30, self.device)
        own = None if chunk.residual is None else chunk.residual.view(self.size, b // self.size, s)[self.rank]
        # Times the number of ranks, of which the next mean will be one part.
        share = kernels.encode_mean(mean, own, one * self.size, seed).view(-1)
        # The mean of what equal ranks send is what each of them sends.
        return shot.send_mean(share, shot.payload.clone)


def _payloads(wait: Wait, num: int, chunk: Chunk) -> Callable[[], Tensor]:
    """Wait for payloads of a chunk, shape `(num, b, bytes)`."""
    rows = chunk.numbers.shape[0]
    return lambda: wait().view(num, rows, -1)
