"""The strategy for Ray Train."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

try:
    from ray.train.lightning import RayDDPStrategy
except ImportError as error:
    raise ImportError("this needs Ray Train and Lightning: pip install 'lightning-commhooks[ray]'") from error

from lightning_commhooks.lightning.refusals import REPLACED

# Callbacks and exceptions come from the package of Ray's strategy, even if both packages are installed.
if any(base.__module__.startswith("pytorch_lightning.") for base in RayDDPStrategy.__mro__):
    from lightning_commhooks.lightning.classes_pl import CompressedDDPStrategyPL as CompressedDDPStrategy
else:
    from lightning_commhooks.lightning.classes import CompressedDDPStrategy


class CompressedRayDDPStrategy(CompressedDDPStrategy, RayDDPStrategy):
    """Ray Train's `RayDDPStrategy` with a communication hook; the options are those of [`CompressedDDPStrategy`][].

    In the function that a `TorchTrainer` runs on each worker:
    `Trainer(strategy=CompressedRayDDPStrategy(hook="powersgd"), plugins=[RayLightningEnvironment()], devices="auto")`.

    `RayDDPStrategy` and this strategy use `lightning` if it is installed, otherwise `pytorch_lightning`; the `Trainer`
    must be from the same package.

    Raises:
        MisconfigurationException: unknown hook, a function that DDP would refuse, or an argument that `hook` or Ray
            replaces: Ray starts the processes, and `process_group_backend` and `timeout` are options of its
            `TorchConfig`.
    """

    _replaced: ClassVar[Mapping[str, str]] = {
        **REPLACED,
        "process_group_backend": "Ray makes the process group, by TorchTrainer(torch_config=TorchConfig(backend=...))",
        "timeout": "Ray makes the process group, by TorchTrainer(torch_config=TorchConfig(timeout_s=...))",
        "start_method": "Ray has started the workers. Leave it out",
    }
