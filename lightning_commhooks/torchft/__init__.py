"""For training with torchft, where replicas come and go: hooks among those that are there. See [`attach`][]."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_commhooks.torchft.fault_tolerance import FaultTolerance

if TYPE_CHECKING:
    from lightning_commhooks.torchft.ddp import DistributedDataParallel
    from lightning_commhooks.torchft.manager import ProcessGroupGloo, start_manager

__all__ = ["DistributedDataParallel", "FaultTolerance", "ProcessGroupGloo", "start_manager"]


def __getattr__(name: str) -> Any:
    # `FaultTolerance` works without torchft, and the rest of this package does not.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("lightning_commhooks.torchft.manager"), name)
