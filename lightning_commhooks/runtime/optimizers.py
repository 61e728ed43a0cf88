"""Which optimizers ranks can step alone with, and how one tells that it steps."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

_SHARDED = "keeps its state in shards and exchanges parameters itself at every step, so ranks cannot step alone"
_REFUSED = {
    "ZeroRedundancyOptimizer": f"{_SHARDED}; use the optimizer that it wraps",
    "DistributedOptimizer": f"{_SHARDED}; use an optimizer of torch.optim",
    "PostLocalSGDOptimizer": "averages models itself; use the optimizer that it wraps",
}


def check_optimizer(optimizer: object) -> None:
    """Refuse an optimizer that cannot step on one rank alone."""
    # Whoever has such an optimizer has imported this; importing it here would take a second and give a warning.
    theirs = sys.modules.get("torch.distributed.optim")
    for name, reason in _REFUSED.items():
        if isinstance(optimizer, getattr(theirs, name, ())):
            raise ValueError(f"hooks that average models do not work with {type(optimizer).__name__}: it {reason}")
    if not hasattr(optimizer, "param_groups") or not hasattr(optimizer, "state"):
        raise ValueError(f"not an optimizer: {optimizer!r}")


def register_step_hooks(
    optimizer: Optimizer, before: Callable[[Optimizer], None], after: Callable[[Optimizer], None]
) -> list[RemovableHandle]:
    """Call functions before and after each step of an optimizer."""
    if not hasattr(optimizer, "register_step_post_hook"):
        raise ValueError(
            f"{type(optimizer).__name__} has no register_step_post_hook, because it is no torch.optim.Optimizer; "
            "call Attachment.after_optimizer_step(optimizer) after each of its steps instead"
        )
    if callable(getattr(optimizer, "eval", None)):
        warnings.warn(
            f"{type(optimizer).__name__}.eval() puts weights of its own in the model; ranks that step alone do not "
            "average those. Average before: Attachment.average_weights()",
            stacklevel=3,
        )
    return [
        optimizer.register_step_pre_hook(lambda *_: before(optimizer)),
        optimizer.register_step_post_hook(lambda *_: after(optimizer)),
    ]
