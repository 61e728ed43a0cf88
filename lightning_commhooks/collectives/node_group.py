"""Nodes as ranks: collectives in which what leaves a node is what one rank sends, not all of its ranks."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lightning_commhooks.collectives.communicator import SendToAll, Wait
from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.two_levels import TwoLevels


class NodeGroup(TwoLevels):
    """The nodes of a group, each as one rank of this one; see `has_levels` for which there are.

    All ranks of a node call a collective with equal tensors, and have equal results. Each exchanges a share of the
    tensor with the ranks of the same number on the other nodes, and gathers the other shares from its own node.

    Legend: n nodes of l ranks each; k elements in each of the l shares of a tensor, filled up with zeros.
    """

    def __init__(self, everyone: Group) -> None:
        super().__init__(everyone)
        self.size, self.rank = self.across.size, self.across.rank

    def _sum_(self, tensor: Tensor) -> Wait:
        flat = tensor.view(-1)
        own = self._share(flat.view(1, -1))
        wait = self.across._begin_all_reduce_(own)

        def finish() -> Tensor:
            flat.copy_(self._from_shares(wait().view(1, -1), flat.numel()).view(-1))
            return tensor

        return finish

    def _gather(self, like: Tensor) -> SendToAll:
        send = self.across._expect_all_gather(self._share(like.view(1, -1)))

        def begin(tensor: Tensor, of_equals: Callable[[], Tensor] | None) -> Wait:
            wait = send(self._share(tensor.view(1, -1)), None)
            return lambda: self._from_shares(wait(), tensor.numel())

        return begin

    def _exchange(self, chunks: Tensor) -> Wait:
        wait = self.across._begin_all_to_all(self._share(chunks).view(chunks.shape[0], -1))
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
