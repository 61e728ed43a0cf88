"""The three types that every communication method is made of.

* [`CommHook`][]: what a user writes. Frozen, picklable, no process group inside.
* [`BoundHook`][]: what runs. Owns buffers, random numbers and memory.
* [`Bucket`][] and [`Slot`][]: plain metadata that travels with a flat gradient bucket.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lightning_commhooks.core.collectives import Group


@dataclass(frozen=True)
class Slot:
    """Where one parameter's gradient lies inside a flat bucket.

    Attributes:
        name: the parameter's name in the module that DDP wraps, the key of all hook state.
        shape: sizes of the gradient in *memory* order, outermost dimension first. For a parameter in a
            permuted dense layout (`torch.channels_last`) this is the permutation of its logical shape.
        offset: first element of the gradient in the flat bucket.
    """

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements of the gradient."""
        return torch.Size(self.shape).numel()

    def view(self, flat: Tensor) -> Tensor:
        """The gradient as a view of `flat`, shape `self.shape`."""
        return flat[self.offset : self.offset + self.numel].view(self.shape)


@dataclass(frozen=True)
class Bucket:
    """Metadata of one flat gradient bucket.

    Attributes:
        index: position of the bucket in this backward. Never a key of state: DDP rebuilds its buckets.
        is_last: whether DDP called this the last bucket of the backward. With
            `skip_all_reduce_unused_params=True` a backward may end without one.
        step: number of synchronized backwards before this one, equal on all ranks.
        slots: the parameters in the bucket, in memory order; together they cover it without gaps.
        may_be_unused: DDP runs with `find_unused_parameters=True`. It then throws away what a hook returns
            for a parameter that no rank used, so a hook with memory must not spend its memory on one.
    """

    index: int
    is_last: bool
    step: int
    slots: tuple[Slot, ...]
    may_be_unused: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters in the bucket, in memory order."""
        return tuple(slot.name for slot in self.slots)


class CommHook(ABC):
    """Configuration of a communication method: a frozen dataclass, validated when it is made.

    Subclasses are `@dataclass(frozen=True, kw_only=True)`, set `name`, validate in `__post_init__` with
    `ValueError` naming field, value and allowed range, and return their runtime object from `bind`.

    Attributes:
        name: the string by which users choose the hook.
        aliases: other accepted spellings, such as Accelerate's.
    """

    name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def bind(self, group: Group) -> BoundHook:
        """Make the runtime object for one model and one process group.

        Args:
            group: the collectives the hook may use.

        Returns:
            a new runtime object with fresh state.
        """


class BoundHook(ABC):
    """Runtime state of a communication method for one model.

    The engine calls `reduce` for one bucket after another, in the same order on every rank, never two at
    once. Code in `reduce` is straight-line: collectives of `group` block until their result is there.

    Args:
        group: the collectives the hook may use.
    """

    def __init__(self, group: Group) -> None:
        self.group = group

    @abstractmethod
    def reduce(self, flat: Tensor, bucket: Bucket) -> None:
        """Replace a flat gradient bucket by its average over all ranks, in place.

        Args:
            flat: shape `(numel,)`, any dtype, this rank's gradients; after the call, the averaged gradients.
            bucket: what lies where in `flat`.
        """

    def reduce_sparse(self, grad: Tensor, bucket: Bucket) -> Tensor:
        """Average a sparse COO gradient over all ranks; dense values of it are never compressed.

        Args:
            grad: this rank's sparse gradient of the only parameter in `bucket`.
            bucket: metadata with one slot.

        Returns:
            the averaged sparse gradient, coalesced.
        """
        self.group.counters.numel_uncompressed += grad._values().numel()
        return self.group.all_reduce_sparse_mean(grad)

    def drain_(self, flat: Tensor, bucket: Bucket) -> None:  # noqa: B027  # optional to override
        """Add what this hook still owes the parameters in `bucket` to `flat` and forget it.

        Called once for each parameter when another hook takes over (`Schedule`). The default does nothing,
        right for hooks without error feedback.
        """

    def state_dict(self) -> dict[str, Any]:
        """State as tensors and primitives, equal on all ranks. Collective: every rank calls it."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` of a hook with the same configuration returned."""
        if state:
            raise ValueError(f"{type(self).__name__} keeps no state, but the state to load has {sorted(state)}")

    def compression_stats(self) -> tuple[float, int, int]:
        """Return `(rate, numel_before, numel_after)` as `PowerSGDState.compression_stats` does.

        Raises:
            ValueError: the hook keeps no such statistics.
        """
        raise ValueError(f"{type(self).__name__} keeps no compression_stats(); use metrics()")

    def release(self) -> None:  # noqa: B027  # optional to override
        """Free large memory; called once, when the hook has been used for the last time."""

    def closing_warnings(self, steps: int) -> list[str]:
        """What the user should know at the end of training, one text each.

        Args:
            steps: synchronized backwards so far.
        """
        return []
