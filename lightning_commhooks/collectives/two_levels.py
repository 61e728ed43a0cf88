"""What groups have in common that work within nodes and between them."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_commhooks.collectives.communicator import Kind, Wait
from lightning_commhooks.collectives.group import Group


class TwoLevels(Group):
    """Ranks on several nodes, as many on each. Bytes are counted by the groups within and across nodes.

    Args:
        everyone: all ranks.

    Attributes:
        within: the ranks of this node.
        across: the ranks of the same number on each node.
    """

    def __init__(self, everyone: Group) -> None:
        super().__init__(None, everyone.counters, everyone.device)
        nodes = everyone.nodes()
        self._everyone = everyone
        self.within = everyone.split(nodes)
        self.across = everyone.split([list(ranks) for ranks in zip(*nodes, strict=True)])
        self.num_lanes = everyone.num_lanes
        self.global_rank = everyone.global_rank

    def all_gather_numbers(self, numbers: list[int], dtype: torch.dtype = torch.int64) -> list[list[int]]:
        """The numbers of each rank of all nodes, which may differ within a node."""
        return self._everyone.all_gather_numbers(numbers, dtype)

    def all_reduce_sparse_mean(self, grad: Tensor) -> Tensor:
        """Mean over all ranks of a sparse COO tensor, which may differ within a node."""
        return self._everyone.all_reduce_sparse_mean(grad)

    def _count(self, kind: Kind, num_bytes: float) -> None:
        """Nothing: the groups within and across nodes count."""

    def _counted(self, wait: Wait, kind: Kind, num_bytes: int) -> Wait:
        return wait


def has_levels(group: Group) -> bool:
    """Whether there are several nodes, of several ranks each. Collective at the first call.

    Raises:
        ValueError: nodes have different numbers of ranks.
    """
    sizes = [len(node) for node in group.nodes()]
    if len(set(sizes)) > 1:
        raise ValueError(
            f"hierarchy='node' needs as many ranks on each node, which have {sizes}: each node counts as much as any "
            "other. Start equal numbers of processes, or leave hierarchy out"
        )
    return len(sizes) > 1 and sizes[0] > 1
