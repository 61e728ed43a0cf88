"""2 bits for each number: its sign, and one of two magnitudes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_commhooks.codecs._rounding import SMALLEST_SCALE, Rounding, check_block_size, largest
from lightning_commhooks.codecs.codec import Codec


@dataclass(frozen=True, kw_only=True)
class Int2Codec(Codec):
    """Blocks of numbers as a sign and one of two magnitudes, with two float32 numbers: these magnitudes.

    They are the means of the magnitudes above and up to the mean of all, one step of Lloyd's algorithm (Lloyd 1982,
    "Least squares quantization in PCM"). Squared error: 0.124 of the square of the numbers if they are normal, where
    the best 4 levels have 0.118. Largest error: the largest magnitude of the block. There is no level 0, but a
    magnitude below 2^-100 becomes 0.

    Args:
        block_size: elements with common magnitudes, a multiple of 8.

    Raises:
        ValueError: a value is out of range.
    """

    num_scales: ClassVar[int] = 2
    rounding: ClassVar[Rounding] = "nearest"

    block_size: int = 256

    def __post_init__(self) -> None:
        check_block_size(self.block_size, 8)

    def quantize(self, blocks: Tensor, seed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # Sums in float64, so that their order makes no difference.
        magnitude = blocks.abs().double()
        is_large = magnitude > magnitude.mean(dim=1, keepdim=True)
        means = torch.cat([_mean(magnitude, is_large.logical_not()), _mean(magnitude, is_large)], dim=1).float()
        scales = torch.where(means < SMALLEST_SCALE, 0.0, means)
        scales = torch.where(largest(blocks).isnan(), torch.nan, scales)
        level = is_large.to(torch.int32) + 2 * (blocks < 0).to(torch.int32)
        first, second, third, fourth = level.split(self.block_size // 4, dim=1)
        codes = (first + 4 * second + 16 * third + 64 * fourth).to(torch.uint8)
        small, large = scales.to(blocks.dtype).split(1, dim=1)
        size = torch.where(is_large, large, small)
        return codes, scales, torch.where(blocks < 0, -size, size)

    def dequantize(self, codes: Tensor, scales: Tensor) -> Tensor:
        # All quarters as one expression of position, as in `Int4Codec`.
        shifts = torch.arange(0, 8, 2, dtype=torch.int32, device=codes.device).view(4, 1)
        level = codes.to(torch.int32).unsqueeze(-2) >> shifts
        small, large = scales.unsqueeze(-1).split(1, dim=-2)
        size = torch.where((level & 1) == 1, large, small)
        return torch.where((level & 2) == 2, -size, size)


def _mean(numbers: Tensor, chosen: Tensor) -> Tensor:
    num = chosen.sum(dim=1, keepdim=True).clamp(min=1)
    return torch.where(chosen, numbers, 0.0).sum(dim=1, keepdim=True) / num
