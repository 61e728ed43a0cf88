"""What accumulated gradients are the sum of."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

# A number; on CUDA a tensor of one element where the number would have to be waited for.
Number = float | Tensor


@dataclass(frozen=True)
class Held:
    """What the `.grad` of a parameter has kept from earlier synchronized backwards.

    Attributes:
        num_micro_batches: that it is the sum of.
        weight: of them, on all ranks.
        factor: that the sum, averaged over ranks, was multiplied by.
        version: of that `.grad`; another one when it has changed.
        has_present: whether the present micro-batch is among these, in which this is not the first backward.
    """

    num_micro_batches: int = 0
    weight: Number = 0.0
    factor: Number = 1.0
    version: int = -1
    has_present: bool = False


@dataclass
class Accumulated:
    """What the gradients of one synchronized backward are the sum of.

    Attributes:
        num_micro_batches: micro-batches of this rank since the last synchronized backward.
        weight: of these micro-batches, as the user gave it.
        num_weightless: those that the user gave no weight for.
        divided_by: what the loss of each was divided by already.
        held: for parameters that are accumulated over several synchronized backwards, what they had before this one.
        stale: parameters of `held` whose `.grad` still has the factor in it.
        total_weight: the sum of `weight` over ranks, once it is known.
        factors: for each parameter, what its gradients were multiplied by.
    """

    num_micro_batches: int = 1
    weight: Number = 0.0
    num_weightless: int = 0
    divided_by: float = 1.0
    held: Mapping[str, Held] = field(default_factory=dict)
    stale: set[str] = field(default_factory=set)
    total_weight: Number | None = None
    factors: dict[str, Number] = field(default_factory=dict)

    def after(self, name: str, version: int) -> Held:
        """What a parameter holds after this backward, if its `.grad` is of that version then."""
        num_micro_batches, weight = self.with_held(self.held.get(name, Held()))
        return Held(num_micro_batches, weight, self.factors.get(name, 1.0), version)

    def with_held(self, held: Held) -> tuple[int, Number]:
        """Micro-batches of a parameter, with those that it had before, and their weight."""
        num_micro_batches = held.num_micro_batches + self.num_micro_batches - held.has_present
        if self.total_weight is None or num_micro_batches == held.num_micro_batches:
            return num_micro_batches, held.weight
        return num_micro_batches, held.weight + self.total_weight


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
