"""Hadamard matrices with random signs."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_commhooks.codecs._rounding import uniform


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
