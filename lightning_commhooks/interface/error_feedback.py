"""Hooks with error feedback: the base that leaves one function to write."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_commhooks.collectives.group import Group
from lightning_commhooks.interface.accumulation import is_one, scale_
from lightning_commhooks.interface.bucket import Bucket, Slot
from lightning_commhooks.interface.by_parameter import BoundByParameter, Entry, Plan, Shapes
from lightning_commhooks.interface.memory import Memory, all_finite, spoil_unless_
from lightning_commhooks.interface.precision import add_unscaled, to_gradient, work_dtype


@dataclass
class _Remembered(Plan):
    """The memory of one bucket.

    Attributes:
        slots: the parameters in it.
        residual: what this rank owes, one gradient after another, shape of the bucket.
        common: what is equal on all ranks, by parameter. Replaced, not changed, for readers in other threads.
    """

    slots: tuple[Slot, ...]
    residual: Memory
    common: dict[str, Memory]

    @property
    def memories(self) -> list[Memory]:
        return [self.residual, *self.common.values()]

    def entries(self) -> dict[str, Entry]:
        common = {name: {"common": memory.value} for name, memory in self.common.items()}
        return {
            slot.name: {"residual": slot.view(self.residual.value), **common.get(slot.name, {})} for slot in self.slots
        }

    def owed(self) -> Iterator[Tensor]:
        yield self.residual.value


class ErrorFeedback(BoundByParameter[_Remembered]):
    """A hook that sends an approximation, and owes the rest: subclasses write `average`.

    Error feedback (Seide et al. 2014; Karimireddy et al. 2019, https://arxiv.org/abs/1901.09847, algorithm 2): what a
    step leaves out is added to the gradients of the next one. This keeps it by the name of the parameter, at least in
    float32 and in units of the loss itself, through loss scales, steps with inf or NaN, buckets that DDP builds anew,
    parameters that are not used, checkpoints, other numbers of ranks, and a `Schedule` that hands over to another hook.

    Args:
        group: the collectives the hook may use.
        hook: what `average` reads options from, as `self.hook`; the `CommHook` whose `bind` this is made in.
    """

    scales_gradients = True
    lasting = ("common",)

    def __init__(self, group: Group, hook: Any = None) -> None:
        super().__init__(group)
        self.hook = hook

    @abstractmethod
    def average(self, owed: Tensor, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """Approximate the mean over ranks of `owed`.

        Called for one bucket after another, in the same order on all ranks. Collectives of `self.group` block.

        Args:
            owed: shape `(numel,)`, float32 or float64: this rank's gradients and what it owed before. To be left as it
                is. NaN all over when any of it is inf or NaN, so that whatever is sent tells the other ranks.
            bucket: what lies where in `owed`, as `bucket.slots`.

        Returns:
            the approximation, equal on all ranks; and what of `owed` this rank has sent. Both of the shape of `owed`.
        """

    def remembered(self, slot: Slot, bucket: Bucket, make: Callable[[], Tensor]) -> Memory:
        """What the hook remembers of a parameter that is equal on all ranks, such as a start for the next step.

        Args:
            slot: the parameter, one of `bucket.slots`.
            bucket: the bucket that `average` is called for.
            make: gives the first value, floating-point, equal on all ranks; a saved one of another shape is dropped.

        Returns:
            a memory. Read `value`, and write the next one, all of it, to `next()`.
        """
        plan = self._plans[bucket.names]
        if slot.name not in plan.common:
            first, saved = make(), self._take(slot.name, "common").get("common")
            if saved is not None and saved.shape == first.shape:
                first = saved.to(first)
            plan.common = {**plan.common, slot.name: Memory(first)}
        return plan.common[slot.name]

    def reduce(self, flat: Tensor, bucket: Bucket) -> None:
        if not flat.is_floating_point() or not flat.numel():
            self.group.counters.numel_uncompressed += flat.numel()
            self.group.all_reduce_mean_(scale_(flat, bucket.scale))
            return
        self.group.counters.numel_compressed += flat.numel()
        residual = self._plan(flat, bucket).residual
        owed = add_unscaled(residual.value, flat, bucket.divisor, out=residual.next())
        spoil_unless_(all_finite(owed), [owed])
        mean, sent = self.average(owed, bucket)
        rounded = to_gradient(mean if is_one(bucket.loss_scale) else mean * bucket.loss_scale, flat.dtype)
        flat.copy_(rounded)
        left = mean - rounded.to(owed.dtype) / bucket.loss_scale if flat.dtype != owed.dtype else None
        # From here on: `mean` may be `owed`.
        owed.sub_(sent)
        if left is not None:
            owed.add_(left)
        if bucket.unused is not None:
            self._keep_what_no_rank_uses_(owed, residual.value, bucket)

    def _keep_what_no_rank_uses_(self, owed: Tensor, before: Tensor, bucket: Bucket) -> None:
        """DDP throws away what a hook returns for a parameter that no rank uses: it is owed as before."""
        used = self.group.all_reduce_(bucket.used(bucket.slots, owed)) > 0
        for slot, is_used in zip(bucket.slots, used, strict=True):
            slot.view(owed).copy_(torch.where(is_used, slot.view(owed), slot.view(before)))

    def _make_plan(self, flat: Tensor, bucket: Bucket) -> _Remembered:
        residual = flat.new_zeros(flat.shape, dtype=work_dtype(flat.dtype))
        for slot in bucket.slots:
            if entry := self._take(slot.name, "residual"):
                slot.view(residual).copy_(entry["residual"])
        return _Remembered(bucket.slots, Memory(residual), {})

    def _entry_shapes(self, shapes: list[tuple[int, ...]]) -> Shapes:
        return {"residual": shapes[0], "common": None}
