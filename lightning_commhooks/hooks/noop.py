"""No communication at all: how fast could training be if the network were free?"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.steps import Steps, result
from lightning_commhooks.interface.bucket import Bucket
from lightning_commhooks.interface.hook import BoundHook, CommHook
from lightning_commhooks.interface.registry import register


@register
@dataclass(frozen=True, kw_only=True)
class Noop(CommHook):
    """Send nothing and leave every rank with its own gradients, to measure headroom.

    **Ranks diverge**: the model is not trained in parallel, and checkpoints hold rank 0's model. Compare the
    step time with `allreduce`: the difference is all that any compression can gain. The same as PyTorch's
    `debugging_hooks.noop_hook`.
    """

    name: ClassVar[str] = "noop"

    def bind(self, group: Group) -> BoundHook:
        return _BoundNoop(group)


class _BoundNoop(BoundHook):
    _warned = False

    def reduce(self, bucket: Bucket, ranks: Group) -> Steps[None]:
        if not self._warned and self.group.size > 1 and self.group.global_rank == 0:
            self._warned = True
            warnings.warn(
                "hook='noop' does not average gradients: the ranks' models diverge. Use it to measure how much "
                "time communication costs, never to train",
                stacklevel=2,
            )
        return result(None)

    def reduce_sparse(self, grad: Tensor, bucket: Bucket, ranks: Group) -> Steps[Tensor]:
        return result(grad)
