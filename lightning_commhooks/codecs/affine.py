"""PyTorch's affine quantization to 8 bits: from the smallest to the largest number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_commhooks.codecs._rounding import LARGEST, check_block_size, scale_of
from lightning_commhooks.codecs.codec import Codec


@dataclass(frozen=True, kw_only=True)
class AffineCodec(Codec):
    """256 levels from the smallest to the largest number of a block, 0 being one of them.

    Scale and zero point of `torch.ao.quantization.MinMaxObserver`, `quint8`, and rounding of PyTorch's
    `quantization_hooks`, but without the observer's lower limit of 1.2e-7 for the scale, which makes small gradients
    zero. Largest error: a level, the extent of the block (with 0) over 255; mostly half of it. A block whose extent is
    below 255 * 2^-100 becomes zeros.

    Args:
        block_size: elements with a common scale and zero point, a multiple of 4 (PyTorch's per-channel hook: 512);
            `None`: all that are encoded together (its per-tensor hook).

    Raises:
        ValueError: a value is out of range.
    """

    num_scales: ClassVar[int] = 2

    block_size: int | None = 512

    def __post_init__(self) -> None:
        if self.block_size is not None:
            check_block_size(self.block_size, 4)

    @property
    def rounds_at_random(self) -> bool:
        return False

    def quantize(self, blocks: Tensor, seed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        low, high = blocks.amin(dim=1, keepdim=True).clamp_max(0), blocks.amax(dim=1, keepdim=True).clamp_min(0)
        extent = torch.where((high <= LARGEST) & (low >= -LARGEST), high - low, torch.nan)
        scale, divisor = scale_of(extent.to(torch.float32), 255)
        zero_point = (-(low.to(torch.float32) / divisor).round()).clamp(0, 255)
        levels = ((blocks / divisor).round() + zero_point).clamp(0, 255)
        return levels.to(torch.uint8), torch.cat([scale, zero_point], dim=1), scale * (levels - zero_point)

    def dequantize(self, codes: Tensor, scales: Tensor) -> Tensor:
        scale, zero_point = scales[..., :1], scales[..., 1:]
        return scale * (codes.to(scales.dtype) - zero_point)
