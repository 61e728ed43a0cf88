"""The formats of numbers: integers of 8, 4 and 2 bits, PyTorch's affine ones, and 8-bit floating-point numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from lightning_commhooks.codecs.codec import Codec

Rounding = Literal["nearest", "stochastic"]
ROUNDINGS = get_args(Rounding)

# Below, a scale is so close to the denormal numbers that its inverse could overflow: such a block is sent as zeros.
SMALLEST_SCALE = 2.0**-100
# Above, the sum of two numbers could overflow: such a block counts as infinite.
LARGEST = 2.0**126
# Bits of the mantissa, exponent of the smallest normal number.
_FORMATS = {"e4m3": (torch.float8_e4m3fn, 3, -6), "e5m2": (torch.float8_e5m2, 2, -14)}


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


@dataclass(frozen=True, kw_only=True)
class Int4Codec(Codec):
    """Blocks of integers from -7 to 7, two to a byte, with a float32 scale, the largest magnitude over 7.

    Largest error: half a level, the largest magnitude of the block over 14; a level with stochastic rounding. A block
    whose largest magnitude is below 7 * 2^-100 becomes zeros.

    Args:
        block_size: elements with a common scale, a multiple of 8; a power of 2 with a rotation.
        rounding: `"nearest"`, or `"stochastic"`, whose error is 0 on average and larger in each number.
        rotation: `"hadamard"`: multiply each block by a Hadamard matrix with random signs first, which spreads
            an outlier over the block, so that the other elements do not lose levels to it; the error is then bounded by
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
            raise ValueError(f"rotation must be one of (None, 'hadamard'), got {self.rotation!r}")
        if self.rotation and self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size must be a power of 2 with rotation='hadamard', got {self.block_size}")

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
    """Return a matrix of 1 and -1 with orthogonal columns, shape `(size, size)`, dtype and device of `like`.

    Sylvester's matrix, for a power of 2, its rows multiplied by signs that are random but always the same: without
    them, a block of equal numbers would become a single large one.
    """
    matrix = like.new_ones((1, 1))
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], dim=1), torch.cat([matrix, -matrix], dim=1)])
    seed = torch.zeros((), dtype=torch.int32, device=like.device)
    return torch.where(uniform(matrix[:, :1], seed) < 0.5, -matrix, matrix)


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
        means = torch.cat([_mean_of(magnitude, is_large.logical_not()), _mean_of(magnitude, is_large)], dim=1).float()
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


def _mean_of(numbers: Tensor, chosen: Tensor) -> Tensor:
    num = chosen.sum(dim=1, keepdim=True).clamp(min=1)
    return torch.where(chosen, numbers, 0.0).sum(dim=1, keepdim=True) / num


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
    rounding: ClassVar[Rounding] = "nearest"

    block_size: int | None = 512

    def __post_init__(self) -> None:
        if self.block_size is not None:
            check_block_size(self.block_size, 4)

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
        if not isinstance(self.format, str) or self.format not in _FORMATS:
            raise ValueError(f"format must be one of {sorted(_FORMATS)}, got {self.format!r}")
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


def check_rounding(rounding: str) -> None:
    """Raise `ValueError` for a rounding that there is not."""
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding must be one of {ROUNDINGS}, got {rounding!r}")


def check_block_size(block_size: int | None, multiple: int, field: str = "block_size") -> None:
    """Raise `ValueError`, naming the field, unless it is a positive multiple."""
    if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1 or block_size % multiple:
        raise ValueError(f"{field} must be a positive multiple of {multiple}, got {block_size!r}")


def largest(blocks: Tensor) -> Tensor:
    """Largest magnitude of each block, shape `(b, 1)`, float32; NaN if it is above 2^126, inf or NaN."""
    amax = blocks.abs().amax(dim=1, keepdim=True)
    return torch.where(amax <= LARGEST, amax, torch.nan).to(torch.float32)


def scale_of(extent: Tensor, num_levels: float) -> tuple[Tensor, Tensor]:
    """`extent / num_levels`, 0 where that is too small, and a number above 0 to divide by."""
    # Compilers may multiply by the inverse instead of dividing by a constant. In float64 both round to the same.
    scale = (extent.double() / num_levels).to(extent.dtype)
    scale = torch.where(scale < SMALLEST_SCALE, 0.0, scale)
    return scale, torch.where(scale == 0, 1.0, scale)


def round_(numbers: Tensor, rounding: Rounding, seed: Tensor) -> Tensor:
    """Round to integers: a number between two of them becomes one of them, at random the mean being right."""
    if rounding == "nearest":
        return numbers.round()
    lower = numbers.floor()
    return lower + (uniform(numbers, seed) < numbers - lower)


def uniform(like: Tensor, seed: Tensor) -> Tensor:
    """Return random numbers in [0, 1), shape of `like`, float32, from their position and a seed alone.

    No generator: a stream of random numbers that is a function of position needs no state, no order of calls and no
    pass over memory. Multiply-xorshift rounds (Mueller's `hash`, https://github.com/h2database/h2database, which
    Wellons 2018, https://nullprogram.com/blog/2018/07/31/, compares with other hash functions) on the position, below
    2^31, and on the seed, int32, one element, not negative.
    """
    position = torch.arange(like.numel(), dtype=torch.int64, device=like.device).view(like.shape)
    bits = _mixed(_mixed(position) ^ seed)
    return (bits & 0xFFFFFF).to(torch.float32) * 2.0**-24


def _mixed(bits: Tensor) -> Tensor:
    # In 64 bit, because compilers may do anything when a product of 32-bit integers overflows.
    for _ in range(2):
        bits = ((bits ^ (bits >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    return bits ^ (bits >> 16)
