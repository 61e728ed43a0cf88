"""The collectives that a hook may use, with a count of the bytes each of them sends.

Public ones block: on CPU tensors they return when the result is there, on NCCL they block the current
stream only. Counts are payload bytes sent by this rank under the usual bandwidth-optimal algorithms
(Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH"): ring all-reduce
2(w-1)/w of the payload, ring all-gather w-1 times the rank's part, all-to-all (w-1)/w of the payload.
"""

from __future__ import annotations

import hashlib
import os
import random
import socket
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_commhooks.codecs.codec import Codec
from lightning_commhooks.collectives import process_groups as groups
from lightning_commhooks.collectives.counters import Counters
from lightning_commhooks.collectives.encoded import EncodedCollectives

# Number of this process's node, as Lightning, torchrun and SLURM tell it.
_NODE_VARIABLES = ("NODE_RANK", "GROUP_RANK", "SLURM_NODEID")


class Group(EncodedCollectives):
    """Collectives over one process group.

    Args:
        process_group: the ranks that average gradients together; `None` for a single process.
        counters: where bytes are counted.
        device: where the gradients are.
        aborts: where groups that are split off leave a function that aborts them.
        codec: what `all_reduce_factors_` encodes by; `None`: nothing.

    Attributes:
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
        aborts: list[Callable[[], None]] | None = None,
        codec: Codec | None = None,
    ) -> None:
        super().__init__(codec)
        self._process_group = process_group
        self.counters = counters if counters is not None else Counters()
        self.device = torch.device(device)
        self.size: int = process_group.size() if process_group is not None else 1
        self.rank: int = process_group.rank() if process_group is not None else 0
        self.global_rank: int = dist.get_rank() if process_group is not None else 0
        self._aborts = aborts if aborts is not None else []
        self._parts: dict[tuple[tuple[int, ...], ...], Group] = {}
        self._nodes: list[list[int]] = []
        self._encoding: dict[Codec, Group] = {}

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group; to PyTorch, `None` would mean all processes.

        Raises:
            RuntimeError: there is none, or it was released.
        """
        if self._process_group is None:
            raise RuntimeError(self._why_no_process_group)
        return self._process_group

    def release(self) -> list[dist.ProcessGroup | None]:
        """Let go of the process group, so that its threads end when nobody else has it.

        Returns:
            the process groups of the parts that were split off.
        """
        parts = [part._process_group for part in self._parts.values() if part is not self]
        for part in self._parts.values():
            part._process_group = None
        self._parts.clear()
        for group in self._encoding.values():
            parts += group.release()
        self._process_group = None
        return parts

    def nodes(self) -> list[list[int]]:
        """Ranks by node, in order. Collective at the first call.

        Processes are on one node when they have the same host name and their launcher says so.
        """
        if not self._nodes:
            number = next((os.environ[key] for key in _NODE_VARIABLES if key in os.environ), "0")
            digest = hashlib.blake2b(f"{socket.gethostname()} {number}".encode(), digest_size=7).digest()
            own = torch.tensor([int.from_bytes(digest, "big")], device=self.device)
            with self.counters.paused():
                ids = self.all_gather(own).view(-1).tolist()
            self._nodes = [[rank for rank, i in enumerate(ids) if i == node] for node in dict.fromkeys(ids)]
        return self._nodes

    def split(self, parts: Sequence[Sequence[int]]) -> Group:
        """The same collectives among the ranks of one part. Collective when these parts are asked for the first time.

        Args:
            parts: ranks of this group; each rank is in one part.

        Returns:
            this rank's part, which counts bytes together with this group.
        """
        key = tuple(tuple(part) for part in parts)
        if key not in self._parts:
            self._parts[key] = self._split(key)
        return self._parts[key]

    def _split(self, parts: tuple[tuple[int, ...], ...]) -> Group:
        if len(parts) == 1:
            return self
        with self.counters.paused():
            name = self.all_gather(torch.tensor([random.SystemRandom().getrandbits(62)], device=self.device))[0].item()
        # All ranks take part in making groups, also those that are alone.
        own, abort = groups.part_of(self.process_group, parts, str(name), self.device)
        self._aborts.append(abort)
        part = Group(own, self.counters, self.device)
        part.global_rank = self.global_rank
        return part

    def ring_bytes(self, tensor: Tensor) -> float:
        """Payload bytes that each rank sends in a ring all-reduce of `tensor`."""
        return 2 * (self.size - 1) / self.size * tensor.numel() * tensor.element_size()

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """Replace a contiguous `tensor` by its sum over ranks, bit-identical on all of them."""
        if self.size > 1 and tensor.numel():
            self._count(self.ring_bytes(tensor))
            with self.counters.timing.comm():
                dist.all_reduce(tensor, group=self.process_group)
        return tensor

    def all_reduce_mean_(self, tensor: Tensor, scale: float | Tensor = 1.0) -> Tensor:
        """Replace a contiguous floating-point `tensor` by `scale` times its mean.

        Divides first, so that 16-bit sums fit.
        """
        return self.all_reduce_(tensor.div_(self.size / scale))

    def all_reduce_in_float32(self, half: Tensor) -> Tensor:
        """Sum over ranks of a 16-bit tensor, shape `(n,)`, in its dtype but rounded once only.

        Each rank receives its share from all others, sums it in float32 and sends the sum: an all-to-all and an
        all-gather, the same bytes as a ring all-reduce.
        """
        numel = half.numel()
        # Every rank has an equal share.
        padded = half.new_zeros(-(-numel // self.size) * self.size)
        padded[:numel] = half
        chunks = padded.view(self.size, -1)
        share = self.all_to_all(chunks).sum(dim=0, dtype=torch.float32)
        return self._start_gather_shares(share.to(half.dtype), lambda: chunks * self.size)().view(-1)[:numel]

    def encoding(self, codec: Codec) -> Group:
        """The same ranks, with `all_reduce_factors_` encoding; counts bytes together with this group. Collective."""
        if codec not in self._encoding:
            group = self._twin(codec)
            group.global_rank = self.global_rank
            group.kernels(codec, feedback=False, two_shot=True)
            self._encoding[codec] = group
        return self._encoding[codec]

    def _twin(self, codec: Codec) -> Group:
        return Group(self._process_group, self.counters, self.device, self._aborts, codec)

    def all_reduce_coalesced_(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over ranks, with one collective per dtype.

        Args:
            tensors: contiguous tensors on one device, in the same order on every rank; empty ones are allowed.
        """
        by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for tensor in tensors:
            by_dtype[tensor.dtype].append(tensor.view(-1))
        for parts in by_dtype.values():
            if len(parts) == 1:
                self.all_reduce_(parts[0])
                continue
            payload = self.all_reduce_(torch.cat(parts))
            for part, reduced in zip(parts, payload.split([p.numel() for p in parts]), strict=True):
                part.copy_(reduced)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Gather `tensor`, shape `(n,)`, equal on all ranks, into a new tensor of shape `(w, n)`."""
        return self._start_all_gather(tensor)()

    def all_gather_quietly(self, numbers: list[int]) -> list[list[int]]:
        """The numbers of each rank; not counted. Waits for the device."""
        with self.counters.paused():
            gathered: list[list[int]] = self.all_gather(torch.tensor(numbers, device=self.device)).tolist()
        return gathered

    def _start_all_gather(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Begin an `all_gather`; on CPU it goes on by itself. Returns what waits for the result."""
        gathered = tensor.new_empty((self.size, tensor.numel()))
        if self.size == 1:
            gathered.copy_(tensor.view(1, -1))
            return lambda: gathered
        self._count((self.size - 1) * tensor.numel() * tensor.element_size())
        if tensor.is_cuda:
            with self.counters.timing.comm():
                dist.all_gather_into_tensor(gathered, tensor.contiguous(), group=self.process_group)
            return lambda: gathered
        own = tensor.contiguous()
        work = dist.all_gather(list(gathered.unbind()), own, group=self.process_group, async_op=True)
        return lambda: self._finished(work, gathered)

    def _start_gather_shares(self, share: Tensor, of_equals: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Begin an `all_gather` of shares that each rank owns one of.

        Args:
            share: this rank's, shape `(n,)`.
            of_equals: what the result would be, shape `(w, n)`, if all ranks had what this one has.
        """
        return self._start_all_gather(share)

    def all_to_all(self, chunks: Tensor) -> Tensor:
        """Send row i of `chunks`, shape `(w, n)`, to rank i; row i of the result came from rank i."""
        return self._start_all_to_all(chunks)()

    def _start_all_to_all(self, chunks: Tensor) -> Callable[[], Tensor]:
        if self.size == 1:
            return lambda: chunks
        self._count((self.size - 1) / self.size * chunks.numel() * chunks.element_size())
        received = torch.empty_like(chunks)
        if chunks.is_cuda:
            with self.counters.timing.comm():
                dist.all_to_all_single(received, chunks, group=self.process_group)
            return lambda: received
        work = dist.all_to_all_single(received, chunks, group=self.process_group, async_op=True)
        return lambda: self._finished(work, received)

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
            torch.cat([part[:n] for part, n in zip(all_indices, num_entries, strict=True)]).t(),
            torch.cat([part[:n] for part, n in zip(all_values, num_entries, strict=True)]),
            grad.shape,
            check_invariants=False,  # said explicitly, or PyTorch warns that it does not check
        ).coalesce()

    def _count(self, num_bytes: float) -> None:
        self.counters.count(num_bytes)

    def _finished(self, work: dist.Work, result: Tensor) -> Tensor:
        with self.counters.timing.comm():
            work.wait()
        return result
