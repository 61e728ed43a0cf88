"""Counters of one attachment: what was communicated, and what plain DDP would have."""

from __future__ import annotations

import math
from collections import defaultdict
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

from lightning_commhooks.collectives.timing import HostTiming, Timing
from lightning_commhooks.collectives.turns import lane

_NOT_COUNTS = ("sent_in_lane", "rounds_in_lane", "timing")


@dataclass
class Counters:
    """Cumulative counts of this rank.

    Attributes:
        steps: synchronized backwards that began.
        bytes_sent: payload bytes this rank sent, headers excluded.
        bytes_dense: payload bytes that an all-reduce of the same gradients in their own dtype sends.
        collectives: number of collectives issued.
        rounds: rounds of messages between ranks that were waited for one after another, each for at least the latency
            of the link; those of collectives that were under way at once for one bucket are counted once.
        numel_compressed: gradient elements that were sent in a compressed form.
        numel_uncompressed: gradient elements that a hook sent as they were.
        numel_overflowed: gradient elements of this rank that are finite, but not in the 16 bit they were sent in.
        nonfinite_steps: steps that were made NaN on all ranks, because a gradient was inf or NaN on some rank: with a
            hook that has memory, and of ranks that step alone under a scaler.
        averagings: times that (a part of) the model was averaged over ranks.
        sent_in_lane: `bytes_sent`, by lane.
        rounds_in_lane: `rounds`, by lane.
        timing: where the time of steps went.
    """

    steps: int = 0
    bytes_sent: float = 0.0
    bytes_dense: float = 0.0
    collectives: int = 0
    rounds: int = 0
    numel_compressed: int = 0
    numel_uncompressed: int = 0
    # On CUDA a tensor, so that counting waits for nothing.
    numel_overflowed: int | Tensor = 0
    nonfinite_steps: int = 0
    averagings: int = 0
    sent_in_lane: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float), repr=False)
    rounds_in_lane: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int), repr=False)
    timing: Timing[Any] = field(default_factory=HostTiming, compare=False, repr=False)

    def as_dict(self) -> dict[str, float]:
        """All counters, and `compression_ratio`, `bytes_dense / bytes_sent`.

        The ratio is 1 when there was nothing to send (one process) and inf when a hook sent nothing.
        """
        ratio = self.bytes_dense / self.bytes_sent if self.bytes_sent else math.inf if self.bytes_dense else 1.0
        counts = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _NOT_COUNTS}
        plain = {name: value.item() if isinstance(value, Tensor) else value for name, value in counts.items()}
        return {**plain, "compression_ratio": ratio}

    def count(self, num_bytes: float) -> None:
        """Count a collective that sends so many bytes."""
        if not self.timing.is_paused:
            self.bytes_sent += num_bytes
            self.sent_in_lane[lane()] += num_bytes
            self.collectives += 1

    def waited_for(self, num_rounds: int) -> None:
        """So many rounds, of `rounds_in_lane`, are over, if not more."""
        more = num_rounds - self.rounds_in_lane[lane()]
        if more > 0 and not self.timing.is_paused:
            self.rounds_in_lane[lane()] += more
            self.rounds += more

    def paused(self) -> AbstractContextManager[None]:
        """Do not count the collectives of checkpoints and measurements: they are no gradients.

        Of this thread; a hook that is at work in another one meanwhile goes on counting.
        """
        return self.timing.paused()
