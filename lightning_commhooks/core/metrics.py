"""Counters of one attachment: what was communicated, and what plain DDP would have."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class Counters:
    """Cumulative counts of this rank.

    Attributes:
        steps: synchronized backwards that began.
        bytes_sent: payload bytes this rank sent, headers excluded.
        bytes_dense: payload bytes that an all-reduce of the same gradients in their own dtype sends.
        collectives: number of collectives issued.
        numel_compressed: gradient elements that were sent in a compressed form.
        numel_uncompressed: gradient elements that a hook sent as they were.
    """

    steps: int = 0
    bytes_sent: float = 0.0
    bytes_dense: float = 0.0
    collectives: int = 0
    numel_compressed: int = 0
    numel_uncompressed: int = 0

    def as_dict(self) -> dict[str, float]:
        """All counters, and `compression_ratio`, `bytes_dense / bytes_sent`.

        The ratio is 1 when there was nothing to send (one process) and inf when a hook sent nothing.
        """
        ratio = self.bytes_dense / self.bytes_sent if self.bytes_sent else math.inf if self.bytes_dense else 1.0
        return {**vars(self), "compression_ratio": ratio}
