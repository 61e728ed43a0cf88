"""Nodes as ranks: collectives in which a node sends the traffic of one rank, not of all its ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.steps import Steps


class ByNode:
    """A transport made of two: all ranks of a node call a collective with equal tensors, and have equal results.

    Each exchanges a share of the tensor with the ranks of the same number on the other nodes, in `across`, and gathers
    the other shares from its own node, in `within`. Nodes have as many ranks each. Attributes are those of `Direct`.

    Legend: n nodes of l ranks each; k elements in each of the l shares of a tensor, filled up with zeros.
    """

    def __init__(self, within: Group, across: Group) -> None:
        self.within, self.across = within, across
        self.is_ordered, self.latency = across.is_ordered, across.latency
        self.size, self.rank = across.size, across.rank

    def channel(self, number: int, ranks: Group) -> ByNode:
        """The same nodes for the bucket that `ranks` are for."""
        # Numbers are counted where they are given to the nodes, not once more for each share of them.
        shares = ranks.not_gradients()
        return ByNode(self.within.for_bucket(shares), self.across.for_bucket(shares))

    def among(self, members: Sequence[int], part: int) -> None:
        """Return `None`: nodes are not divided."""

    def num_rounds(self, num_bytes: int) -> int:
        """Return 0: the groups within and across nodes count rounds."""
        return 0

    def sum_(self, tensor: Tensor) -> Steps[Tensor]:
        """Replace a contiguous tensor by its sum over nodes."""
        flat = tensor.view(-1)
        own = yield from self.across.all_reduce_(self._share(flat.view(1, -1)))
        flat.copy_((yield from self._from_shares(own.view(1, -1), flat.numel())).view(-1))
        return tensor

    def expect(self, like: Tensor) -> object:
        """See `Direct.expect`."""
        return self.across.expect_all_gather(self._share(like.view(1, -1)))

    def gather(self, tensor: Tensor, expected: object = None) -> Steps[Tensor]:
        """The tensors of all nodes, shape `(n, numel)`."""
        gathered = yield from self.across.all_gather(self._share(tensor.view(1, -1)), expected)
        return (yield from self._from_shares(gathered, tensor.numel()))

    def exchange(self, chunks: Tensor) -> Steps[Tensor]:
        """Send row i of `chunks` to node i; row i of the result comes from node i."""
        received = yield from self.across.all_to_all(self._share(chunks).view(chunks.shape[0], -1))
        return (yield from self._from_shares(received, chunks.shape[1]))

    def _share(self, rows: Tensor) -> Tensor:
        """This rank's share of the columns of a tensor, shape `(rows * k,)`; a copy, as it may be changed."""
        num = -(-rows.shape[1] // self.within.size)
        own = rows[:, self.within.rank * num : (self.within.rank + 1) * num]
        share = rows.new_zeros((rows.shape[0], num))
        share[:, : own.shape[1]] = own
        return share.view(-1)

    def _from_shares(self, own: Tensor, numel: int) -> Steps[Tensor]:
        """All columns, shape `(rows, numel)`, of which each rank of the node has its share, `(rows, k)`."""
        shares = (yield from self.within.all_gather(own.reshape(-1))).view(self.within.size, *own.shape)
        return shares.transpose(0, 1).reshape(own.shape[0], -1)[:, :numel].contiguous()


def nodes_as_ranks(everyone: Group) -> Group:
    """The nodes of a group as its ranks; see `has_levels` for which there are. Collective at the first call."""
    ranks_by_node = everyone.nodes()
    within = everyone.split(ranks_by_node)
    across = everyone.split([list(ranks) for ranks in zip(*ranks_by_node, strict=True)])
    by_number = [[node] for node in range(across.size)]
    nodes = Group(ByNode(within, across), everyone.counters, everyone.device, nodes=by_number, everyone=everyone)
    return nodes if everyone.codec is None else nodes.encoding(everyone.codec)


def has_levels(group: Group) -> bool:
    """Whether there are several nodes, of several ranks each, and as many on each. Collective at the first call."""
    sizes = [len(node) for node in group.nodes()]
    if len(set(sizes)) > 1:
        raise ValueError(
            f"hierarchy='node' needs the same number of ranks on every node, and the nodes have {sizes}. Start equal "
            "numbers of processes, or leave hierarchy out"
        )
    return len(sizes) > 1 and sizes[0] > 1
