"""Math shared by `powersgd` and `batched_powersgd`. Stateless.

Factors are stored rank-first, P as `(k, r, n)` and Q as `(k, r, m)`: multiplying a wide matrix by a few rows
from the left is several times faster than by a few columns from the right.

Legend: k matrices of equal shape, n rows, m columns, r rank.
"""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor


def random_factor(key: str, shape: tuple[int, ...], seed: int, step: int, like: Tensor) -> Tensor:
    """Standard normal numbers that depend on the arguments only, so are equal on all ranks and devices.

    Args:
        key: the parameter's name, so that no order of buckets matters.
        shape: of the result.
        seed: the user's `random_seed`.
        step: changes from step to step where a factor is drawn anew at each.
        like: gives dtype and device of the result.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{step}:{key}".encode()))
    factor = torch.randn(shape, generator=generator, dtype=torch.float32)
    # Pinned, a copy does not wait for the device.
    return factor.pin_memory().to(like, non_blocking=True) if like.is_cuda else factor.to(like)


def orthonormal_basis(rows: Tensor) -> Tensor:
    """Return an orthonormal basis of the span of each matrix's rows, same shape.

    By Householder QR, which also gives orthonormal rows for dependent, zero, tiny and huge ones: where the
    rows span less than r dimensions, the rest of the basis is arbitrary. (PyTorch's Gram-Schmidt divides by
    zero there, or loses orthogonality.) Non-finite input gives non-finite rows.

    Args:
        rows: shape `(k, r, n)`, r <= n, float32 or float64.
    """
    # Norms are sums of squares: scaling keeps them from overflow and underflow.
    largest = torch.linalg.vector_norm(rows, math.inf, dim=2, keepdim=True).clamp_min_(torch.finfo(rows.dtype).tiny)
    basis: Tensor = torch.linalg.qr((rows / largest).mT).Q
    return basis.mT.contiguous()


def revive(rows: Tensor, fresh: Tensor, epsilon: float) -> Tensor:
    """Return `rows` with dead ones replaced by fresh random ones.

    A row of Q is dead when its matrix was zero at the last step: it could give P = 0 for ever after. So is one of P.

    Args:
        rows: shape `(k, r, m)`, or `(k, r, n)`.
        fresh: of that shape, random rows.
        epsilon: a row is dead when its norm is at most `epsilon` times that of the matrix's longest row.
    """
    norm = torch.linalg.vector_norm(rows, ord=1, dim=2, keepdim=True)
    alive = norm > (epsilon * norm.amax(dim=1, keepdim=True) if epsilon else 0)
    return torch.where(alive, rows, fresh)


def factor_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which factors of a gradient travel: its own, but bfloat16 for float16.

    A row's norm may exceed the range of float16 though none of its elements does.
    """
    return torch.bfloat16 if dtype == torch.float16 else dtype


def sent_is_finite(p: Tensor, q: Tensor, dtype: torch.dtype) -> Tensor:
    """Boolean, one element: whether P^T Q is finite in that dtype. False if there is NaN in P or Q.

    Args:
        p: shape `(k, r, n)`, as it was multiplied.
        q: shape `(k, r, m)`; the rows of one of them are orthonormal.
        dtype: of the gradients.
    """
    # No element of P^T Q is larger than r times the product of the largest ones.
    limit = torch.finfo(q.dtype if dtype == torch.float16 else dtype).max
    largest_p, largest_q = (torch.linalg.vector_norm(factor, math.inf) for factor in (p, q))
    finite: Tensor = largest_p * largest_q * q.shape[1] < limit
    return finite
