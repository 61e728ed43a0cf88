"""The precision of hooks' computations, and checks for inf and NaN that reach all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of residuals and of computations with them: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def to_gradient(mean: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast an approximation to the gradient's dtype; float16 is clipped, and the excess stays in the residual."""
    if dtype == torch.float16:
        mean = mean.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    return mean.to(dtype)


def add_unscaled_(memory: Tensor, gradient: Tensor, divisor: float | Tensor) -> Tensor:
    """Add `gradient / divisor` to `memory`, in its dtype, without synchronizing for a divisor on CUDA."""
    if isinstance(divisor, float):
        return memory.add_(gradient, alpha=1 / divisor)
    # With a 0-dimensional divisor, the quotient would have the gradient's 16 bits and underflow.
    return memory.addcdiv_(gradient, divisor.reshape(1).to(memory.dtype))


def all_finite(tensor: Tensor) -> Tensor:
    """Return whether all elements are finite, as a one-element boolean on the tensor's device; never synchronizes."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_cpu:
        if not tensor.numel() or not tensor.is_floating_point():
            return tensor.isfinite().all()
        # Two kernels instead of five.
        largest: Tensor = torch.linalg.vector_norm(tensor, math.inf)
        return largest < math.inf
    if not tensor.numel():
        return torch.tensor(True, device="cpu")
    # On CPU a sum takes a fiftieth of the time of isfinite(). It may overflow, so a nonfinite sum proves nothing.
    finite = bool(tensor.sum().isfinite())
    return torch.tensor(finite or bool(tensor.max().isfinite() and tensor.min().isfinite()), device="cpu")


def spoil_unless_(finite: Tensor, tensors: Sequence[Tensor]) -> None:
    """Fill tensors of at least one dimension with NaN unless `finite`, a boolean of one element.

    Synchronizes only for tensors on CPU, such as FSDP2's offloaded gradients, if `finite` is on another device.
    """
    if not finite.is_cpu or not finite:
        zero_or_nan = torch.where(finite, 0.0, math.nan).view(1)
        for device, dtype in {(tensor.device, tensor.dtype) for tensor in tensors}:
            some = [tensor for tensor in tensors if (tensor.device, tensor.dtype) == (device, dtype)]
            torch._foreach_add_(some, [zero_or_nan.to(device, dtype)] * len(some))


def num_overflowed(exact: Tensor, half: Tensor) -> int | Tensor:
    """Return the number of elements that are finite in `exact` but not in its cast `half`; as a tensor unless on CPU.

    It is 0 for bfloat16, which has the range of float32.
    """
    if half.dtype != torch.float16 or (half.is_cpu and all_finite(half)):
        return 0
    overflowed = ((half.abs() == math.inf) & (exact.abs() < math.inf)).sum()
    return int(overflowed) if half.is_cpu else overflowed
