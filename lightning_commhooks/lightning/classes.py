"""The classes of `lightning`, of `pytorch_lightning` and of Ray Train: a mixin of ours and a base of theirs each."""
# ruff: noqa: D101

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from lightning_commhooks.lightning.averaging import AverageFirst, AveragesModelsMixin
from lightning_commhooks.lightning.ddp import CompressedDDPMixin
from lightning_commhooks.lightning.fsdp_strategies import CompressedFSDPMixin, CompressedModelParallelMixin
from lightning_commhooks.lightning.monitor_callback import CommHookMonitorMixin
from lightning_commhooks.lightning.refusals import REPLACED


class CompressedRayDDPMixin(CompressedDDPMixin):
    """Ray Train's `RayDDPStrategy` with a communication hook.

    In the function that a `TorchTrainer` runs on each worker:
    `Trainer(strategy=CompressedRayDDPStrategy(hook="powersgd"), plugins=[RayLightningEnvironment()], devices="auto")`.

    A `RayDDPStrategy` is of `lightning` where that is installed, and of `pytorch_lightning` where only that is; so is
    this one, and the `Trainer` has to be of the same package.

    Args:
        hook: as of [`CompressedDDPStrategy`][], as are all others.
        hook_state: the state of a hook function.
        exact_state: save what differs between ranks for each of them, so that a run resumes bit by bit on CPU.
        strict_state: whether hook state in a checkpoint that does not fit is an error.
        resync: with hooks that let ranks step alone, whether training goes on from the average after each checkpoint.
        accumulation: what gradients are divided by that are accumulated over batches.
        **kwargs: arguments of `RayDDPStrategy` and of `torch.nn.parallel.DistributedDataParallel`. Ray makes processes
            and their group: `process_group_backend` and `timeout` are options of its `TorchConfig`, and there is no
            `start_method`.

    Raises:
        MisconfigurationException: unknown hook, a function that DDP would refuse, or an argument that `hook` or Ray
            replaces.
    """

    _replaced: ClassVar[Mapping[str, str]] = {
        **REPLACED,
        "process_group_backend": "Ray makes the process group, by TorchTrainer(torch_config=TorchConfig(backend=...))",
        "timeout": "Ray makes the process group, by TorchTrainer(torch_config=TorchConfig(timeout_s=...))",
        "start_method": "Ray has started the workers. Leave it out",
    }


# By what our names end in: the two class trees, usually both installed, and how to install them.
_TREES = {
    "": ("lightning.pytorch", "Lightning: pip install 'lightning-commhooks[lightning]'"),
    "PL": ("pytorch_lightning", "the standalone package: pip install pytorch-lightning"),
}
_PARTS: dict[str, tuple[type, str]] = {
    "AverageFirstCallback": (AverageFirst, "callbacks.Callback"),
    "CommHookMonitor": (CommHookMonitorMixin, "callbacks.Callback"),
    "CompressedDDPStrategy": (CompressedDDPMixin, "strategies.DDPStrategy"),
    "CompressedFSDPStrategy": (CompressedFSDPMixin, "strategies.FSDPStrategy"),
    "CompressedModelParallelStrategy": (CompressedModelParallelMixin, "strategies.ModelParallelStrategy"),
}


def __getattr__(name: str) -> type[Any]:
    """Make a class when it, or an object of it in a pickle, is first asked for: that imports its package."""
    mixin: type
    tree = "PL" if name.endswith("PL") else ""
    if name == "CompressedRayDDPStrategy":
        needs = "Ray Train and Lightning: pip install 'lightning-commhooks[ray]'"
        mixin, base = CompressedRayDDPMixin, _imported("ray.train.lightning.RayDDPStrategy", needs)
        # Callbacks and exceptions are of the package that the base is of, whatever else is installed.
        origin = next(parent.__module__ for parent in base.__mro__ if parent.__name__ == "DDPStrategy")
        tree = "PL" if origin.startswith("pytorch_lightning.") else ""
    elif name.removesuffix("PL") in _PARTS:
        mixin, path = _PARTS[name.removesuffix("PL")]
        package, needs = _TREES[tree]
        base = _imported(f"{package}.{path}", needs)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Another thread may have made it meanwhile.
    made: type[Any] = globals().setdefault(name, _made(name, mixin, base, tree))
    return made


def _imported(path: str, needs: str) -> type[Any]:
    module, _, name = path.rpartition(".")
    try:
        found: type[Any] = getattr(import_module(module), name)
    except ImportError as error:
        raise ImportError(f"this needs {needs}") from error
    return found


def _made(name: str, mixin: type, base: type, tree: str) -> type[Any]:
    package, _ = _TREES[tree]

    class Made(mixin, base):
        __doc__ = mixin.__doc__

        _misconfiguration = import_module(f"{package}.utilities.exceptions").MisconfigurationException
        _rank_zero_info = staticmethod(import_module(f"{package}.utilities.rank_zero").rank_zero_info)
        _strategy = f"CompressedDDPStrategy{tree}"
        if issubclass(mixin, AveragesModelsMixin):
            _callback_class = getattr(sys.modules[__name__], f"AverageFirstCallback{tree}")

    Made.__name__ = Made.__qualname__ = name
    return Made


if TYPE_CHECKING:
    from lightning.pytorch import Callback, strategies
    from pytorch_lightning import Callback as CallbackPL
    from pytorch_lightning import strategies as strategies_pl
    from ray.train.lightning import RayDDPStrategy

    class CommHookMonitor(CommHookMonitorMixin, Callback): ...

    class CommHookMonitorPL(CommHookMonitorMixin, CallbackPL): ...

    class CompressedDDPStrategy(CompressedDDPMixin, strategies.DDPStrategy): ...

    class CompressedDDPStrategyPL(CompressedDDPMixin, strategies_pl.DDPStrategy): ...

    class CompressedFSDPStrategy(CompressedFSDPMixin, strategies.FSDPStrategy): ...

    class CompressedFSDPStrategyPL(CompressedFSDPMixin, strategies_pl.FSDPStrategy): ...

    class CompressedModelParallelStrategy(CompressedModelParallelMixin, strategies.ModelParallelStrategy): ...

    class CompressedModelParallelStrategyPL(CompressedModelParallelMixin, strategies_pl.ModelParallelStrategy): ...

    class CompressedRayDDPStrategy(CompressedRayDDPMixin, RayDDPStrategy): ...
