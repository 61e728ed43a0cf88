"""Lines that a Trainer shows, and the number of its steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def show(trainer: Any, line: str, rank_zero_info: Callable[..., None]) -> None:
    """Show a line above the progress bar, or in Lightning's log if there is none."""
    bar = trainer.progress_bar_callback
    # Progress bars of users' own need not have `is_enabled`.
    if getattr(bar, "is_enabled", False):
        # The bar of rich is drawn over what others write to the terminal.
        bar.print(line)
    else:
        rank_zero_info(line)


def steps_of(trainer: Any) -> tuple[int, float]:
    """Number of steps so far, and at the end of training: infinite or below 0 if nobody knows.

    Steps are those of the optimizer; in manual optimization, where a batch may have any number of them, batches.
    """
    if any(type(callback).__name__ == "_LRCallback" for callback in trainer.callbacks):
        return trainer.global_step, -1  # Lightning looks for a learning rate
    if trainer.lightning_module.automatic_optimization:
        return trainer.global_step, trainer.estimated_stepping_batches
    done, ends = trainer.fit_loop.epoch_loop._batches_that_stepped, []
    if trainer.max_epochs != -1:
        ends.append(trainer.num_training_batches * max(trainer.max_epochs, 1))
    if trainer.max_steps != -1 and trainer.global_step:
        ends.append(done * trainer.max_steps / trainer.global_step)
    return done, min(ends, default=-1)
