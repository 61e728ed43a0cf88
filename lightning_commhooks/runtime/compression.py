"""Watches how buckets are reduced: their error now and then, their time, and steps in which nothing was compressed."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from lightning_commhooks.collectives.group import Group, counted
from lightning_commhooks.collectives.steps import Steps, result
from lightning_commhooks.interface.accumulation import scale_
from lightning_commhooks.interface.averages_models import averages_models
from lightning_commhooks.interface.bucket import Bucket
from lightning_commhooks.interface.error_sample import ErrorSampler
from lightning_commhooks.interface.hook import BoundHook
from lightning_commhooks.interface.wrapper import BoundAround

_AS_THEY_ARE = "gradients are sent as they are"


class Watch:
    """Used where the hook runs.

    Attributes:
        sampler: estimates errors; `None`: errors are not measured.
        of_step: one step, the same on all ranks, and the sampler that estimates the error of that step alone.
        step: the last step in which buckets were reduced here, counted from 0; -1 before the first one.
        why: the reason that the hook gave in that step for not compressing; `None`: it gave none.
    """

    def __init__(self) -> None:
        self.sampler: ErrorSampler | None = None
        self.of_step: tuple[int, ErrorSampler] | None = None
        self._not_compressed: Counter[str] = Counter()
        self.step = -1
        self.why: str | None = None
        self._sent = self._dense = 0.0

    def take(self, bucket: Bucket) -> list[tuple[ErrorSampler, Any]]:
        """Sample gradients before a reduction; returns each sampler of this step with its sample."""
        samplers = [] if self.sampler is None else [self.sampler]
        if (of_step := self.of_step) is not None and of_step[0] == bucket.step:
            samplers.append(of_step[1])
        return [(sampler, taken) for sampler in samplers if (taken := sampler.take(bucket.flat, bucket)) is not None]

    @contextmanager
    def watching(self, bound: BoundHook, bucket: Bucket, numbers: Tensor, ranks: Group) -> Iterator[None]:
        """Count the bytes of the reduction within a `with`, and the bytes of plain DDP for the same gradients."""
        counters, dense = ranks.counters, ranks.ring_bytes(numbers)
        inter_node = ranks.inter_node_share(around_ring=True)
        counters.bytes_dense += dense
        counters.bytes_dense_between_nodes += dense * inter_node
        with counted(numbers, ranks):
            yield
        # With several ranks per node, only traffic between nodes counts.
        is_between = 0 < inter_node < 1
        sent = ranks.tally.between_nodes if is_between else ranks.tally.sent
        self._add(bound, bucket, sent, dense * (inter_node if is_between else 1))

    def _add(self, bound: BoundHook, bucket: Bucket, sent: float, dense: float) -> None:
        is_new = bucket.step != self.step
        if is_new:
            self.end_step()
            self.step = bucket.step
        # The last bucket need not be there.
        if is_new or bucket.is_last:
            self.why = bound.inactive_reason(bucket.step)
        self._sent += sent
        self._dense += dense

    def end_step(self) -> None:
        """Count the step that was watched last; one that is watched later is another, whatever its number is."""
        if self._dense and self._sent >= self._dense:
            self._not_compressed[self.why.partition(";")[0] if self.why else _AS_THEY_ARE] += 1
        self._sent = self._dense = 0.0

    def not_compressed(self) -> dict[str, int]:
        """Number of steps that sent no fewer bytes, or no fewer between nodes, than plain DDP, by reason."""
        self.end_step()
        return dict(self._not_compressed)


class _Alone(BoundAround):
    """Leaves gradients as they are, since no other rank gets them. The hook inside keeps its state."""

    def reduce(self, bucket: Bucket, ranks: Group) -> Steps[None]:
        scale_(bucket.flat, bucket.scale)
        # Parts of gradients that were not sent to other ranks, while there were some.
        used = tuple(slot for slot in bucket.slots if slot.name not in (bucket.unused or ()))
        self.flush_(dataclasses.replace(bucket, slots=used))
        return result(None)

    def reduce_sparse(self, grad: Tensor, bucket: Bucket, ranks: Group) -> Steps[Tensor]:
        return BoundHook.reduce_sparse(self, grad, bucket, ranks)


def pass_on(bound: BoundHook) -> BoundHook:
    """Make a hook that averages gradients leave them as they are; averaging models is already right with one rank."""
    if averages_models(bound):
        return bound
    if isinstance(bound, BoundAround) and not bound.scales_gradients:
        # What scales gradients is no compression.
        bound.wrap_inner(_Alone)
        return bound
    return _Alone(bound)


def without_pass_on(bound: BoundHook) -> BoundHook:
    """Return the hook's own runtime object, of what `pass_on` has returned."""
    return bound.inner if isinstance(bound, _Alone) else bound
