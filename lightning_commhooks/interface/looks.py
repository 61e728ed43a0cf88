"""Averages that stand in the place of each rank's own tensors while somebody looks, and are kept for the next look."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from lightning_commhooks.collectives.averaging import average_, flat_view
from lightning_commhooks.collectives.group import Group


class Look:
    """Averages of some tensors, which are in their place at first. Collective to make.

    Needs memory for one copy of the tensors: for each rank's own while the averages are in, for the averages while they
    are out. What changes without being told of it, by `tensor.data` and the like, is noticed by sums over all bits.

    Args:
        tensors: what is averaged.
        among: tensors that the averages depend on: with others they are not the same any more.
        group: the ranks.

    Attributes:
        is_in: whether the averages are in the tensors now, and each rank's own in memory.
        is_void: whether the averages are of no use once they are out.
    """

    def __init__(self, tensors: Sequence[Tensor], among: Sequence[Tensor], group: Group) -> None:
        self._tensors, self._among = list(tensors), list(among)
        self._other = [tensor.data.clone() for tensor in tensors]
        self._own_sums = bit_sums(tensors)
        average_(tensors, group)
        self._average_sums = bit_sums(tensors)
        self.is_in, self.is_void = True, False
        self._note_change()

    def _note_change(self) -> None:
        for tensor in self._tensors:
            # So that autograd refuses a backward of what was computed with the parameters before.
            count_up(tensor)
        self._versions = [_version(tensor) for tensor in self._tensors]

    def own(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Tensors that the averages are in, and what each rank has in their place."""
        yield from zip(self._tensors, self._other, strict=True) if self.is_in else ()

    def take_out(self, keep: bool) -> bool:
        """Put each rank's own back, but for what somebody else has changed meanwhile, as by loading weights.

        Args:
            keep: whether to keep the averages, in the memory of each rank's own.

        Returns:
            whether they are kept.
        """
        unchanged = [_version(t) == version for t, version in zip(self._tensors, self._versions, strict=True)]
        keep = keep and all(unchanged) and not self.is_void
        for tensor, other, is_unchanged in zip(self._tensors, self._other, unchanged, strict=True):
            if keep:
                _exchange(tensor, other)
            elif is_unchanged:
                tensor.data.copy_(other)
        self.is_in = False
        self._note_change()
        return keep

    def is_kept(self, among: Sequence[Tensor]) -> bool:
        """Whether averaging these tensors again would give the averages that are out now."""
        return (
            not self.is_in
            and len(among) == len(self._among)
            and all(one is other for one, other in zip(among, self._among, strict=True))
            and [_version(tensor) for tensor in self._tensors] == self._versions
            and bool((bit_sums(self._tensors) == self._own_sums).all())
            and bool((bit_sums(self._other) == self._average_sums).all())
        )

    def put_in(self) -> None:
        """Put averages that were kept in the place of each rank's own again."""
        for tensor, other in zip(self._tensors, self._other, strict=True):
            _exchange(tensor, other)
        self.is_in = True
        self._note_change()


def _exchange(tensor: Tensor, other: Tensor) -> None:
    before = tensor.data.clone()
    tensor.data.copy_(other)
    other.copy_(before)


def put_back(own: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair to the first."""
    for tensor, value in own:
        tensor.data.copy_(value)
        count_up(tensor)


def count_up(tensor: Tensor) -> None:
    """Let autograd know that a tensor was changed."""
    # A buffer that was made in inference mode has no version.
    if not tensor.is_inference():
        increment_version(tensor)


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def bit_sums(tensors: Sequence[Tensor]) -> Tensor:
    """A number for each tensor, shape `(n,)`, int64, on the device of the first: the sum of its bits as integers.

    Other bits give another number, unless they are the same ones in another order.
    """
    sums = [_bit_sum(flat_view(tensor).reshape(-1)) for tensor in tensors]
    if not sums:
        return torch.zeros(0, dtype=torch.int64)
    return torch.stack([own.to(sums[0].device) for own in sums])


def digest(tensors: Sequence[Tensor]) -> int:
    """One number for all tensors, below 2**32. Waits for the device."""
    return zlib.crc32(repr(bit_sums(tensors).tolist()).encode())


def _bit_sum(flat: Tensor) -> Tensor:
    # Of the largest integers, since a sum of small ones takes thirty times as long. Not everywhere in memory there is
    # place for them.
    flat = flat.contiguous()
    is_aligned = flat.storage_offset() * flat.element_size() % 8 == 0
    octets = (flat if is_aligned else flat.clone()).view(torch.uint8)
    end = octets.numel() // 8 * 8
    return octets[:end].view(torch.int64).sum() + octets[end:].sum(dtype=torch.int64)
