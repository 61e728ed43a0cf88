"""Averages that temporarily replace each rank's own tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version

from lightning_commhooks.collectives.averaging import own_part


class Swap:
    """Tensors that hold their averages first, and a copy of each rank's own values. The constructor is collective.

    Does not notice changes that bypass autograd, such as changes of `tensor.data`.

    Args:
        tensors: the tensors.
        average: replaces the tensors by averages, or by any values that all ranks share. Collective.

    Attributes:
        is_in: whether the tensors hold the averages and the copy each rank's own values, or vice versa.
        is_outdated: whether the tensors have changed since they were averaged.
        contents: digests of the model's buffers with each rank's own values and with the averages, to detect changes.
    """

    def __init__(self, tensors: Sequence[Tensor], average: Callable[[], None]) -> None:
        self._tensors = [*map(own_part, tensors)]
        self._copies = [tensor.data.clone() for tensor in self._tensors]
        average()
        self.is_in, self.is_outdated = True, False
        self.contents = (0, 0)
        self._note_change()

    def _note_change(self) -> None:
        count_up(self._tensors)
        self._versions = [version_of(tensor) for tensor in self._tensors]

    def own(self) -> dict[int, Tensor]:
        """Return this rank's own values by the `id` of the tensor that holds the average."""
        return {id(t): own for t, own in zip(self._tensors, self._copies, strict=True)} if self.is_in else {}

    def exchange(self) -> None:
        """Exchange averages and own values, except in tensors that were changed meanwhile, as by loading weights."""
        for tensor, copy, version in zip(self._tensors, self._copies, self._versions, strict=True):
            if version_of(tensor) == version and tensor.shape == copy.shape:
                before = tensor.data.clone()
                tensor.data.copy_(copy)
                copy.copy_(before)
            else:
                self.is_outdated = True
        self.is_in = not self.is_in
        self._note_change()

    def paused(self) -> Callable[[], None]:
        """Ignore changes until the returned function is called."""
        same = [version_of(tensor) == version for tensor, version in zip(self._tensors, self._versions, strict=True)]

        def go_on() -> None:
            noted = zip(self._tensors, self._versions, same, strict=True)
            self._versions = [version_of(tensor) if is_same else version for tensor, version, is_same in noted]

        return go_on

    def is_current(self, among: Iterable[Any]) -> bool:
        """Return whether the tensors are unchanged and still `among` these objects."""
        missing = {id(tensor) for tensor in self._tensors}.difference(id(own_part(one)) for one in among)
        is_same = [version_of(tensor) for tensor in self._tensors] == self._versions
        return is_same and not (self.is_outdated or missing)


def count_up(tensors: Iterable[Tensor]) -> None:
    """Tell autograd of a change, so that it rejects a backward through earlier computations."""
    # A buffer that was created in inference mode has no version.
    increment_version([own_part(tensor) for tensor in tensors if not tensor.is_inference()])


def version_of(tensor: Tensor) -> int:
    """Return autograd's count of changes to a tensor; -1 if it does not count."""
    return -1 if tensor.is_inference() else tensor._version
