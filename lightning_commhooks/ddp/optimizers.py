"""The optimizers of a model whose ranks step alone: which there are, and when one has stepped."""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_commhooks.interface.models import parameters_of

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


class Optimizers:
    """Optimizers that report their steps: `before_step` and `on_step` are called with the optimizer.

    Attributes:
        by_key: optimizers that were seen so far, also those that do not report, by the name of their first parameter.
    """

    def __init__(self, before_step: Callable[[Optimizer], None], on_step: Callable[[Optimizer], None]) -> None:
        self._before_step = before_step
        self._on_step = on_step
        self._handles: dict[Optimizer, list[RemovableHandle]] = {}
        self.by_key: dict[str, Optimizer] = {}

    def add(self, optimizer: Optimizer) -> None:
        """Call `on_step` after each of the optimizer's steps from now on."""
        check_optimizer(optimizer)
        if optimizer in self._handles:
            return
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
        self._handles[optimizer] = [
            optimizer.register_step_pre_hook(lambda *_: self._before_step(optimizer)),
            optimizer.register_step_post_hook(lambda *_: self._on_step(optimizer)),
        ]

    def is_hooked(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer reports its steps by itself."""
        return any(optimizer.param_groups is hooked.param_groups for hooked in self._handles)

    def parameters(self) -> set[Tensor]:
        """All parameters of all optimizers."""
        known = {*self._handles, *self.by_key.values()}
        return {p for optimizer in known for p in parameters_of(optimizer)}

    def close(self) -> None:
        """Remove the step hooks."""
        for handle in itertools.chain(*self._handles.values()):
            handle.remove()
        self._handles.clear()
        self.by_key.clear()
