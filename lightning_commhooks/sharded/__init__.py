"""Reductions of sharded gradients, one algorithm per file. Importing this package registers all of them."""

from lightning_commhooks.sharded.dense import DenseReduction
from lightning_commhooks.sharded.encoded import EncodedReduction

__all__ = ["DenseReduction", "EncodedReduction"]
