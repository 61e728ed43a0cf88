"""The classes for the standalone `pytorch_lightning` package: what all packages share, and the base of this one."""

from __future__ import annotations

try:
    from lightning_fabric.utilities.exceptions import MisconfigurationException
    from pytorch_lightning import Callback
    from pytorch_lightning.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
    from pytorch_lightning.utilities.rank_zero import rank_zero_info  # type: ignore[attr-defined]
except ImportError as error:
    raise ImportError("this needs the standalone package: pip install pytorch-lightning") from error

from lightning_commhooks.lightning.ddp import AverageFirst, CompressedDDPMixin
from lightning_commhooks.lightning.fsdp_strategies import CompressedFSDPMixin, CompressedModelParallelMixin
from lightning_commhooks.lightning.monitor_callback import CommHookMonitorMixin


class _AverageFirst(AverageFirst, Callback):
    pass


class CompressedDDPStrategyPL(CompressedDDPMixin, DDPStrategy):  # noqa: D101
    __doc__ = CompressedDDPMixin.__doc__

    _misconfiguration = MisconfigurationException
    _callback_class = _AverageFirst
    _rank_zero_info = staticmethod(rank_zero_info)


class CompressedFSDPStrategyPL(CompressedFSDPMixin, FSDPStrategy):  # noqa: D101
    __doc__ = CompressedFSDPMixin.__doc__

    _misconfiguration = MisconfigurationException


class CompressedModelParallelStrategyPL(CompressedModelParallelMixin, ModelParallelStrategy):  # noqa: D101
    __doc__ = CompressedModelParallelMixin.__doc__

    _misconfiguration = MisconfigurationException


class CommHookMonitorPL(CommHookMonitorMixin, Callback):  # noqa: D101
    __doc__ = CommHookMonitorMixin.__doc__

    _misconfiguration = MisconfigurationException
    _rank_zero_info = staticmethod(rank_zero_info)
    _strategy = "CompressedDDPStrategyPL"
