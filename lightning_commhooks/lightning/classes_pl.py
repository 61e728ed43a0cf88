"""The classes for the standalone package `pytorch_lightning`; see classes.py."""
# ruff: noqa: D101  # each has the docstring of its part

from __future__ import annotations

try:
    from pytorch_lightning import Callback
    from pytorch_lightning.callbacks import LambdaCallback
    from pytorch_lightning.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
except ImportError as error:
    raise ImportError("this needs the standalone package: pip install pytorch-lightning") from error

from lightning_commhooks.lightning.ddp import CompressedDDPMixin
from lightning_commhooks.lightning.fsdp_strategies import CompressedFSDPMixin, CompressedModelParallelMixin
from lightning_commhooks.lightning.monitor_callback import CommHookMonitorMixin


class CommHookMonitorPL(CommHookMonitorMixin, Callback):
    __doc__ = CommHookMonitorMixin.__doc__
    _strategy = "CompressedDDPStrategyPL"


class CompressedDDPStrategyPL(CompressedDDPMixin, DDPStrategy):
    __doc__ = CompressedDDPMixin.__doc__
    _callback_class = LambdaCallback


class CompressedFSDPStrategyPL(CompressedFSDPMixin, FSDPStrategy):
    __doc__ = CompressedFSDPMixin.__doc__
    _callback_class = LambdaCallback


class CompressedModelParallelStrategyPL(CompressedModelParallelMixin, ModelParallelStrategy):
    __doc__ = CompressedModelParallelMixin.__doc__
    _callback_class = LambdaCallback
