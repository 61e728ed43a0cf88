"""One algorithm per file. Importing this package registers all of them."""

from lightning_commhooks.hooks.allgather import AllGather
from lightning_commhooks.hooks.allreduce import AllReduce
from lightning_commhooks.hooks.batched_powersgd import BatchedPowerSGD
from lightning_commhooks.hooks.half import BF16, FP16
from lightning_commhooks.hooks.noop import Noop
from lightning_commhooks.hooks.powersgd import PowerSGD

__all__ = ["BF16", "FP16", "AllGather", "AllReduce", "BatchedPowerSGD", "Noop", "PowerSGD"]
