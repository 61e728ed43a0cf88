"""Counters of one attachment's communication, and of plain DDP's for comparison."""

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
        steps: synchronized backwards that have begun.
        bytes_sent: payload bytes that this rank sent for training, without headers.
        bytes_evaluation: payload bytes that this rank sent for evaluation and saving, within `evaluating`.
        bytes_dense: payload bytes that an all-reduce of the same gradients in their own dtype sends.
        bytes_sent_between_nodes: the part of `bytes_sent` that goes to ranks on other nodes, averaged over ranks.
        bytes_evaluation_between_nodes: the same of `bytes_evaluation`.
        bytes_dense_between_nodes: the same of `bytes_dense`.
        collectives: number of collectives for training.
        rounds: consecutive rounds of messages between ranks, each of which takes at least the latency of the link;
            collectives in flight at once for one bucket count as one.
        numel_compressed: gradient elements that were sent in compressed form or not at all: the remaining elements of
            all buckets that sent anything.
        numel_uncompressed: gradient elements that were sent uncompressed: for each bucket, the count of numbers that
            this rank passed to collectives in the gradients' dtype, or as floating-point numbers of at least as many
            bytes, up to the size of the bucket. With several ranks on a node, only numbers that leave the node count,
            if any do.
        numel_overflowed: gradient elements of this rank that are finite, but overflow in the 16 bits they were sent in.
        nonfinite_steps: steps that were set to NaN on all ranks because a gradient was inf or NaN on some rank: with
            hooks that have memory, and in local steps under a scaler.
        averagings: number of averages of the model, or of a part of it, over ranks.
        waited_ms: milliseconds that this rank waited for slower ranks before averages of models.
        timing: times of steps.
        evaluating_threads: threads within `evaluating`.
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
    # On CUDA a tensor, so that counting does not synchronize.
    numel_overflowed: int | Tensor = 0
    nonfinite_steps: int = 0
    averagings: int = 0
    waited_ms: float = 0.0
    timing: Timing[Any] = field(default_factory=HostTiming, compare=False, repr=False)
    evaluating_threads: set[int] = field(default_factory=set, compare=False, repr=False)

    def as_dict(self) -> dict[str, float]:
        """Return all counters and the ratio `bytes_dense / bytes_sent`, for all bytes and for bytes between nodes.

        The ratio is 1 if there was nothing to send (one process, one node) and inf if a hook sent nothing.
        """
        counts = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _NOT_COUNTS}
        plain = {name: value.item() if isinstance(value, Tensor) else value for name, value in counts.items()}
        ratios = {
            "compression_ratio": _ratio(self.bytes_dense, self.bytes_sent),
            "compression_ratio_between_nodes": _ratio(self.bytes_dense_between_nodes, self.bytes_sent_between_nodes),
        }
        return {**plain, **ratios}

    def count(self, num_bytes: float, between_nodes: float) -> bool:
        """Count a collective by the bytes that it sends, and the part of them that leaves the node.

        Returns:
            whether it belongs to training.
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
        """Do not count this thread's collectives, such as measurements and small agreements between ranks.

        Hooks that run in other threads meanwhile still count.
        """
        return self.timing.paused()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Count this thread's bytes separately from training, as bytes of evaluation and checkpoints.

        Rounds and times are not counted, since they are about steps.
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
