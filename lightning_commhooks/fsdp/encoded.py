"""Gradients of sharded models encoded by a codec: a quarter of the bytes of float32, or less."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from lightning_commhooks.collectives.chunk import CHUNK_NUMEL, Chunk
from lightning_commhooks.fsdp.dense import DenseReduction
from lightning_commhooks.fsdp.reduction import ShardedReduction
from lightning_commhooks.fsdp.shard_group import ShardGroup
from lightning_commhooks.hooks.int8 import CodecConfig


class EncodedReduction(ShardedReduction):
    """Send blocks that a codec has encoded, decode them and sum in float32.

    Error of one element of a share: the mean over ranks of the codec's largest error in its block; with int8, of the
    largest magnitude of the block over 254. Gradients that are not sharded take a second shot, so a second error.
    """

    def __init__(self, config: CodecConfig, group: ShardGroup) -> None:
        super().__init__(group)
        assert config.codec.block_size is not None
        self._block_size = config.codec.block_size
        self._config = config
        self._kernels = group.kernels(config.codec, feedback=False, two_shot=True)
        self._dense = DenseReduction(group, None, in_float32=False)
        self._num_calls = 0

    def reduce_scatter(self, flat: Tensor, out: Tensor, factor: float) -> None:
        chunks = flat.view(self.group.size, -1)
        if not self._is_worth_it(flat, chunks.shape[1]):
            self._dense.reduce_scatter(flat, out, factor)
            return
        self.group.counters.numel_compressed += flat.numel()
        total = self.group.reduce_scatter_encoded(chunks, self._kernels, self._seed())
        out.copy_(total.mul_(factor))

    def all_reduce_(self, flat: Tensor, factor: float) -> None:
        if not self._is_worth_it(flat, flat.numel() // self.group.size):
            self._dense.all_reduce_(flat, factor)
            return
        self.group.counters.numel_compressed += flat.numel()
        unit = self._block_size * self.group.num_owners()
        padded = flat.new_zeros(-(-flat.numel() // unit) * unit, dtype=torch.promote_types(flat.dtype, torch.float32))
        padded[: flat.numel()] = flat
        seed = self._seed()
        chunks = [
            Chunk(chunk.view(-1, self._block_size), None, (seed + i) % 2**30)
            for i, chunk in enumerate(padded.split(max(unit, CHUNK_NUMEL // unit * unit)))
        ]
        self.group.finish(self.group.average_encoded_(chunks, self._kernels))
        flat.copy_(padded[: flat.numel()].mul_(factor * self.group.size))

    def _is_worth_it(self, flat: Tensor, numel_of_share: int) -> bool:
        # A block is sent as a whole, however little of it is filled.
        fills_block = numel_of_share >= self._block_size
        return self.group.size > 1 and fills_block and flat.numel() * flat.element_size() >= self._config.min_bytes

    def _seed(self) -> int:
        self._num_calls += 1
        return zlib.crc32(f"{self._config.random_seed}:{self.group.rank}:{self._num_calls}".encode()) % 2**30
