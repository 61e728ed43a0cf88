"""Averages that stand in the place of each rank's own tensors for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version

from lightning_commhooks.collectives.averaging import own_part


class Swap:
    """Averages of tensors, in their place at first, and each rank's own in a copy. Collective to make.

    Does not notice changes that autograd does not, as by `tensor.data`.

    Args:
        tensors: the tensors.
        average: puts averages in their place, or what else all ranks are to see. Collective.

    Attributes:
        is_in: whether the averages are in place, and each rank's own in the copy; otherwise the other way round.
        is_outdated: whether tensors have changed since they were averaged.
        contents: of the model's buffers, with each rank's own in place and with the averages: numbers that tell whether
            they have changed.
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
        """Each rank's own by the `id` of the tensor whose average is in place."""
        return {id(t): own for t, own in zip(self._tensors, self._copies, strict=True)} if self.is_in else {}

    def exchange(self) -> None:
        """Exchange averages and each rank's own, but for what somebody has changed meanwhile, as by loading weights."""
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
        """Do not take for a change what happens until the returned function is called."""
        same = [version_of(tensor) == version for tensor, version in zip(self._tensors, self._versions, strict=True)]

        def go_on() -> None:
            noted = zip(self._tensors, self._versions, same, strict=True)
            self._versions = [version_of(tensor) if is_same else version for tensor, version, is_same in noted]

        return go_on

    def is_current(self, among: Iterable[Any]) -> bool:
        """Whether nothing has changed since, and the tensors are still `among` these objects."""
        missing = {id(tensor) for tensor in self._tensors}.difference(id(own_part(one)) for one in among)
        is_same = [version_of(tensor) for tensor in self._tensors] == self._versions
        return is_same and not (self.is_outdated or missing)


def count_up(tensors: Iterable[Tensor]) -> None:
    """Let autograd know of a change, so that it refuses a backward of what was computed before."""
    # A buffer that was made in inference mode has no version.
    increment_version([own_part(tensor) for tensor in tensors if not tensor.is_inference()])


def version_of(tensor: Tensor) -> int:
    """How often autograd knows a tensor to have changed; -1 if it does not count."""
    return -1 if tensor.is_inference() else tensor._version
