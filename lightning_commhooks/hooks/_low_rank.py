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
    return rows.copy_(torch.linalg.qr(rows.mT).Q.mT)


def revive_(rows: Tensor, fresh: Tensor, epsilon: float) -> Tensor:
    """Replace dead rows by fresh random ones, in place.

    A row of Q is dead when its matrix was zero at the last step: it could give P = 0 for ever after.

    Args:
        rows: shape `(k, r, m)`.
        fresh: shape `(k, r, m)`, random rows.
        epsilon: a row is dead when its norm is at most `epsilon` times that of the matrix's longest row.
    """
    norm = torch.linalg.vector_norm(rows, ord=1, dim=2, keepdim=True)
    alive = norm > (epsilon * norm.amax(dim=1, keepdim=True) if epsilon else 0)
    return rows if not alive.is_cuda and alive.all() else rows.copy_(torch.where(alive, rows, fresh))


def low_rank_mean(
    matrices: list[Tensor],
    qs: list[Tensor],
    extra: list[Tensor],
    group: Group,
    wire_dtype: torch.dtype,
    batched: bool = True,
) -> tuple[list[Tensor], list[Tensor]]:
    """Approximate the mean over ranks of each matrix by P^T Q, with one power iteration from a given Q.

    PowerSGD, algorithm 1 of Vogels et al. 2019, https://arxiv.org/abs/1905.13727. Two collectives per dtype.

    Args:
        matrices: this rank's matrices, batches of shape `(k, n, m)`, float32 or float64.
        qs: orthonormal start, batches of shape `(k, r, m)`, equal on all ranks.
        extra: contiguous tensors that become their sum over ranks, in the first of the collectives.
        group: the ranks.
        wire_dtype: dtype in which factors travel.
        batched: multiply the k matrices of a batch in one product.

    Returns:
        `(ps, qs)`: orthonormal P, batches of shape `(k, r, n)`, and Q, `(k, r, m)`, equal on all ranks.
    """
    multiply = torch.bmm if batched else _multiply_one_by_one
    ps = [multiply(q, matrix.mT).to(wire_dtype) for q, matrix in zip(qs, matrices, strict=True)]
    group.all_reduce_coalesced_([*extra, *ps])
    ps = [orthonormalize_(p.to(matrix.dtype)) for p, matrix in zip(ps, matrices, strict=True)]
    qs = [multiply(p, matrix).div_(group.size).to(wire_dtype) for p, matrix in zip(ps, matrices, strict=True)]
    group.all_reduce_coalesced_(qs)
    return ps, [q.to(matrix.dtype) for q, matrix in zip(qs, matrices, strict=True)]


def _multiply_one_by_one(factors: Tensor, matrices: Tensor) -> Tensor:
    return torch.stack([torch.mm(factor, matrix) for factor, matrix in zip(factors, matrices, strict=True)])


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of residuals, products and orthogonalization: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def factor_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which factors of a gradient travel: its own, but bfloat16 for float16.

    A row's norm may exceed the range of float16 though none of its elements does.
    """
    return torch.bfloat16 if dtype == torch.float16 else dtype


def all_finite(factors: list[Tensor]) -> Tensor:
    """Boolean, one element: whether all factors are. They are sums over ranks, so all ranks agree."""
    return torch.stack([torch.isfinite(f).all() for f in factors]).all() if factors else torch.tensor(True)


def repay_(residual: Tensor, sent: Tensor, gradient: Tensor, finite: Tensor) -> None:
    """Take what was sent from the residual, to which this rank's gradient has been added.

    If the step is not finite, the gradient is taken instead: the residual is what it was before the step,
    and zero where the gradient was not finite. Does not synchronize with a CUDA device.

    Args:
        residual: any shape.
        sent: same shape, what the optimizer gets to see.
        gradient: same shape.
        finite: boolean, one element.
    """
    if not finite.is_cuda and finite:
        residual.sub_(sent)
    else:
        residual.sub_(torch.where(finite, sent, gradient)).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def keep_(memory: Tensor, update: Tensor, finite: Tensor) -> None:
    """Write `update` to `memory` if the step is finite, without synchronizing with a CUDA device."""
    memory.copy_(torch.where(finite, update, memory))
