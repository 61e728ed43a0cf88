"""8-bit floating-point numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_commhooks.codecs._rounding import Rounding, check_block_size, check_rounding, largest, round_, scale_of
from lightning_commhooks.codecs.codec import Codec

# Bits of the mantissa, exponent of the smallest normal number.
_FORMATS = {"e4m3": (torch.float8_e4m3fn, 3, -6), "e5m2": (torch.float8_e5m2, 2, -14)}


@dataclass(frozen=True, kw_only=True)
class FP8Codec(Codec):
    """Blocks of 8-bit floating-point numbers with a float32 scale that makes the largest magnitude the format's.

    Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433, in PyTorch's `float8_e4m3fn` and `float8_e5m2`; carried
    as bytes, since gloo refuses these dtypes. Unlike with integers, small numbers of a block keep a relative precision
    of 2^-4 (e4m3) or 2^-3 (e5m2). Largest error: the largest magnitude of the block over 28 (e4m3) or 14 (e5m2), twice
    that with stochastic rounding. A block whose largest magnitude is below 448 or 57344 times 2^-100 becomes zeros.

    Args:
        format: `"e4m3"`: magnitudes of a block down to 2^-18 of the largest; `"e5m2"`: down to 2^-32, but coarser.
        block_size: elements with a common scale, a multiple of 8.
        rounding: `"nearest"`, or `"stochastic"`, whose error is 0 on average and larger in each number.

    Raises:
        ValueError: a value is out of range.
    """

    format: Literal["e4m3", "e5m2"] = "e4m3"
    block_size: int = 512
    rounding: Rounding = "nearest"

    def __post_init__(self) -> None:
        if self.format not in _FORMATS:
            raise ValueError(f"format must be one of {sorted(_FORMATS)}, is {self.format!r}")
        check_block_size(self.block_size, 8)
        check_rounding(self.rounding)

    @property
    def _limit(self) -> float:
        return torch.finfo(_FORMATS[self.format][0]).max

    def quantize(self, blocks: Tensor, seed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dtype, mantissa, smallest = _FORMATS[self.format]
        scale, divisor = scale_of(largest(blocks), self._limit)
        scaled = (blocks * (1 / divisor)).clamp(-self._limit, self._limit).to(torch.float32)
        if self.rounding == "stochastic":
            # A number's exponent is in the bits 23 to 30, from which the distance of its neighbours is made.
            exponent = ((scaled.abs().view(torch.int32) >> 23) - 127).clamp_min(smallest)
            distance = ((exponent - mantissa + 127) << 23).view(torch.float32)
            scaled = round_(scaled / distance, "stochastic", seed) * distance
        codes = scaled.clamp(-self._limit, self._limit).to(dtype)
        return codes.view(torch.uint8), scale, codes.to(blocks.dtype) * scale

    def dequantize(self, codes: Tensor, scales: Tensor) -> Tensor:
        return codes.view(_FORMATS[self.format][0]).to(scales.dtype) * scales
