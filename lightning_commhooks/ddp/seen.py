"""What DDP and optimizers do in a step, for a forecast of later ones."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from lightning_commhooks.interface.bucket import Bucket

# Steps of which it is kept which optimizers they were followed by.
_NUM_STEPS = 16


class SeenBuckets:
    """The buckets of the last step, as DDP handed them over.

    Attributes:
        buckets: those with dense gradients, and the dtype of each.
        num_sparse: how many others there were.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget them, and with them the model's parameters."""
        self._step = -1
        self.buckets: list[tuple[Bucket, torch.dtype]] = []
        self.num_sparse = 0

    def add(self, bucket: Bucket, flat: Tensor) -> None:
        """Add one more, which begins a new step if it is of another one."""
        if bucket.step != self._step:
            self.clear()
            self._step = bucket.step
        if flat.is_sparse:
            self.num_sparse += 1
        else:
            self.buckets.append((bucket, flat.dtype))


class SeenOptimizers:
    """Which optimizers stepped after which synchronized backward, by the names of their first parameters."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, list[str]]] = deque(maxlen=_NUM_STEPS)

    def add(self, optimizer: str, step: int) -> None:
        """An optimizer stepped after a synchronized backward of that number."""
        if not self._steps or self._steps[-1][0] != step:
            self._steps.append((step, []))
        self._steps[-1][1].append(optimizer)

    def cycle(self) -> tuple[int, list[list[str]]]:
        """The optimizers of each step until they repeat, and the number of the first of these steps.

        Two that take turns repeat after two steps. What has not repeated yet is taken to do so after as many steps as
        there are optimizers.
        """
        if not self._steps:
            return 0, []
        first, last = self._steps[0][0], self._steps[-1][0]
        stepped = dict(self._steps)
        seen = [stepped.get(step, []) for step in range(max(first, last - _NUM_STEPS), last + 1)]
        for length in range(1, len(seen) // 2 + 1):
            if seen[-length:] == seen[-2 * length : -length]:
                break
        else:
            length = min(len(seen), len({optimizer for each in seen for optimizer in each}))
        return last + 1 - length, seen[-length:]
