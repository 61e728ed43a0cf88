"""How many steps a hook has taken over."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class StepsTaken:
    """Counts steps that turn out to be finite, equal on all ranks: `bucket.step` counts the others, too.

    Attributes:
        number: steps so far.
    """

    def __init__(self) -> None:
        self.number = 0
        self._is_counting = False

    def count(self) -> None:
        """Count the present step, once it has ended."""
        self._is_counting = True

    def end_step(self, finite: Tensor) -> None:
        """See `BoundHook.end_step`."""
        if self._is_counting and finite:
            self.number += 1
        self._is_counting = False

    def saved(self) -> Tensor:
        """For `load`."""
        return torch.tensor(self.number)

    def load(self, saved: Any) -> None:
        """Go on from what was saved; from 0 if nothing was."""
        self.number = int(saved) if isinstance(saved, Tensor) else 0
