"""Strategy names such as `ddp_powersgd`, `fsdp_bf16`: registered when Lightning is imported, without importing it."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Any

import wrapt

from lightning_commhooks.interface.registry import available_hooks
from lightning_commhooks.sources.fsdp import sharded_hooks

# For the module that has the registry: the file of the classes, and their names.
_CLASSES = {
    "lightning.pytorch.strategies": ("classes", {"ddp": "CompressedDDPStrategy", "fsdp": "CompressedFSDPStrategy"}),
    "pytorch_lightning.strategies": (
        "classes_pl",
        {"ddp": "CompressedDDPStrategyPL", "fsdp": "CompressedFSDPStrategyPL"},
    ),
}


def register_strategy_names() -> None:
    """Register `ddp_<hook>` for every hook and `fsdp_<hook>` for those that work with FSDP.

    With Lightning's `StrategyRegistry`, now for each of `lightning` and `pytorch_lightning` that is imported already,
    and for the other as soon as it is imported. Imports neither.
    """
    for module_name in _CLASSES:
        wrapt.register_post_import_hook(_register, module_name)


def _register(strategies: ModuleType) -> None:
    hooks = {"ddp": available_hooks(), "fsdp": sharded_hooks()}
    file, class_names = _CLASSES[strategies.__name__]
    for kind, class_name in class_names.items():
        make = functools.partial(_make, f"lightning_commhooks.lightning.{file}", class_name)
        for hook in hooks[kind]:
            name = f"{kind}_{hook}"
            if name not in strategies.StrategyRegistry:
                strategies.StrategyRegistry.register(
                    name, make, description=f"{kind.upper()} with the communication hook {hook!r}", hook=hook
                )


def _make(module: str, class_name: str, **init_params: Any) -> Any:
    return getattr(importlib.import_module(module), class_name)(**init_params)
