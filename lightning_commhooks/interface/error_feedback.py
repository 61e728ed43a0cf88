"""Error feedback: the base class of hooks that send the compression error in later steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.steps import Steps, checked
from lightning_commhooks.interface.accumulation import is_one, scale_
from lightning_commhooks.interface.bucket import Bucket, Slot
from lightning_commhooks.interface.hook import BoundHook
from lightning_commhooks.interface.precision import add_unscaled_, all_finite, spoil_unless_, to_gradient, work_dtype
from lightning_commhooks.interface.state import Shapes, StateReader


class ErrorFeedback(BoundHook):
    """A hook that sends an approximation, and the rest in later steps: subclasses implement `average`.

    Error feedback (Seide et al. 2014; Karimireddy et al. 2019, https://arxiv.org/abs/1901.09847, algorithm 2) adds the
    residual, the part of a step that was not sent, to the gradients of the next step. Residuals are stored by the
    parameter's name, in at least float32 and in units of the unscaled loss. They survive changes of the loss scale,
    bucket rebuilds, unused parameters, checkpoints, changes of the number of ranks, and a `Schedule` that replaces the
    hook.

    Each residual is changed in place. A step with inf or NaN on any rank resets all residuals to zero, since they
    include its gradients. The rest of the memory is restored to its value before that step.

    Args:
        group: the collectives the hook may use.
        hook: its configuration, `self.hook`: the `CommHook` whose `bind` creates this object. If it has a field
            `use_error_feedback` that is false, there are no residuals.
    """

    has_memory = True
    scales_gradients = True

    def __init__(self, group: Group, hook: Any = None) -> None:
        super().__init__(group)
        self.hook = hook
        self.has_residuals: bool = getattr(hook, "use_error_feedback", True)
        # The flat residual of each bucket, by names of its parameters; the tensors in `memory` are views of it.
        self._of_buckets: dict[tuple[str, ...], Tensor] = {}
        self._checked: set[tuple[str, str]] = set()
        # The slots of the current buckets and the results of `lay_out`, by names of their parameters.
        self.plans: dict[tuple[str, ...], tuple[Sequence[Slot], Any]] = {}
        # Memory to commit if the step is finite.
        self._staged: list[tuple[str, str, Tensor | None]] = []

    def average(self, residual: Tensor, bucket: Bucket, ranks: Group) -> Steps[tuple[Tensor, Tensor]]:
        """Approximate the mean over ranks of `residual`.

        A generator, like `reduce`.

        Args:
            residual: shape `(numel,)`, float32 or float64: the sum of this rank's gradients and its previous residual.
                Do not change it. All elements are NaN if any is inf or NaN, so that the other ranks receive NaN.
            bucket: the layout of `residual`, by `bucket.slots`.
            ranks: the collectives for this bucket.

        Returns:
            the approximation, rank-uniform, and the part of `residual` that this rank has sent, both in the shape of
            `residual`. The mean over ranks of the second has to equal the first, or the difference is lost.
        """
        raise NotImplementedError(f"{type(self).__name__} is to write average()")

    def average_(self, residual: Tensor | None, bucket: Bucket, ranks: Group) -> Steps[Tensor | None]:
        """Add the gradients to the residual, replace them by the mean over ranks, and subtract the part that was sent.

        The default uses `average`. Hooks override this method to save passes over memory.

        Args:
            residual: shape `(numel,)`, float32 or float64, changed in place. `None`: without error feedback.
            bucket: this rank's gradients, replaced by the averaged gradients, and their layout. Gradients are divided
                by `bucket.divisor` when they are added to the residual, and the mean is multiplied by
                `bucket.loss_scale`.
            ranks: the collectives for this bucket.

        Returns:
            see `BoundHook.reduce`.
        """
        flat = bucket.flat
        if residual is None:
            residual = torch.zeros_like(flat, dtype=work_dtype(flat.dtype))
        add_unscaled_(residual, flat, bucket.divisor)
        spoil_unless_(all_finite(residual), [residual])
        averaged = yield from checked(self.average(residual, bucket, ranks), self, "average")
        if not isinstance(averaged, tuple) or len(averaged) != 2:
            raise TypeError(
                f"{type(self).__name__}.average returned {type(averaged).__name__}: end with `return mean, sent`, the "
                "approximation, and what of `residual` this rank has sent"
            )
        mean, sent = averaged
        if not mean.shape == sent.shape == residual.shape:
            raise TypeError(
                f"{type(self).__name__}.average returned `mean` of shape {tuple(mean.shape)} and `sent` of shape "
                f"{tuple(sent.shape)}: both need the shape of `residual`, {tuple(residual.shape)}"
            )
        rounded = to_gradient(mean if is_one(bucket.loss_scale) else mean * bucket.loss_scale, flat.dtype)
        flat.copy_(rounded)
        left = mean - rounded.to(residual.dtype) / bucket.loss_scale if flat.dtype != residual.dtype else None
        # Not earlier: `mean` may be `residual`.
        residual.sub_(sent)
        if left is not None:
            residual.add_(left)
        return None

    def compressed(self, bucket: Bucket) -> Sequence[Slot] | None:
        """Return the slots of a bucket that have residuals, all by default; `None`: do not compress the bucket."""
        return bucket.slots

    def lay_out(self, bucket: Bucket) -> Any:
        """Create the result of `plan` for a bucket; for hooks that divide buckets."""

    def plan(self, bucket: Bucket) -> Any:
        """Return the result of `lay_out` for a bucket, which is called again after DDP rebuilds its buckets."""
        names = bucket.names
        if names not in self.plans:
            is_apart = set(names).isdisjoint
            self.plans = {other: plan for other, plan in self.plans.items() if is_apart(other)}
            self.plans[names] = bucket.slots, self.lay_out(bucket)
            # Drop memory of several parameters together whose bucket no longer exists.
            for key in [key for key in self.memory if "\n" in key and not is_apart(key.split("\n"))]:
                if tuple(key.split("\n")) != names:
                    del self.memory[key]
        return self.plans[names][1]

    def remembered(self, name: str, make: Callable[[], Tensor], kind: str = "shared") -> Tensor:
        """Return rank-uniform memory of a parameter, such as the start of an iterative approximation.

        Args:
            name: the parameter's name.
            make: creates the first value, floating-point and rank-uniform; a saved value of another shape is dropped.
            kind: the kind of memory, if there are several.

        Returns:
            the value that `remember` got in the last finite step, or the first value. Do not change it.
        """
        entry = self.memory.setdefault(name, {})
        if kind not in entry or (name, kind) not in self._checked:
            first, saved = make(), entry.get(kind)
            entry[kind] = first if saved is None or saved.shape != first.shape else saved.to(first)
            self._checked.add((name, kind))
        return entry[kind]

    def remember(self, name: str, value: Tensor | None, kind: str = "shared") -> None:
        """Make `remembered` return a tensor from the next step on, if this step is finite. Do not change it afterwards.

        `None`: clear the memory.
        """
        self._staged.append((name, kind, value))

    def reduce(self, bucket: Bucket, ranks: Group) -> Steps[Tensor | None]:
        flat = bucket.flat
        slots = self.compressed(bucket) if flat.is_floating_point() and flat.numel() else None
        if slots is None:
            yield from self._average_as_it_is(bucket, ranks)
            return None
        residual = self._residual(bucket, slots) if slots and self.has_residuals else None
        if bucket.unused is None or residual is None:
            return (yield from self.average_(residual, bucket, ranks))
        # Keep the residual and the gradient of a parameter that no rank uses: DDP discards a hook's result for it, or
        # `.grad` is a view of the bucket.
        flats = residual, bucket.flat
        before = {slot: [slot.view(one).clone() for one in flats] for slot in slots if slot.name in bucket.unused}
        used = bucket.used(slots, residual)
        counting = ranks.not_gradients().all_reduce_(used)
        finite = yield from self.average_(residual, bucket, ranks)
        yield from counting
        for slot, is_used in zip(slots, used > 0, strict=True):
            if slot in before:
                for flat, kept in zip(flats, before[slot], strict=True):
                    now = slot.view(flat)
                    now.copy_(torch.where(is_used, now, kept))
        return finite

    def _residual(self, bucket: Bucket, slots: Sequence[Slot]) -> Tensor:
        """Return the residual of a bucket, in its order. When DDP rebuilds its buckets, residuals follow by name."""
        if bucket.names not in self._of_buckets:
            residual = torch.zeros_like(bucket.flat, dtype=work_dtype(bucket.flat.dtype))
            for slot in slots:
                place, entry = slot.view(residual), self.memory.setdefault(slot.name, {})
                if "residual" in entry:
                    place.copy_(entry["residual"])
                entry["residual"] = place
            others = {names: kept for names, kept in self._of_buckets.items() if not set(names) & set(bucket.names)}
            self._of_buckets = {**others, bucket.names: residual}
        return self._of_buckets[bucket.names]

    def _average_as_it_is(self, bucket: Bucket, ranks: Group) -> Steps[None]:
        """Average gradients that are not compressed, or no longer since DDP has rebuilt its buckets."""
        flat = bucket.flat
        scale_(flat, bucket.scale)
        slots = [slot for slot in bucket.slots if "residual" in self.memory.get(slot.name, {})]
        if slots and bucket.unused is not None:
            used = (yield from ranks.not_gradients().all_reduce_(bucket.used(slots, flat))).tolist()
            slots = [slot for slot, is_used in zip(slots, used, strict=True) if is_used]
        self._flush_(slots, bucket)
        yield from ranks.all_reduce_mean_(flat)

    def flush_(self, bucket: Bucket) -> None:
        self._flush_(bucket.slots, bucket)

    def _flush_(self, slots: Sequence[Slot], bucket: Bucket) -> None:
        for slot in slots:
            residual = self.memory.pop(slot.name, {}).get("residual")
            if residual is not None:
                slot.view(bucket.flat).add_(residual * bucket.loss_scale)
                self._of_buckets = {}  # remaining residuals are views in `memory`

    def end_step(self, finite: Tensor) -> None:
        if finite:
            for name, kind, value in self._staged:
                if value is None:
                    self.memory.get(name, {}).pop(kind, None)
                else:
                    self.memory.setdefault(name, {})[kind] = value
        else:
            for residual in (*self._of_buckets.values(), *self.residuals()):
                residual.zero_()
        self._staged = []

    def kept(self, shapes: list[tuple[int, ...]]) -> Shapes:
        return {"residual": shapes[0], "shared": None}

    def load_state_dict(self, state: dict[str, Any], reader: StateReader) -> None:
        super().load_state_dict(state, reader)
        self._of_buckets, self._staged, self._checked = {}, [], set()

    def release(self) -> None:
        super().release()
        self._of_buckets, self._staged, self.plans = {}, [], {}
