"""Watches how buckets are reduced: their error now and then, their time, and steps in which nothing was compressed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator

from torch import Tensor

from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.steps import Steps, T
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

    def reduce(self, bound: BoundHook, bucket: Bucket, ranks: Group) -> Steps[tuple[Tensor, Tensor | None]]:
        """Reduce one bucket, and watch it.

        Returns:
            the averaged gradients, and what `BoundHook.reduce` says of whether they are finite.
        """
        flat, counters = bucket.flat, bound.group.counters
        # While ranks step alone their gradients are not meant to be the mean.
        sampler = None if is_local(bound, bucket.step) else self.sampler
        taken = sampler.take(flat, bucket) if sampler is not None else None
        dense = ranks.ring_bytes(flat._values() if flat.is_sparse else flat)
        inter_node = ranks.inter_node_share(around_ring=True)
        counters.bytes_dense += dense
        counters.bytes_dense_between_nodes += dense * inter_node
        finite = None
        if flat.is_sparse:
            flat = yield from started(bound.reduce_sparse(flat, bucket, ranks), bound, "reduce_sparse")
        else:
            finite = yield from started(bound.reduce(bucket, ranks), bound, "reduce")
        # Of nodes with several ranks what counts is what leaves them.
        is_between = 0 < inter_node < 1
        sent = ranks.tally.between_nodes if is_between else ranks.tally.sent
        self._add(bound, bucket.step, sent, dense * (inter_node if is_between else 1))
        if sampler is not None and taken is not None:
            yield from sampler.compare(taken, flat, bucket, ranks)
        return flat, finite

    def _add(self, bound: BoundHook, step: int, sent: float, dense: float) -> None:
        if step != self._step:
            self._end_step()
            self._step, self._why = step, bound.inactive_reason(step)
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


def started(steps: Steps[T], bound: BoundHook, method: str) -> Steps[T]:
    """Return what a hook's method has returned.

    Raises:
        TypeError: that is no generator, so nothing would wait for its collectives.
    """
    if not isinstance(steps, Generator):
        raise TypeError(
            f"{type(bound).__name__}.{method} is no generator, it returned {type(steps).__name__}: begin each "
            "collective by `yield from`, as in `yield from ranks.all_reduce_mean_(bucket.flat)`; if there is none, end "
            "with `return` and a `yield` after it"
        )
    return steps
