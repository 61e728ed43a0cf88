"""The collectives of a process group's own backend: NCCL's, and gloo's between near ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_commhooks.collectives.direct import Direct
from lightning_commhooks.collectives.messages import Messages
from lightning_commhooks.collectives.steps import Steps, Wait


def renamed(name: str, since_2_13: str) -> Callable[..., dist.Work | None]:
    """Return a collective by its name from PyTorch 2.13 on, or by its older name."""
    collective: Callable[..., dist.Work | None] = getattr(dist, since_2_13, None) or getattr(dist, name)
    return collective


class Backend:
    """Collectives that all ranks have to begin in the same order, without channels.

    Args:
        process_group: the ranks.
        messages: messages among the same ranks on CPU, for subgroups.

    Attributes:
        is_ordered: whether all ranks have to begin collectives in the same order.
        latency: seconds that a message takes; 0 for near ranks.
        size: number of ranks.
        rank: this rank.
    """

    is_ordered = True
    latency = 0.0

    def __init__(self, process_group: dist.ProcessGroup, messages: Messages | None = None) -> None:
        self._process_group = process_group
        self._messages = messages
        self.size, self.rank = process_group.size(), process_group.rank()

    def channel(self, number: int, ranks: object = None) -> Backend:
        """Return itself: all buckets share the same collectives."""
        return self

    def among(self, ranks: Sequence[int], part: int) -> Direct | None:
        """Return collectives of some ranks; `None` if they need their own process group."""
        return None if self._messages is None else Direct(self._messages.among(ranks, part))

    def num_rounds(self, num_bytes: int) -> int:
        """Return the number of rounds of messages of a sum: twice around the ring."""
        return 2 * (self.size - 1)

    def sum_(self, tensor: Tensor) -> Steps[Tensor]:
        """Replace a contiguous tensor by its sum over ranks."""
        return self._run(tensor, dist.all_reduce, tensor)

    def expect(self, like: Tensor) -> None:
        """Do nothing: see `Direct.expect`."""

    def gather(self, tensor: Tensor, expected: object = None) -> Steps[Tensor]:
        """Return the contiguous tensors of all ranks, shape `(w, n)`."""
        gathered = tensor.new_empty((self.size, tensor.numel()))
        all_gather = renamed("all_gather_into_tensor", "all_gather_single")
        return self._run(gathered, all_gather, gathered.view(-1), tensor)  # gloo takes no rows

    def exchange(self, chunks: Tensor) -> Steps[Tensor]:
        """Send row i of `chunks`, shape `(w, n)`, to rank i; row i of the result comes from rank i."""
        received = torch.empty_like(chunks)
        return self._run(received, dist.all_to_all_single, received, chunks)

    def sum_share(self, chunks: Tensor) -> Steps[Tensor]:
        """Return the sum over ranks of this rank's row of `chunks`, shape `(w, n)`."""
        total = chunks.new_empty(chunks.shape[1])
        reduce_scatter = renamed("reduce_scatter_tensor", "reduce_scatter_single")
        return self._run(total, reduce_scatter, total, chunks.view(-1))

    def _run(self, result: Tensor, collective: Callable[..., dist.Work | None], *args: object) -> Steps[Tensor]:
        work = collective(*args, group=self._process_group, async_op=True)
        assert work is not None
        yield Wait([work])
        return result
