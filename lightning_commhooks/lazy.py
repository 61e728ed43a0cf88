"""Strategy names such as `ddp_powersgd`, registered when Lightning is imported, without importing it."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import wrapt

from lightning_commhooks.core.registry import available_hooks

_PACKAGES = {
    "lightning.pytorch.strategies": ("lightning_commhooks.strategy", "CompressedDDPStrategy"),
    "pytorch_lightning.strategies": ("lightning_commhooks.strategy_pl", "CompressedDDPStrategyPL"),
}


def register_strategy_names() -> None:
    """Register `ddp_<hook>` for every hook with Lightning's `StrategyRegistry`.

    Now for each of `lightning` and `pytorch_lightning` that is imported already, and for the other as soon as
    it is imported. Imports neither.
    """
    for module_name in _PACKAGES:
        wrapt.register_post_import_hook(_register, module_name)


def _register(strategies: ModuleType) -> None:
    module_name, class_name = _PACKAGES[strategies.__name__]

    def make(**init_params: Any) -> Any:
        return getattr(importlib.import_module(module_name), class_name)(**init_params)

    for hook in available_hooks():
        name = f"ddp_{hook}"
        if name not in strategies.StrategyRegistry:
            strategies.StrategyRegistry.register(
                name, make, description=f"DDP with the communication hook {hook!r}", hook=hook
            )
