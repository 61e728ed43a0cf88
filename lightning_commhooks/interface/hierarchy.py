"""Hooks between nodes: gradients are averaged within each node before the hook averages them between nodes."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor

from lightning_commhooks.collectives.by_node import has_levels, nodes_as_ranks
from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.steps import Steps
from lightning_commhooks.interface.bucket import Bucket
from lightning_commhooks.interface.hook import BoundHook
from lightning_commhooks.interface.state import StateReader
from lightning_commhooks.interface.wrapper import BoundAround

# "node": average within each node first; `None`: the hook averages over all ranks.
Hierarchy = Literal["node"] | None


def check_hierarchy(value: object) -> None:
    """Require a `Hierarchy`; raises a `ValueError`."""
    if value not in (None, "node"):
        raise ValueError(f"hierarchy must be None or 'node', got {value!r}")


def bind_by_node(hierarchy: Hierarchy, group: Group, bind: Callable[[Group], BoundHook]) -> BoundHook:
    """Bind a hook that averages gradients to all ranks, or to their nodes, as its option `hierarchy` says.

    Raises a `ValueError` if nodes have different numbers of ranks.
    """
    if hierarchy is None:
        return bind(group)
    if len(group.nodes()) == 1 and group.size > 1 and group.rank == 0:
        warnings.warn(
            f"hierarchy={hierarchy!r} does nothing: all {group.size} ranks are on one node. If they are not, let their "
            "launcher set NODE_RANK",
            stacklevel=2,
        )
    if not has_levels(group):
        return bind(group)
    nodes = nodes_as_ranks(group)
    return _NodeFirst(bind(nodes), group, nodes)


class _NodeFirst(BoundAround):
    """Averages gradients within each node, and then between nodes with the inner hook, whose ranks are the nodes.

    All ranks of a node run the inner hook on the same numbers and have the same memory.
    """

    def __init__(self, inner: BoundHook, group: Group, nodes: Group) -> None:
        super().__init__(inner)
        self.scales_gradients = True
        self.group = group
        self._nodes = nodes
        self._ranks = next(node for node in group.nodes() if group.rank in node)

    def reduce(self, bucket: Bucket, ranks: Group) -> Steps[Tensor | None]:
        within, unused = ranks.split(self.group.nodes()), bucket.unused
        if unused is not None:
            used = (yield from within.not_gradients().all_reduce_(bucket.used(bucket.slots, bucket.flat))).tolist()
            unused = frozenset(slot.name for slot, num in zip(bucket.slots, used, strict=True) if not num)
        yield from within.all_reduce_mean_(bucket.flat, bucket.scale)
        averaged = dataclasses.replace(bucket, scale=1.0, unused=unused)
        return (yield from self.inner.reduce(averaged, self._nodes.for_bucket(ranks)))

    def load_state_dict(self, state: dict[str, Any], reader: StateReader) -> None:
        # The state may be from another hook or without the option, and differ within a node.
        with reader.of_ranks(self._ranks):
            super().load_state_dict(state, reader)
