"""8 bits for each number, symmetric around 0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_commhooks.codecs._rounding import Rounding, check_block_size, check_rounding, largest, round_, scale_of
from lightning_commhooks.codecs.codec import Codec


@dataclass(frozen=True, kw_only=True)
class Int8Codec(Codec):
    """Blocks of integers from -127 to 127 with a float32 scale, the largest magnitude over 127.

    Block-wise quantization as of Dettmers et al. 2022, https://arxiv.org/abs/2110.02861, section 2.1, with linear
    levels. Largest error: half a level, the largest magnitude of the block over 254; a level with stochastic rounding.
    A block whose largest magnitude is below 127 * 2^-100 becomes zeros.

    Args:
        block_size: elements with a common scale, a multiple of 8.
        rounding: `"nearest"`, or `"stochastic"`, whose error is 0 on average and larger in each number.

    Raises:
        ValueError: a value is out of range.
    """

    code_dtype: ClassVar[torch.dtype] = torch.int8

    block_size: int = 512
    rounding: Rounding = "nearest"

    def __post_init__(self) -> None:
        check_block_size(self.block_size, 8)
        check_rounding(self.rounding)

    def quantize(self, blocks: Tensor, seed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scale, divisor = scale_of(largest(blocks), 127)
        levels = round_(blocks * (1 / divisor), self.rounding, seed).clamp(-127, 127)
        return levels.to(torch.int8), scale, levels * scale

    def dequantize(self, codes: Tensor, scales: Tensor) -> Tensor:
        return codes.to(scales.dtype) * scales
