"""The classes for the `lightning` package: what all packages share, and the base of this one."""

from __future__ import annotations

try:
    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from lightning.pytorch import Callback
    from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
    from lightning.pytorch.utilities.rank_zero import rank_zero_info  # type: ignore[attr-defined]
except ImportError as error:
    raise ImportError("this needs Lightning: pip install 'lightning-commhooks[lightning]'") from error

from lightning_commhooks.lightning.ddp import AverageFirst, CompressedDDPMixin
from lightning_commhooks.lightning.fsdp_strategies import CompressedFSDPMixin, CompressedModelParallelMixin
from lightning_commhooks.lightning.monitor_callback import CommHookMonitorMixin


class _AverageFirst(AverageFirst, Callback):
    pass


class CompressedDDPStrategy(CompressedDDPMixin, DDPStrategy):  # noqa: D101
    __doc__ = CompressedDDPMixin.__doc__

    _misconfiguration = MisconfigurationException
    _callback_class = _AverageFirst
    _rank_zero_info = staticmethod(rank_zero_info)


class CompressedFSDPStrategy(CompressedFSDPMixin, FSDPStrategy):  # noqa: D101
    __doc__ = CompressedFSDPMixin.__doc__

    _misconfiguration = MisconfigurationException


class CompressedModelParallelStrategy(CompressedModelParallelMixin, ModelParallelStrategy):  # noqa: D101
    __doc__ = CompressedModelParallelMixin.__doc__

    _misconfiguration = MisconfigurationException


class CommHookMonitor(CommHookMonitorMixin, Callback):  # noqa: D101
    __doc__ = CommHookMonitorMixin.__doc__

    _misconfiguration = MisconfigurationException
    _rank_zero_info = staticmethod(rank_zero_info)
    _strategy = "CompressedDDPStrategy"
