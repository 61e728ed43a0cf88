"""Nodes as ranks: collectives in which what leaves a node is what one rank sends, not all of its ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_commhooks.codecs.codec import Codec, Kernels
from lightning_commhooks.collectives.communicator import Kind, SendToAll, Wait
from lightning_commhooks.collectives.group import Group


class NodeGroup(Group):
    """The nodes of a group, each as one rank of this one; made by [`between_nodes`][].

    All ranks of a node call a collective with equal tensors, and have equal results. Each exchanges a share of the
    tensor with the ranks of the same number on the other nodes, and gathers the other shares from its own node.

    Legend: n nodes of l ranks each; k elements in each of the l shares of a tensor, filled up with zeros.

    Args:
        everyone: all ranks.

    Attributes:
        within: the ranks of this node.
    """

    def __init__(self, everyone: Group) -> None:
        super().__init__(None, everyone.counters, everyone.device)
        nodes = everyone.nodes()
        self._everyone = everyone
        self.within = everyone.split(nodes)
        self._across = everyone.split([list(ranks) for ranks in zip(*nodes, strict=True)])
        self.num_lanes = everyone.num_lanes
        self.size = len(nodes)
        self.rank = next(i for i, node in enumerate(nodes) if everyone.rank in node)
        self.global_rank = everyone.global_rank
        self.is_dry_run = everyone.is_dry_run

    def all_gather_numbers(self, numbers: list[int], dtype: torch.dtype = torch.int64) -> list[list[int]]:
        """The numbers of each rank of all nodes, which may differ within a node."""
        return self._everyone.all_gather_numbers(numbers, dtype)

    def kernels(self, codec: Codec, *, feedback: bool, two_shot: bool) -> Kernels:
        everyone = self._everyone
        if everyone.is_dry_run:
            return everyone.kernels(codec, feedback=feedback, two_shot=two_shot)
        return super().kernels(codec, feedback=feedback, two_shot=two_shot)

    def all_reduce_sparse_mean(self, grad: Tensor) -> Tensor:
        """Mean over all ranks of a sparse COO tensor, which may differ within a node."""
        return self._everyone.all_reduce_sparse_mean(grad)

    def _count(self, kind: Kind, num_bytes: float) -> None:
        """Nothing: the groups within and across nodes count."""

    def _counted(self, wait: Wait, kind: Kind, tensor: Tensor) -> Wait:
        return wait

    def _sum_(self, tensor: Tensor) -> Wait:
        flat = tensor.view(-1)
        own = self._share(flat.view(1, -1))
        wait = self._across._begin_all_reduce_(own)

        def finish() -> Tensor:
            flat.copy_(self._from_shares(wait().view(1, -1), flat.numel()).view(-1))
            return tensor

        return finish

    def _gather(self, like: Tensor) -> SendToAll:
        send = self._across._expect_all_gather(self._share(like.view(1, -1)))

        def begin(tensor: Tensor, of_equals: Callable[[], Tensor] | None) -> Wait:
            wait = send(self._share(tensor.view(1, -1)), None)
            return lambda: self._from_shares(wait(), tensor.numel())

        return begin

    def _exchange(self, chunks: Tensor) -> Wait:
        wait = self._across._begin_all_to_all(self._share(chunks).view(chunks.shape[0], -1))
        return lambda: self._from_shares(wait(), chunks.shape[1])

    def _share(self, rows: Tensor) -> Tensor:
        """This rank's share of the columns of a tensor, shape `(rows * k,)`; a copy, as it may be changed."""
        num = -(-rows.shape[1] // self.within.size)
        own = rows[:, self.within.rank * num : (self.within.rank + 1) * num]
        share = rows.new_zeros((rows.shape[0], num))
        share[:, : own.shape[1]] = own
        return share.view(-1)

    def _from_shares(self, own: Tensor, numel: int) -> Tensor:
        """All columns, shape `(rows, numel)`, of which each rank of the node has its share, `(rows, k)`."""
        shares = self.within.all_gather(own.reshape(-1)).view(self.within.size, *own.shape)
        return shares.transpose(0, 1).reshape(own.shape[0], -1)[:, :numel].contiguous()


def between_nodes(group: Group) -> Group:
    """The nodes of a group as ranks. Collective at the first call.

    Returns:
        a [`NodeGroup`][]; the group itself where there is one rank on each node, or one node.

    Raises:
        ValueError: nodes have different numbers of ranks.
    """
    nodes = group.nodes()
    sizes = [len(node) for node in nodes]
    if len(set(sizes)) > 1:
        raise ValueError(
            f"hierarchy='node' needs as many ranks on each node, which have {sizes}: each node counts as much as any "
            "other. Start equal numbers of processes, or leave hierarchy out"
        )
    if len(nodes) == 1 or sizes[0] == 1:
        return group
    between = NodeGroup(group)
    return between if group._codec is None else between.encoding(group._codec)
