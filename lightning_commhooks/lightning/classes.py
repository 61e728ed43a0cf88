"""The classes for `lightning`, each of a part of this library and a class of Lightning; see also classes_pl.py."""
# ruff: noqa: D101  # each has the docstring of its part

from __future__ import annotations

try:
    from lightning.pytorch import Callback
    from lightning.pytorch.callbacks import LambdaCallback
    from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
except ImportError as error:
    raise ImportError("this needs Lightning: pip install 'lightning-commhooks[lightning]'") from error

from lightning_commhooks.lightning.ddp import CompressedDDPMixin
from lightning_commhooks.lightning.fsdp_strategies import CompressedFSDPMixin, CompressedModelParallelMixin
from lightning_commhooks.lightning.monitor_callback import CommHookMonitorMixin


class CommHookMonitor(CommHookMonitorMixin, Callback):
    __doc__ = CommHookMonitorMixin.__doc__
    _strategy = "CompressedDDPStrategy"


class CompressedDDPStrategy(CompressedDDPMixin, DDPStrategy):
    __doc__ = CompressedDDPMixin.__doc__
    _callback_class = LambdaCallback


class CompressedFSDPStrategy(CompressedFSDPMixin, FSDPStrategy):
    __doc__ = CompressedFSDPMixin.__doc__
    _callback_class = LambdaCallback


class CompressedModelParallelStrategy(CompressedModelParallelMixin, ModelParallelStrategy):
    __doc__ = CompressedModelParallelMixin.__doc__
    _callback_class = LambdaCallback
