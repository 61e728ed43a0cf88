"""Hooks at work on models that FSDP shards. Importing this package registers what they can do there."""

from lightning_commhooks.fsdp.dense import DenseReduction
from lightning_commhooks.fsdp.encoded import EncodedReduction

__all__ = ["DenseReduction", "EncodedReduction"]
