"""Watches how buckets are reduced: their error now and then, their time, and steps in which nothing was compressed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from lightning_commhooks.collectives.turns import lane
from lightning_commhooks.interface.averages_models import is_local
from lightning_commhooks.interface.bucket import Bucket
from lightning_commhooks.interface.error_sample import ErrorSampler
from lightning_commhooks.interface.hook import BoundHook

_AS_THEY_ARE = "gradients are sent as they are"


class Watch:
    """Used where the hook runs.

    Attributes:
        sampler: estimates errors; `None`: nobody wants to know.
    """

    def __init__(self) -> None:
        self.sampler: ErrorSampler | None = None
        self._not_compressed: Counter[str] = Counter()
        self._step = -1
        self._sent = self._dense = 0.0
        self._why: str | None = None

    @contextmanager
    def reduction(self, bound: BoundHook, flat: Tensor, bucket: Bucket) -> Iterator[None]:
        """Watch the reduction of one bucket."""
        counters = bound.group.counters
        # While ranks step alone their gradients are not meant to be the mean.
        sampler = None if is_local(bound, bucket.step) else self.sampler
        taken = sampler.take(flat, bucket) if sampler is not None else None
        dense = bound.group.ring_bytes(flat._values() if flat.is_sparse else flat)
        leaving = bound.group.leaving(around_ring=True)
        counters.bytes_dense += dense
        counters.bytes_dense_between_nodes += dense * leaving
        # Of nodes with several ranks what counts is what leaves them.
        sent = counters.between_in_lane if 0 < leaving < 1 else counters.sent_in_lane
        before = sent[lane()]
        with counters.timing.work():
            yield
        self._add(bound, bucket.step, sent[lane()] - before, dense * (leaving if 0 < leaving < 1 else 1))
        if sampler is not None and taken is not None:
            sampler.compare(taken, flat, bucket, bound.group)

    def _add(self, bound: BoundHook, step: int, sent: float, dense: float) -> None:
        if step != self._step:
            self._end_step()
            self._step, self._why = step, bound.not_begun(step)
        self._sent += sent
        self._dense += dense

    def _end_step(self) -> None:
        if self._dense and self._sent >= self._dense:
            self._not_compressed[self._why.partition(";")[0] if self._why else _AS_THEY_ARE] += 1
        self._sent = self._dense = 0.0

    def not_compressed(self) -> dict[str, int]:
        """Number of steps that sent no fewer bytes, or no fewer between nodes, than plain DDP, by reason."""
        self._end_step()
        return dict(self._not_compressed)
