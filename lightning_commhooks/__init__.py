"""Communication hooks for PyTorch data parallelism: choose one by name, send fewer bytes."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from lightning_commhooks.collectives.errors import HookError
from lightning_commhooks.collectives.group import Group
from lightning_commhooks.hooks import (
    BF16,
    FP8,
    FP16,
    AllGather,
    AllReduce,
    BatchedPowerSGD,
    ChunkedTopK,
    DiLoCo,
    HierarchicalLocalSGD,
    Int2,
    Int4,
    Int8,
    Noop,
    PostLocalSGD,
    PowerSGD,
    QuantizePerChannel,
    QuantizePerTensor,
)
from lightning_commhooks.interface.averages_models import AveragesModels
from lightning_commhooks.interface.bucket import Bucket, Slot
from lightning_commhooks.interface.error_feedback import ErrorFeedback
from lightning_commhooks.interface.hook import BoundHook, CommHook
from lightning_commhooks.interface.models import OptimizerStep
from lightning_commhooks.interface.registry import available_hooks, get_hook, register
from lightning_commhooks.interface.state import StateError, StateReader, StateWriter
from lightning_commhooks.lightning import register_strategy_names
from lightning_commhooks.monitoring import Monitor
from lightning_commhooks.runtime.attachment import Attachment
from lightning_commhooks.runtime.forecast import Forecast
from lightning_commhooks.sources.attach import attach
from lightning_commhooks.torchft.fault_tolerance import FaultTolerance
from lightning_commhooks.wrappers import Auto, Cast, PerParameter, ScaleByGradAccumulation, Schedule

if TYPE_CHECKING:
    from lightning_commhooks.lightning.classes import CommHookMonitor as CommHookMonitor
    from lightning_commhooks.lightning.classes import CompressedDDPStrategy as CompressedDDPStrategy
    from lightning_commhooks.lightning.classes import CompressedFSDPStrategy as CompressedFSDPStrategy
    from lightning_commhooks.lightning.classes import CompressedModelParallelStrategy as CompressedModelParallelStrategy
    from lightning_commhooks.lightning.classes_pl import CommHookMonitorPL as CommHookMonitorPL
    from lightning_commhooks.lightning.classes_pl import CompressedDDPStrategyPL as CompressedDDPStrategyPL
    from lightning_commhooks.lightning.classes_pl import CompressedFSDPStrategyPL as CompressedFSDPStrategyPL
    from lightning_commhooks.lightning.classes_pl import (
        CompressedModelParallelStrategyPL as CompressedModelParallelStrategyPL,
    )
    from lightning_commhooks.lightning.fabric import CompressedDDPFabricStrategy as CompressedDDPFabricStrategy
    from lightning_commhooks.lightning.ray import CompressedRayDDPStrategy as CompressedRayDDPStrategy

__version__ = "0.1.0"

__all__ = [
    "BF16",
    "FP8",
    "FP16",
    "AllGather",
    "AllReduce",
    "Attachment",
    "Auto",
    "AveragesModels",
    "BatchedPowerSGD",
    "BoundHook",
    "Bucket",
    "Cast",
    "ChunkedTopK",
    "CommHook",
    "DiLoCo",
    "ErrorFeedback",
    "FaultTolerance",
    "Forecast",
    "Group",
    "HierarchicalLocalSGD",
    "HookError",
    "Int2",
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
    "Slot",
    "StateError",
    "StateReader",
    "StateWriter",
    "attach",
    "available_hooks",
    "get_hook",
    "register",
]


def _found(*packages: str) -> bool:
    """Whether packages are installed. A folder of that name where Python was started has no origin."""
    return all((spec := find_spec(package)) is not None and spec.origin is not None for package in packages)


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
# Looking for `ray.train` would import Ray. The other packages are its requirements.
if (_found("lightning") or _found("pytorch_lightning")) and _found("ray", "fsspec", "pandas", "pyarrow", "requests"):
    __all__ += ["CompressedRayDDPStrategy"]

# Imported when they are first asked for, since they need a framework.
_TWICE = ("CommHookMonitor", "CompressedDDPStrategy", "CompressedFSDPStrategy", "CompressedModelParallelStrategy")
_LAZY = {
    **dict.fromkeys(_TWICE, "lightning_commhooks.lightning.classes"),
    **{f"{name}PL": "lightning_commhooks.lightning.classes_pl" for name in _TWICE},
    "CompressedDDPFabricStrategy": "lightning_commhooks.lightning.fabric",
    "CompressedRayDDPStrategy": "lightning_commhooks.lightning.ray",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


register_strategy_names()
