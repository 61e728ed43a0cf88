"""4 bits for each number, symmetric around 0, two to a byte."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_commhooks.codecs._rounding import (
    LARGEST,
    Rounding,
    check_block_size,
    check_rounding,
    largest,
    round_,
    scale_of,
    uniform,
)
from lightning_commhooks.codecs.codec import Codec


@dataclass(frozen=True, kw_only=True)
class Int4Codec(Codec):
    """Blocks of integers from -7 to 7, two to a byte, with a float32 scale, the largest magnitude over 7.

    Largest error: half a level, the largest magnitude of the block over 14; a level with stochastic rounding. A block
    whose largest magnitude is below 7 * 2^-100 becomes zeros.

    Args:
        block_size: elements with a common scale, a multiple of 8; a power of 2 with a rotation.
        rounding: `"nearest"`, or `"stochastic"`, whose error is 0 on average and larger in each number.
        rotation: `"hadamard"`: multiply each block by a Hadamard matrix with random signs first, which spreads
            an outlier over the block, so that it does not take the levels of the others; the error is then bounded by
            s levels of the rotated block in a single number, by s/2 in the norm of a block of s. As in QuIP#, Tseng et
            al. 2024, https://arxiv.org/abs/2402.04396, section 3. Costs two matrix products, whose rounding depends on
            the number of blocks, so that results depend a little on DDP's buckets; and a block with a magnitude above
            2^126 / s is NaN. `None`: no rotation.

    Raises:
        ValueError: a value is out of range.
    """

    block_size: int = 64
    rounding: Rounding = "nearest"
    rotation: Literal["hadamard"] | None = None

    def __post_init__(self) -> None:
        check_block_size(self.block_size, 8)
        check_rounding(self.rounding)
        if self.rotation not in (None, "hadamard"):
            raise ValueError(f"rotation must be one of (None, 'hadamard'), is {self.rotation!r}")
        if self.rotation and self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size must be a power of 2 with rotation='hadamard', is {self.block_size}")

    def quantize(self, blocks: Tensor, seed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        blocks, extent = self._rotated(blocks)
        scale, divisor = scale_of(extent, 7)
        levels = round_(blocks * (1 / divisor), self.rounding, seed).clamp(-7, 7)
        low, high = (levels + 8).split(self.block_size // 2, dim=1)
        return (low + 16 * high).to(torch.uint8), scale, self._rotated_back(levels) * scale

    def dequantize(self, codes: Tensor, scales: Tensor) -> Tensor:
        # Both halves as one expression of position; joined, they are compiled to code ten times as slow.
        shifts = torch.arange(0, 8, 4, dtype=torch.int32, device=codes.device).view(2, 1)
        levels = ((codes.to(torch.int32).unsqueeze(-2) >> shifts) & 15).to(scales.dtype) - 8
        if self.rotation:
            levels = self._rotated_back(levels.flatten(-2)).view(levels.shape)
        return levels * scales.unsqueeze(-1)

    def _rotated(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """The numbers to round, and the largest magnitude of each block."""
        extent = largest(blocks)
        if not self.rotation:
            return blocks, extent
        # Divided by the block size, so that turning back needs no more than integers; it may add up that many numbers.
        rotated = blocks @ (hadamard(self.block_size, blocks) / self.block_size)
        return rotated, torch.where(extent <= LARGEST / self.block_size, largest(rotated), torch.nan)

    def _rotated_back(self, levels: Tensor) -> Tensor:
        # Sums of small integers: exact in any order, so equal on all machines.
        return levels @ hadamard(self.block_size, levels).t() if self.rotation else levels


def hadamard(size: int, like: Tensor) -> Tensor:
    """A matrix of 1 and -1 with orthogonal columns, shape `(size, size)`, dtype and device of `like`.

    Sylvester's matrix, its rows multiplied by signs that are random but always the same: without them, a block of
    equal numbers would become a single large one.

    Args:
        size: a power of 2.
        like: gives dtype and device.
    """
    matrix = like.new_ones((1, 1))
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], dim=1), torch.cat([matrix, -matrix], dim=1)])
    seed = torch.zeros((), dtype=torch.int32, device=like.device)
    return torch.where(uniform(matrix[:, :1], seed) < 0.5, -matrix, matrix)
