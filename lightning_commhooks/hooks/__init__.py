"""One algorithm per file. Importing this package registers all of them."""

from lightning_commhooks.hooks.affine import QuantizePerChannel, QuantizePerTensor
from lightning_commhooks.hooks.allgather import AllGather
from lightning_commhooks.hooks.allreduce import AllReduce
from lightning_commhooks.hooks.chunked_topk import ChunkedTopK
from lightning_commhooks.hooks.diloco import DiLoCo
from lightning_commhooks.hooks.half import BF16, FP16
from lightning_commhooks.hooks.hierarchical_localsgd import HierarchicalLocalSGD
from lightning_commhooks.hooks.noop import Noop
from lightning_commhooks.hooks.post_localsgd import PostLocalSGD
from lightning_commhooks.hooks.powersgd import BatchedPowerSGD, PowerSGD
from lightning_commhooks.hooks.quantized import FP8, Int2, Int4, Int8

__all__ = [
    "BF16",
    "FP8",
    "FP16",
    "AllGather",
    "AllReduce",
    "BatchedPowerSGD",
    "ChunkedTopK",
    "DiLoCo",
    "HierarchicalLocalSGD",
    "Int2",
    "Int4",
    "Int8",
    "Noop",
    "PostLocalSGD",
    "PowerSGD",
    "QuantizePerChannel",
    "QuantizePerTensor",
]
