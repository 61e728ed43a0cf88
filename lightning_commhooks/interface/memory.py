"""Tensors that a bad step leaves as they were, and how to tell a bad step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class Memory:
    """A tensor that changes from step to step, but only in steps that turn out to be finite.

    A step is over when its last bucket is reduced, so a bucket cannot know yet. It writes to `next`, or gives a tensor
    to `stage`, and `end_step` decides. Holds two tensors, because no arithmetic gets the old value back exactly.

    Args:
        value: any shape and dtype; becomes the memory itself, not a copy.

    Attributes:
        value: what holds now. To be changed by `end_step` only.
    """

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self._spare: Tensor | None = None
        self._written = False

    def next(self) -> Tensor:
        """The tensor to write the next value to, all of it; what is in it before is arbitrary."""
        if self._spare is None:
            self._spare = torch.empty_like(self.value)
        self._written = True
        return self._spare

    def stage(self, value: Tensor) -> None:
        """As `next().copy_(value)`, without a copy: nobody may change `value` from now on. Not beside `next`."""
        self._spare, self._written = value, True

    def end_step(self, finite: Tensor) -> None:
        """Take over what was written to `next`, or staged, if anything was and the step is finite.

        Args:
            finite: boolean, one element, on CPU.
        """
        if not self._written:
            return
        assert self._spare is not None
        self._written = False
        if finite:
            self.value, self._spare = self._spare, self.value


def all_finite(tensor: Tensor) -> Tensor:
    """Boolean, one element on the tensor's device: whether no element is inf or NaN. Waits for no device."""
    if not tensor.is_cpu:
        return tensor.isfinite().all()
    if not tensor.numel():
        return torch.tensor(True)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    # On CPU a sum takes a fiftieth of the time of isfinite(). It may overflow, so it cannot say no.
    finite = bool(tensor.sum().isfinite())
    return torch.tensor(finite or bool(tensor.max().isfinite() and tensor.min().isfinite()))


def spoil_unless_(finite: Tensor, tensors: Sequence[Tensor]) -> None:
    """Make all of some tensors NaN unless `finite`, boolean, one element; does not wait for a device to know.

    Args:
        finite: on the device of the tensors.
        tensors: with at least one dimension.
    """
    if not finite.is_cpu or not finite:
        zero_or_nan = torch.where(finite, 0.0, math.nan).view(1)
        for dtype in {tensor.dtype for tensor in tensors}:
            some = [tensor for tensor in tensors if tensor.dtype == dtype]
            torch._foreach_add_(some, [zero_or_nan.to(dtype)] * len(some))


def num_overflowed(exact: Tensor, half: Tensor) -> int | Tensor:
    """Number of elements that are finite in `exact` and not in `half`, a cast of it; as a tensor unless on CPU.

    0 for bfloat16, which has the range of float32.
    """
    if half.dtype != torch.float16 or (half.is_cpu and all_finite(half)):
        return 0
    overflowed = (half.isfinite().logical_not() & exact.isfinite()).sum()
    return int(overflowed) if half.is_cpu else overflowed
