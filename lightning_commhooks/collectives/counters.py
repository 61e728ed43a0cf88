"""Counters of one attachment: what was communicated, and what plain DDP would have."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

from lightning_commhooks.collectives.timing import HostTiming, Timing

_NOT_COUNTS = ("timing", "evaluating_threads")


@dataclass
class Counters:
    """Cumulative counts of this rank.

    Attributes:
        steps: synchronized backwards that began.
        bytes_sent: payload bytes this rank sent to train, headers excluded.
        bytes_evaluation: payload bytes this rank sent to evaluate and to save, within `evaluating`.
        bytes_dense: payload bytes that an all-reduce of the same gradients in their own dtype sends.
        bytes_sent_between_nodes: of `bytes_sent`, those that go to a rank of another node, on the mean over ranks.
        bytes_evaluation_between_nodes: the same of `bytes_evaluation`.
        bytes_dense_between_nodes: the same of `bytes_dense`.
        collectives: number of collectives issued to train.
        rounds: rounds of messages between ranks that were waited for one after another, each for at least the latency
            of the link; those of collectives that were under way at once for one bucket are counted once.
        numel_compressed: gradient elements that were sent in another form or not at all: the remaining elements of
            buckets of which anything was sent.
        numel_uncompressed: gradient elements that were sent as they are: for each bucket the count of numbers that this
            rank gave to collectives in the gradients' dtype, or as floating-point numbers of at least as many bytes, up
            to the size of the bucket. With several ranks on a node, of numbers that leave the node, if any do.
        numel_overflowed: gradient elements of this rank that are finite, but not in the 16 bit they were sent in.
        nonfinite_steps: steps that were made NaN on all ranks, because a gradient was inf or NaN on some rank: with a
            hook that has memory, and of ranks that step alone under a scaler.
        averagings: times that (a part of) the model was averaged over ranks.
        waited_ms: milliseconds that this rank was early for averages of models.
        timing: where the time of steps went.
        evaluating_threads: those that are within `evaluating`.
    """

    steps: int = 0
    bytes_sent: float = 0.0
    bytes_evaluation: float = 0.0
    bytes_dense: float = 0.0
    bytes_sent_between_nodes: float = 0.0
    bytes_evaluation_between_nodes: float = 0.0
    bytes_dense_between_nodes: float = 0.0
    collectives: int = 0
    rounds: int = 0
    numel_compressed: int = 0
    numel_uncompressed: int = 0
    # On CUDA a tensor, so that counting waits for nothing.
    numel_overflowed: int | Tensor = 0
    nonfinite_steps: int = 0
    averagings: int = 0
    waited_ms: float = 0.0
    timing: Timing[Any] = field(default_factory=HostTiming, compare=False, repr=False)
    evaluating_threads: set[int] = field(default_factory=set, compare=False, repr=False)

    def as_dict(self) -> dict[str, float]:
        """All counters, and `compression_ratio`, `bytes_dense / bytes_sent`, also of those between nodes.

        The ratio is 1 when there was nothing to send (one process, one node) and inf when a hook sent nothing.
        """
        counts = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _NOT_COUNTS}
        plain = {name: value.item() if isinstance(value, Tensor) else value for name, value in counts.items()}
        ratios = {
            "compression_ratio": _ratio(self.bytes_dense, self.bytes_sent),
            "compression_ratio_between_nodes": _ratio(self.bytes_dense_between_nodes, self.bytes_sent_between_nodes),
        }
        return {**plain, **ratios}

    def count(self, num_bytes: float, between_nodes: float) -> bool:
        """Count a collective that sends so many bytes, of which so many leave the node.

        Returns:
            whether it is one of training.
        """
        if self.timing.is_paused:
            return False
        if self.is_evaluating:
            self.bytes_evaluation += num_bytes
            self.bytes_evaluation_between_nodes += between_nodes
            return False
        self.bytes_sent += num_bytes
        self.bytes_sent_between_nodes += between_nodes
        self.collectives += 1
        return True

    def paused(self) -> AbstractContextManager[None]:
        """Do not count the collectives of measurements, or of a few numbers that ranks agree on.

        Of this thread; a hook that is at work in another one meanwhile goes on counting.
        """
        return self.timing.paused()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Count what this thread sends as that of evaluation and checkpoints: its bytes, apart from those of training.

        Without rounds and times, which are those of steps.
        """
        thread = threading.get_ident()
        if thread in self.evaluating_threads:
            yield
            return
        self.evaluating_threads.add(thread)
        try:
            yield
        finally:
            self.evaluating_threads.discard(thread)

    @property
    def is_evaluating(self) -> bool:
        """Whether this thread is within `evaluating`."""
        return threading.get_ident() in self.evaluating_threads


def _ratio(dense: float, sent: float) -> float:
    return dense / sent if sent else math.inf if dense else 1.0
