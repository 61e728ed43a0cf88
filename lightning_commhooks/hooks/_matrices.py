"""The matrices of one shape in a bucket: products with their residuals, in as few passes over memory as can be.

Legend: k matrices of n rows and m columns; P, shape `(k, r, n)`, and Q, `(k, r, m)`, of rank r.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_commhooks.interface.bucket import Bucket, Slot
from lightning_commhooks.interface.precision import add_unscaled_, to_gradient

# 1 MB of float32: half of what a core's second-level cache holds on common servers.
_BLOCK_NUMEL = 2**18


@dataclass
class Matrices:
    """Where the matrices are in a flat bucket.

    Attributes:
        gradients: those of each matrix, neighbours in the bucket; the matrix has zeros after the last.
        n: rows.
        m: columns.
        at_once: whether matrices are multiplied together, from a copy, and not one after another in blocks of rows.
        fresh: random factors to begin with, by kind: `"factor"`, Q, and `"factor_p"`, P.
    """

    gradients: Sequence[tuple[Slot, ...]]
    n: int
    m: int
    at_once: bool
    fresh: dict[str, Tensor]
    _together: Tensor | None = None

    @property
    def keys(self) -> list[str]:
        """Names of matrices: those of their parameters."""
        return ["\n".join(slot.name for slot in slots) for slots in self.gradients]

    def of(self, flat: Tensor) -> Iterator[Tensor]:
        """The gradients of each matrix, one behind the other, as a view of a flat bucket."""
        for slots in self.gradients:
            yield flat[slots[0].offset : slots[-1].offset + slots[-1].numel]

    def add_and_multiply_(
        self, residual: Tensor, flat: Tensor, start: Tensor, bucket: Bucket, transposed: bool = False
    ) -> Tensor:
        """Add the gradients to their residuals, which are M then, shape `(k, n, m)`.

        On CPU in blocks of rows that stay in the cache until they are multiplied.

        Args:
            residual: of the bucket, changed in place.
            flat: the bucket.
            start: Q, or P if `transposed`.
            bucket: its metadata.
            transposed: whether M is multiplied, and not M^T.

        Returns:
            the products of `start` with M^T, shape `(k, r, n)`, or with M, shape `(k, r, m)`.
        """
        k, r, _ = start.shape
        product = start.new_zeros((k, r, self.m if transposed else self.n))
        if self.at_once:
            for m, gradient in zip(self.of(residual), self.of(flat), strict=True):
                add_unscaled_(m, gradient, bucket.divisor)
            filled = [pad(m, (0, self.n * self.m - m.numel())).view(self.n, self.m) for m in self.of(residual)]
            self._together = torch.stack(filled)
            return torch.bmm(start, self._together if transposed else self._together.mT, out=product)
        for i, (m, gradient) in enumerate(zip(self.of(residual), self.of(flat), strict=True)):
            for rows, block in self._blocks(m):
                add_unscaled_(m[block], gradient[block], bucket.divisor)
                matrix = m[block].view(-1, self.m)
                if transposed:
                    product[i].addmm_(start[i][:, rows], matrix)
                else:
                    torch.mm(start[i], matrix.t(), out=product[i][:, rows])
        return product

    def multiply(self, residual: Tensor, p: Tensor) -> Tensor:
        """Return P M, shape `(k, r, m)`, once gradients were added."""
        if self._together is not None:
            return torch.bmm(p, self._together)
        matrices = (m.view(self.n, self.m) for m in self.of(residual))
        return torch.stack([torch.mm(own, m) for own, m in zip(p, matrices, strict=True)])

    def write_and_subtract_(self, residual: Tensor, flat: Tensor, p: Tensor, q: Tensor, bucket: Bucket) -> None:
        """Write P^T Q to the gradients, times the loss scale, and take it from the residual as it was rounded."""
        self._together = None
        for i, (m, gradient) in enumerate(zip(self.of(residual), self.of(flat), strict=True)):
            scaled = q[i] * bucket.loss_scale
            is_whole = gradient.dtype == q.dtype and gradient.numel() == self.n * self.m
            for rows, block in self._blocks(m):
                some, written = p[i][:, rows].t(), gradient[block]
                # Of one row, a product of matrices takes a third longer.
                multiply = torch.mul if len(scaled) == 1 else torch.mm
                if is_whole:
                    multiply(some, scaled, out=written.view(-1, self.m))
                else:
                    product = multiply(some, scaled).view(-1)
                    written.copy_(to_gradient(product[: written.numel()], written.dtype))
                add_unscaled_(m[block], written, -bucket.loss_scale)

    def _blocks(self, m: Tensor) -> Iterator[tuple[slice, slice]]:
        """Rows, and their elements."""
        step = max(1, _BLOCK_NUMEL // self.m) if m.is_cpu else self.n
        for first in range(0, self.n, step):
            yield slice(first, first + step), slice(first * self.m, (first + step) * self.m)
