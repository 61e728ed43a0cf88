"""Math shared by `powersgd` and `batched_powersgd`. Stateless.

Factors are stored rank-first, P as `(k, r, n)` and Q as `(k, r, m)`: multiplying a wide matrix by a few rows
from the left is several times faster than by a few columns from the right.

Legend: k matrices of equal shape, n rows, m columns, r rank, w ranks (processes).
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from lightning_commhooks.core.collectives import Group


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
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(like)


def orthonormalize_(rows: Tensor) -> Tensor:
    """Replace each matrix's rows by an orthonormal basis of their span, in place.

    By Householder QR, which also gives orthonormal rows for dependent, zero, tiny and huge ones: where the
    rows span less than r dimensions, the rest of the basis is arbitrary. (PyTorch's Gram-Schmidt divides by
    zero there, or loses orthogonality.) Non-finite input gives non-finite rows.

    Args:
        rows: shape `(k, r, n)`, r <= n, float32 or float64.
    """
    # Norms are sums of squares: scaling keeps them from overflow and underflow.
    largest = rows.abs().amax(dim=2, keepdim=True)
    rows.div_(torch.where(largest > 0, largest, 1))
    if rows.shape[1] == 1:
        norm = torch.linalg.vector_norm(rows, dim=2, keepdim=True)
        zero = norm == 0
        rows.div_(torch.where(zero, 1, norm))
        rows[:, :, :1].add_(zero)
        return rows
    return rows.copy_(torch.linalg.qr(rows.mT).Q.mT)


def revive_(rows: Tensor, fresh: Tensor, epsilon: float) -> Tensor:
    """Replace dead rows by fresh random ones, in place.

    A row of Q is dead when its matrix was zero at the last step: it would give P = 0 for ever after.

    Args:
        rows: shape `(k, r, m)`.
        fresh: shape `(k, r, m)`, random rows.
        epsilon: a row is dead when its norm is at most `epsilon` times that of the matrix's longest row.
    """
    norm = rows.abs().amax(dim=2, keepdim=True)
    dead = ~(norm > epsilon * norm.amax(dim=1, keepdim=True))
    return rows.copy_(torch.where(dead, fresh, rows))


def low_rank_mean(
    matrices: list[Tensor], qs: list[Tensor], extra: list[Tensor], group: Group, wire_dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor]]:
    """Approximate the mean over ranks of each matrix by P^T Q, with one power iteration from a given Q.

    PowerSGD, algorithm 1 of Vogels et al. 2019, https://arxiv.org/abs/1905.13727. Two collectives per dtype.

    Args:
        matrices: this rank's matrices, batches of shape `(k, n, m)`, float32 or float64.
        qs: orthonormal start, batches of shape `(k, r, m)`, equal on all ranks.
        extra: contiguous tensors that become their sum over ranks, in the first of the collectives.
        group: the ranks.
        wire_dtype: dtype in which factors travel.

    Returns:
        `(ps, qs)`: orthonormal P, batches of shape `(k, r, n)`, and Q, `(k, r, m)`, equal on all ranks.
    """
    ps = [torch.bmm(q, matrix.mT).to(wire_dtype) for q, matrix in zip(qs, matrices, strict=True)]
    group.all_reduce_coalesced_([*extra, *ps])
    ps = [orthonormalize_(p.to(matrix.dtype)) for p, matrix in zip(ps, matrices, strict=True)]
    qs = [torch.bmm(p, matrix).div_(group.size).to(wire_dtype) for p, matrix in zip(ps, matrices, strict=True)]
    group.all_reduce_coalesced_(qs)
    return ps, [q.to(matrix.dtype) for q, matrix in zip(qs, matrices, strict=True)]


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of residuals, products and orthogonalization: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def factor_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which factors of a gradient travel: its own, but bfloat16 for float16.

    A row's norm may exceed the range of float16 though none of its elements does.
    """
    return torch.bfloat16 if dtype == torch.float16 else dtype


def store_(memory: Tensor, value: Tensor, sent: Tensor | float, keep: Tensor) -> None:
    """Write `value - sent` to `memory` if `keep`, without synchronizing with a CUDA device.

    Args:
        memory: any shape.
        value: same shape; may be non-finite if it is not kept.
        sent: what of it was sent, same shape, or 0.
        keep: boolean, one element.
    """
    if keep.is_cuda:
        memory.copy_(torch.where(keep, value - sent, memory))
    elif keep:
        torch.sub(value, sent, out=memory)
