"""Rounding to integers: to the nearest, or up or down at random so that the mean is right."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

Rounding = Literal["nearest", "stochastic"]
ROUNDINGS = get_args(Rounding)

# Below, a scale is so close to the denormal numbers that its inverse could overflow: such a block is sent as zeros.
SMALLEST_SCALE = 2.0**-100
# Above, the sum of two numbers could overflow: such a block counts as infinite.
LARGEST = 2.0**126


def check_rounding(rounding: str) -> None:
    """Raise `ValueError` for a rounding that there is not."""
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding must be one of {ROUNDINGS}, is {rounding!r}")


def check_block_size(block_size: int | None, multiple: int, field: str = "block_size") -> None:
    """Raise `ValueError`, naming the field, unless it is a positive multiple."""
    if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1 or block_size % multiple:
        raise ValueError(f"{field} must be a positive multiple of {multiple}, is {block_size!r}")


def largest(blocks: Tensor) -> Tensor:
    """Largest magnitude of each block, shape `(b, 1)`, float32; NaN if it is above 2^126, inf or NaN."""
    amax = blocks.abs().amax(dim=1, keepdim=True)
    return torch.where(amax <= LARGEST, amax, torch.nan).to(torch.float32)


def scale_of(extent: Tensor, num_levels: float) -> tuple[Tensor, Tensor]:
    """`extent / num_levels`, 0 where that is too small, and a number above 0 to divide by."""
    # Compilers may multiply by the inverse in place of a division by a constant. In float64 both round to the same.
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
    """Random numbers in [0, 1), shape of `like`, float32, from their position and a seed alone.

    No generator: a stream of random numbers that is a function of position needs no state, no order of calls and no
    pass over memory. Multiply-xorshift rounds (Mueller's `hash`, https://github.com/h2database/h2database, which
    Wellons 2018, https://nullprogram.com/blog/2018/07/31/, compares with others) on the position and on the seed.

    Args:
        like: of any shape, fewer than 2^31 elements.
        seed: int32, one element, not negative.
    """
    position = torch.arange(like.numel(), dtype=torch.int64, device=like.device).view(like.shape)
    bits = _mixed(_mixed(position) ^ seed)
    return (bits & 0xFFFFFF).to(torch.float32) * 2.0**-24


def _mixed(bits: Tensor) -> Tensor:
    # In 64 bit, because compilers may do anything when a product of 32-bit integers overflows.
    for _ in range(2):
        bits = ((bits ^ (bits >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    return bits ^ (bits >> 16)
