"""Collectives that leave each rank with its share of a sum."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_commhooks.codecs.codec import Kernels
from lightning_commhooks.codecs.ranges import named
from lightning_commhooks.collectives.backend import Backend, renamed
from lightning_commhooks.collectives.chunk import CHUNK_NUMEL
from lightning_commhooks.collectives.counters import Counters
from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.steps import begun


class ShardGroup(Group):
    """Collectives over the ranks among which a model is sharded. Those that leave shares block.

    Legend: row i of `chunks`, shape `(w, n)`, is for rank i.

    Args:
        process_group: the ranks.
        counters: where bytes are counted.
        device: where the gradients are.
    """

    def __init__(self, process_group: dist.ProcessGroup, counters: Counters, device: torch.device) -> None:
        super().__init__(Backend(process_group), counters, device, process_group)

    def shard_bytes(self, numel: int, itemsize: int) -> float:
        """Payload bytes that each rank sends in a reduce-scatter of `numel` elements of `itemsize` bytes."""
        return (self.size - 1) / self.size * numel * itemsize

    def reduce_scatter(self, chunks: Tensor) -> Tensor:
        """Sum over ranks of this rank's row, shape `(n,)`.

        On CUDA in the dtype of `chunks`. On CPU in at least float32: gloo's own reduce-scatter is an all-reduce that
        throws most of its result away, so this is an all-to-all, which sends half of it.
        """
        if not chunks.is_cuda or self.size == 1:
            return self.reduce_scatter_in_float32(chunks)
        num_bytes = self.shard_bytes(chunks.numel(), chunks.element_size())
        self.counters.count(num_bytes, num_bytes * self.leaving())
        total = chunks.new_empty(chunks.shape[1])
        reduce_scatter = renamed("reduce_scatter_tensor", "reduce_scatter_single")
        with named("reduce_scatter"):
            reduce_scatter(total, chunks.view(-1), group=self.process_group)
        return total

    def reduce_scatter_in_float32(self, chunks: Tensor) -> Tensor:
        """Sum over ranks of this rank's row, shape `(n,)`, at least float32: sent as it is, not rounded again."""
        return self.finish(self.all_to_all(chunks)).sum(dim=0, dtype=torch.promote_types(chunks.dtype, torch.float32))

    def reduce_scatter_encoded(self, chunks: Tensor, kernels: Kernels, seed: int) -> Tensor:
        """Sum over ranks of this rank's row, shape `(n,)`, at least float32, encoded on the way.

        The first of the two shots of `average_encoded_`, as ZeRO++ does it (Wang et al. 2023,
        https://arxiv.org/abs/2306.10209, section 3.3). Each row begins a block and is filled up with zeros. On CPU
        encoding and decoding of some blocks go on while others are under way.

        Args:
            chunks: floating-point.
            kernels: of this group, of a codec with a block size.
            seed: for random rounding, of this rank and call alone. Below 2^30.
        """
        size = kernels.codec.block_size
        assert size is not None
        blocks = _in_blocks(chunks, size)
        total, one = torch.empty_like(blocks[0]), blocks.new_ones(())
        at_once = max(1, CHUNK_NUMEL // (self.size * size))
        starts = range(0, total.shape[0], at_once)
        sent = []
        for start in starts:
            some = blocks[:, start : start + at_once].reshape(-1, size)
            payload = kernels.encode(some, None, one, kernels.seed(seed + start, self.device))
            sent.append(begun(self.all_to_all(payload.view(self.size, -1))))
        for start, steps in zip(starts, sent, strict=True):
            out = total[start : start + at_once]
            kernels.decode_mean(self.finish(steps).view(self.size, out.shape[0], -1), one * self.size, out)
        return total.view(-1)[: chunks.shape[1]]


def _in_blocks(chunks: Tensor, size: int) -> Tensor:
    """Shape `(w, b, size)`, at least float32: a view where rows are whole blocks, or else a copy."""
    w, n = chunks.shape
    dtype = torch.promote_types(chunks.dtype, torch.float32)
    if n % size == 0 and dtype == chunks.dtype:
        return chunks.view(w, -1, size)
    blocks = chunks.new_zeros((w, -(-n // size) * size), dtype=dtype)
    blocks[:, :n] = chunks
    return blocks.view(w, -1, size)
