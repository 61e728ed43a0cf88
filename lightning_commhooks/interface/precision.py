"""Which precision hooks with memory compute in, and how they go there and back."""

from __future__ import annotations

import torch
from torch import Tensor


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of residuals and what is computed with them: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def to_gradient(mean: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast an approximation to the gradient's dtype; what float16 cannot hold is clipped and stays in the residual."""
    if dtype == torch.float16:
        mean = mean.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    return mean.to(dtype)


def add_unscaled_(memory: Tensor, gradient: Tensor, divisor: float | Tensor) -> Tensor:
    """Add `gradient / divisor` to `memory`, in its dtype, without waiting for a divisor on a CUDA device."""
    if isinstance(divisor, float):
        return memory.add_(gradient, alpha=1 / divisor)
    # With a dimension, or the quotient would be in the gradient's own 16 bit and underflow.
    return memory.addcdiv_(gradient, divisor.reshape(1).to(memory.dtype))
