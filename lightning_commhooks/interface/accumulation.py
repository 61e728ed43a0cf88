"""Counts and weights of the micro-batches whose gradients are accumulated."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass

from torch import Tensor

# A number, or a tensor of one element on CUDA if reading the number would synchronize.
Number = float | Tensor


@dataclass
class Accumulated:
    """The micro-batches whose gradients one synchronized backward sums.

    Attributes:
        num_micro_batches: micro-batches of this rank since the last synchronized backward; `None`: unknown.
        weight: total weight of these micro-batches, as set by the user.
        num_weightless: number of micro-batches without a weight.
        divided_by: divisor that the framework has applied to the loss of each micro-batch.
        factor: factor of the gradients; `None` until it is known.
    """

    num_micro_batches: int | None = 1
    weight: Number = 0.0
    num_weightless: int = 0
    divided_by: float = 1.0
    factor: Number | None = None


def scale_(gradients: Tensor, factor: Number) -> Tensor:
    """Multiply gradients in place, unless the factor is known to be 1."""
    if not is_one(factor):
        # A factor on a device has one dimension, so the gradients need one too.
        (gradients if gradients.dim() else gradients.view(1)).mul_(factor)
    return gradients


def is_one(factor: Number) -> bool:
    """Return whether a factor is known to be 1."""
    return isinstance(factor, (int, float)) and factor == 1


def is_positive(value: object) -> bool:
    """Return whether a value is a finite number above 0."""
    return is_weight(value) and value != 0


def is_weight(value: object) -> bool:
    """Return whether a value is a finite number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    return math.isfinite(value) and float(value) >= 0
