"""A flat gradient bucket and its metadata."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from lightning_commhooks.interface.accumulation import Accumulated


@dataclass(frozen=True)
class Slot:
    """The position of one parameter's gradient in a flat bucket.

    Attributes:
        name: the parameter's name in the module that DDP wraps, the key of all hook state.
        shape: sizes of the gradient in *memory* order, outermost dimension first. For a parameter in a
            permuted dense layout (`torch.channels_last`) this is the permutation of its logical shape.
        offset: first element of the gradient in the flat bucket.
        parameter: the parameter itself, for hooks that average models. `reduce` must not change it.
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
        """Return the gradient as a view of `flat`, shape `self.shape`."""
        return flat[self.offset : self.offset + self.numel].view(self.shape)


@dataclass(frozen=True)
class Bucket:
    """One flat gradient bucket and its layout.

    Attributes:
        flat: shape `(numel,)`, any dtype: this rank's gradients, which `reduce` replaces by the averaged gradients.
        index: position of the bucket in this backward. Never a key of state: DDP rebuilds its buckets.
        is_last: whether DDP marked this bucket as the last one of the backward. With
            `skip_all_reduce_unused_params=True`, a backward may end without such a bucket.
        step: number of synchronized backwards before this one, rank-uniform.
        slots: the parameters in the bucket, in memory order; together they cover it without gaps.
        unused: names of parameters that this rank did not use, or `None` unless DDP runs with
            `find_unused_parameters=True`. DDP then discards a hook's result for a parameter that no rank used, or with
            `gradient_as_bucket_view=True` leaves it in `.grad`, so a hook must neither use up the memory of such a
            parameter nor add it to the gradient: see `used`. For it, the bucket contains the `.grad` that an earlier
            backward left.
        loss_scale: the scale of the `GradScaler`, rank-uniform; a float, or on CUDA a tensor of one element, because
            reading it would synchronize. Memory is in units of the unscaled loss: divide gradients by this value when
            they enter the memory, and multiply them when they leave it.
        scale: factor by which to multiply gradients before they are averaged. It is not 0, and it is 1 unless the hook
            sets `scales_gradients`. A float, or a tensor of one element.
        accumulated: the micro-batches whose gradients are summed; `None` unless gradients are divided by their number
            or weight (`ScaleByGradAccumulation`).
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
        """The divisor of gradients that enter the memory: it applies `scale` and converts them to units of the loss."""
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
        """Return a flat copy of these gradients."""
        return torch.cat(self._parts(slots) or [self.flat[:0]])

    def scatter_(self, slots: Sequence[Slot], gradients: Tensor) -> None:
        """Replace these gradients by a tensor in the layout of `gather`."""
        if slots:
            torch._foreach_copy_(self._parts(slots), gradients.split([slot.numel for slot in slots]))

    def _parts(self, slots: Sequence[Slot]) -> list[Tensor]:
        return [self.flat[slot.offset : slot.offset + slot.numel] for slot in slots]

    def used(self, slots: Sequence[Slot], like: Tensor) -> Tensor:
        """Return 1 for each parameter that this rank used, else 0, in the dtype and on the device of `like`."""
        is_used = [self.unused is None or slot.name not in self.unused for slot in slots]
        used = torch.tensor(is_used, dtype=like.dtype, device="cpu")
        # A copy from pinned memory does not synchronize.
        return used.pin_memory().to(like.device, non_blocking=True) if like.is_cuda else used.to(like.device)
