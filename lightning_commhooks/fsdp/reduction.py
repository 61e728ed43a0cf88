"""How gradients of sharded models are reduced."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from lightning_commhooks.fsdp.shard_group import ShardGroup


class ShardedReduction(ABC):
    """Reduces flat gradients of a sharded model in one group of ranks. Keeps no memory of gradients.

    FSDP calls for one of its units after another, in the same order on every rank, and gets the result at once: on
    CUDA on the stream that is current.
    """

    def __init__(self, group: ShardGroup) -> None:
        self.group = group

    @abstractmethod
    def reduce_scatter(self, flat: Tensor, out: Tensor, factor: float) -> None:
        """Write this rank's share of `factor` times the sum of all ranks' gradients.

        Args:
            flat: shape `(w * n,)`, this rank's gradients, n elements for each rank in turn. May be overwritten.
            out: shape `(n,)`, any floating-point dtype.
            factor: 1/w for the mean.
        """

    @abstractmethod
    def all_reduce_(self, flat: Tensor, factor: float) -> None:
        """Replace gradients that are not sharded by `factor` times their sum, equal on all ranks."""
