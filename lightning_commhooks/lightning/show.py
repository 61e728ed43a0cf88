"""Lines that a Trainer shows, and the number of its steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from lightning_commhooks.basics.announce import is_silenced


def show(trainer: Any, line: str, rank_zero_info: Callable[..., None]) -> None:
    """Show a line above the progress bar, or in Lightning's log if there is none."""
    if is_silenced():
        return
    bar = trainer.progress_bar_callback
    # Progress bars of users' own need not have `is_enabled`.
    if getattr(bar, "is_enabled", False):
        # The bar of rich is drawn over what others write to the terminal.
        bar.print(line)
    else:
        rank_zero_info(line)


def steps_left(trainer: Any) -> int | None:
    """Number of optimizer steps to come; `None` if nobody knows, as in manual optimization."""
    if not trainer.lightning_module.automatic_optimization:
        return None
    if any(type(callback).__name__ == "_LRCallback" for callback in trainer.callbacks):
        return None  # Lightning looks for a learning rate
    end = trainer.estimated_stepping_batches
    return int(end) - trainer.global_step if trainer.global_step <= end < math.inf else None
