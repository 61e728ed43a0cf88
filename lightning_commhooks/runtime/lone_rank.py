"""Hooks on a single rank, which has nothing to send: they leave gradients unchanged."""

from __future__ import annotations

import dataclasses

from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.steps import Steps, result
from lightning_commhooks.interface.accumulation import scale_
from lightning_commhooks.interface.bucket import Bucket
from lightning_commhooks.interface.hook import BoundHook
from lightning_commhooks.interface.wrapper import BoundAround, BoundWrapper


class _Unused(BoundAround):
    """Leaves gradients as they are. The hook inside keeps its state."""

    def reduce(self, bucket: Bucket, ranks: Group) -> Steps[None]:
        scale_(bucket.flat, bucket.scale)
        # Parts of gradients that were not sent to other ranks, while there were some.
        used = tuple(slot for slot in bucket.slots if slot.name not in (bucket.unused or ()))
        self.flush_(dataclasses.replace(bucket, slots=used))
        return result(None)

    reduce_sparse = BoundHook.reduce_sparse


def pass_on(bound: BoundHook) -> BoundHook:
    """Make a hook that averages gradients leave them as they are; averaging models is already right with one rank."""
    if bound.averages_models:
        if isinstance(bound, BoundWrapper):
            bound.change_inner(pass_on)
        return bound
    if isinstance(bound, BoundAround) and not bound.scales_gradients:
        # What scales gradients is no compression.
        bound.change_inner(_Unused)
        return bound
    return _Unused(bound)


def without_pass_on(bound: BoundHook) -> BoundHook:
    """Return the hook's own runtime object, of what `pass_on` has returned."""
    return bound.inner if isinstance(bound, _Unused) else bound
