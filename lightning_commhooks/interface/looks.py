"""Averages that stand in the place of each rank's own tensors while somebody looks, and are kept for the next look."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor
from torch.autograd.graph import increment_version

from lightning_commhooks.collectives.averaging import average_, flat_view
from lightning_commhooks.collectives.group import Group


class Look:
    """Averages of some tensors, which are in their place at first. Collective to make.

    Needs memory for one copy of the tensors: for each rank's own while the averages are in, for the averages while they
    are out. Does not notice changes that autograd does not, as by `tensor.data`.

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
        average_(tensors, group)
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


def digest(tensors: Sequence[Tensor]) -> int:
    """Hash of the bytes of all tensors, below 2**56. Copies them to the host."""
    found = hashlib.blake2b(digest_size=7)
    for tensor in tensors:
        on_host = flat_view(tensor).cpu().contiguous()
        found.update((ctypes.c_char * on_host.nbytes).from_address(on_host.data_ptr()) if on_host.nbytes else b"")
    return int.from_bytes(found.digest(), "big")
