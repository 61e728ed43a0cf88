"""A flat gradient bucket, and plain metadata that travels with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from lightning_commhooks.interface.accumulation import Accumulated


@dataclass(frozen=True)
class Slot:
    """Where one parameter's gradient lies inside a flat bucket.

    Attributes:
        name: the parameter's name in the module that DDP wraps, the key of all hook state.
        shape: sizes of the gradient in *memory* order, outermost dimension first. For a parameter in a
            permuted dense layout (`torch.channels_last`) this is the permutation of its logical shape.
        offset: first element of the gradient in the flat bucket.
        parameter: the parameter itself, for hooks that average models. Not to be changed in `reduce`.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    parameter: Tensor | None = field(default=None, compare=False, repr=False)

    @cached_property
    def numel(self) -> int:
        """Number of elements of the gradient."""
        return torch.Size(self.shape).numel()

    def view(self, flat: Tensor) -> Tensor:
        """The gradient as a view of `flat`, shape `self.shape`."""
        return flat[self.offset : self.offset + self.numel].view(self.shape)


@dataclass(frozen=True)
class Bucket:
    """One flat gradient bucket, and what lies where in it.

    Attributes:
        flat: shape `(numel,)`, any dtype: this rank's gradients, to be replaced by the averaged ones.
        index: position of the bucket in this backward. Never a key of state: DDP rebuilds its buckets.
        is_last: whether DDP called this the last bucket of the backward. With
            `skip_all_reduce_unused_params=True` a backward may end without one.
        step: number of synchronized backwards before this one, equal on all ranks.
        slots: the parameters in the bucket, in memory order; together they cover it without gaps.
        unused: names of parameters that this rank did not use, or `None` unless DDP runs with
            `find_unused_parameters=True`. It then throws away what a hook returns for a parameter that no rank
            used, so a hook with memory must not spend its memory on one: see `used`. In its place there is what an
            earlier backward left in `.grad`.
        loss_scale: what a `GradScaler` multiplied the loss by, equal on all ranks; a float, or on CUDA a tensor
            of one element, which would have to be waited for. Memory is kept in units of the loss itself: divide
            gradients by this on the way in, multiply on the way out.
        scale: what gradients are to be multiplied by before they are averaged; not 0, and 1 unless the hook says that
            it does so (`scales_gradients`). A float, or a tensor of one element.
        accumulated: the micro-batches that the gradients are the sum of; `None` unless they are divided by them
            (`ScaleByGradAccumulation`).
    """

    flat: Tensor = field(compare=False, repr=False)
    index: int
    is_last: bool
    step: int
    slots: tuple[Slot, ...]
    unused: frozenset[str] | None = None
    loss_scale: float | Tensor = 1.0
    scale: float | Tensor = 1.0
    accumulated: Accumulated | None = field(default=None, compare=False, repr=False)

    @property
    def divisor(self) -> float | Tensor:
        """The divisor of gradients on the way in: they are then scaled, and in units of the loss."""
        return self.loss_scale / self.scale

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters in the bucket, in memory order."""
        return tuple(slot.name for slot in self.slots)

    @property
    def numel(self) -> int:
        """Number of elements of the gradients."""
        return sum(slot.numel for slot in self.slots)

    def gather(self, slots: Sequence[Slot]) -> Tensor:
        """A copy of these gradients, one after another."""
        return torch.cat([self.flat[:0], *(slot.view(self.flat).view(-1) for slot in slots)])

    def scatter_(self, slots: Sequence[Slot], gradients: Tensor) -> None:
        """Replace these gradients by what `gather` returned, or its average."""
        for slot, own in zip(slots, gradients.split([slot.numel for slot in slots]), strict=True):
            slot.view(self.flat).copy_(own.view(slot.shape))

    def used(self, slots: Sequence[Slot], like: Tensor) -> Tensor:
        """Shape `(len(slots),)`, dtype and device of `like`: 1 for each parameter that this rank used, else 0."""
        used = torch.tensor([self.unused is None or slot.name not in self.unused for slot in slots], dtype=like.dtype)
        # Pinned, a copy does not wait for the device.
        return used.pin_memory().to(like.device, non_blocking=True) if like.is_cuda else used.to(like.device)
