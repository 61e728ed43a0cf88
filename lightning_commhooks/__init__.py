"""Communication hooks for PyTorch data parallelism: choose one by name, send fewer bytes."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from lightning_commhooks.core.attach import attach
from lightning_commhooks.core.attachment import Attachment
from lightning_commhooks.core.checkpoint import StateError
from lightning_commhooks.core.engine import HookError
from lightning_commhooks.core.hook import BoundHook, Bucket, CommHook
from lightning_commhooks.core.monitor import Monitor
from lightning_commhooks.core.optimizers import OptimizerStep
from lightning_commhooks.core.registry import available_hooks, get_hook, register
from lightning_commhooks.hooks import (
    BF16,
    FP8,
    FP16,
    AllGather,
    AllReduce,
    Auto,
    BatchedPowerSGD,
    DiLoCo,
    HierarchicalLocalSGD,
    Int4,
    Int8,
    Noop,
    PostLocalSGD,
    PowerSGD,
    QuantizePerChannel,
    QuantizePerTensor,
)
from lightning_commhooks.lazy import register_strategy_names
from lightning_commhooks.sharded import DenseReduction as _DenseReduction  # noqa: F401  # registers what FSDP can use
from lightning_commhooks.wrappers import Cast, PerParameter, ScaleByGradAccumulation, Schedule

if TYPE_CHECKING:
    from lightning_commhooks.callbacks import CommHookMonitor as CommHookMonitor
    from lightning_commhooks.callbacks_pl import CommHookMonitorPL as CommHookMonitorPL
    from lightning_commhooks.core.fsdp import FSDPAttachment as FSDPAttachment
    from lightning_commhooks.core.fsdp import attach_fsdp as attach_fsdp
    from lightning_commhooks.fabric import CompressedDDPFabricStrategy as CompressedDDPFabricStrategy
    from lightning_commhooks.fsdp import CompressedFSDPStrategy as CompressedFSDPStrategy
    from lightning_commhooks.fsdp import CompressedModelParallelStrategy as CompressedModelParallelStrategy
    from lightning_commhooks.fsdp_pl import CompressedFSDPStrategyPL as CompressedFSDPStrategyPL
    from lightning_commhooks.fsdp_pl import CompressedModelParallelStrategyPL as CompressedModelParallelStrategyPL
    from lightning_commhooks.strategy import CompressedDDPStrategy as CompressedDDPStrategy
    from lightning_commhooks.strategy_pl import CompressedDDPStrategyPL as CompressedDDPStrategyPL

__version__ = "0.1.0"

__all__ = [
    "BF16",
    "FP8",
    "FP16",
    "AllGather",
    "AllReduce",
    "Attachment",
    "Auto",
    "BatchedPowerSGD",
    "BoundHook",
    "Bucket",
    "Cast",
    "CommHook",
    "DiLoCo",
    "HierarchicalLocalSGD",
    "HookError",
    "Int4",
    "Int8",
    "Monitor",
    "Noop",
    "OptimizerStep",
    "PerParameter",
    "PostLocalSGD",
    "PowerSGD",
    "QuantizePerChannel",
    "QuantizePerTensor",
    "ScaleByGradAccumulation",
    "Schedule",
    "StateError",
    "attach",
    "available_hooks",
    "get_hook",
    "register",
]

# A star import must not need Lightning.
if find_spec("lightning") is not None:
    __all__ += [
        "CommHookMonitor",
        "CompressedDDPFabricStrategy",
        "CompressedDDPStrategy",
        "CompressedFSDPStrategy",
        "CompressedModelParallelStrategy",
    ]
if find_spec("pytorch_lightning") is not None:
    __all__ += [
        "CommHookMonitorPL",
        "CompressedDDPStrategyPL",
        "CompressedFSDPStrategyPL",
        "CompressedModelParallelStrategyPL",
    ]

_LAZY = {
    "CommHookMonitor": "lightning_commhooks.callbacks",
    "CommHookMonitorPL": "lightning_commhooks.callbacks_pl",
    "CompressedDDPFabricStrategy": "lightning_commhooks.fabric",
    "CompressedDDPStrategy": "lightning_commhooks.strategy",
    "CompressedDDPStrategyPL": "lightning_commhooks.strategy_pl",
    "CompressedFSDPStrategy": "lightning_commhooks.fsdp",
    "CompressedFSDPStrategyPL": "lightning_commhooks.fsdp_pl",
    "CompressedModelParallelStrategy": "lightning_commhooks.fsdp",
    "CompressedModelParallelStrategyPL": "lightning_commhooks.fsdp_pl",
    # Importing PyTorch's FSDP takes half a second.
    "FSDPAttachment": "lightning_commhooks.core.fsdp",
    "attach_fsdp": "lightning_commhooks.core.fsdp",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)


register_strategy_names()
