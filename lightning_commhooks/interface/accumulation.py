"""Counts and weights of the micro-batches whose gradients are accumulated."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass

from torch import Tensor

# A number; on CUDA a tensor of one element where the number would have to be waited for.
Number = float | Tensor


@dataclass
class Accumulated:
    """The micro-batches whose gradients one synchronized backward sums.

    Attributes:
        num_micro_batches: micro-batches of this rank since the last synchronized backward; `None`: nobody knows.
        weight: of these micro-batches, as the user gave it.
        num_weightless: those that the user gave no weight for.
        divided_by: what the loss of each was divided by already.
        factor: what the gradients are multiplied by; `None` as long as that is not known.
    """

    num_micro_batches: int | None = 1
    weight: Number = 0.0
    num_weightless: int = 0
    divided_by: float = 1.0
    factor: Number | None = None


def scale_(gradients: Tensor, factor: Number) -> Tensor:
    """Multiply gradients in place; nothing for 1."""
    if not is_one(factor):
        # A factor on a device has one dimension.
        (gradients if gradients.dim() else gradients.view(1)).mul_(factor)
    return gradients


def is_one(factor: Number) -> bool:
    """Whether this is known to be 1."""
    return isinstance(factor, (int, float)) and factor == 1


def is_positive(value: object) -> bool:
    """Whether this is a finite number above 0."""
    return is_weight(value) and value != 0


def is_weight(value: object) -> bool:
    """Whether this is a finite number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    return math.isfinite(value) and float(value) >= 0
