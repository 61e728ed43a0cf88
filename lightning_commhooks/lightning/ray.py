"""The strategy for Ray Train."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

try:
    from ray.train.lightning import RayDDPStrategy
except ImportError as error:
    raise ImportError("this needs Ray Train and Lightning: pip install 'lightning-commhooks[ray]'") from error

from lightning_commhooks.lightning.refusals import REPLACED

# Callbacks and exceptions are of the package that Ray's strategy is of, whatever else is installed.
if any(base.__module__.startswith("pytorch_lightning.") for base in RayDDPStrategy.__mro__):
    from lightning_commhooks.lightning.classes_pl import CompressedDDPStrategyPL as CompressedDDPStrategy
else:
    from lightning_commhooks.lightning.classes import CompressedDDPStrategy


class CompressedRayDDPStrategy(CompressedDDPStrategy, RayDDPStrategy):
    """Ray Train's `RayDDPStrategy` with a communication hook.

    In the function that a `TorchTrainer` runs on each worker:
    `Trainer(strategy=CompressedRayDDPStrategy(hook="powersgd"), plugins=[RayLightningEnvironment()], devices="auto")`.

    `RayDDPStrategy` uses `lightning` where that is installed, and `pytorch_lightning` where only that is; so does this
    strategy, and the `Trainer` must be from the same package.

    Args:
        hook: see [`CompressedDDPStrategy`][], also for the options below.
        hook_state: the state of a hook function.
        exact_state: save state that differs between ranks for every rank, so that a run resumes bit for bit on CPU.
        strict_state: whether hook state in a checkpoint that does not fit is an error.
        resync: with hooks that let ranks step alone, whether training continues from the average after each checkpoint.
        accumulation: divisor of gradients that are accumulated over batches.
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
