"""All ranks of a group, which average within each node first and between nodes then."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from lightning_commhooks.codecs.codec import Kernels
from lightning_commhooks.collectives.chunk import Chunk
from lightning_commhooks.collectives.communicator import SendToAll, Wait
from lightning_commhooks.collectives.group import Group, Part
from lightning_commhooks.collectives.two_levels import TwoLevels


class HierarchicalGroup(TwoLevels):
    """All ranks of a group; see `has_levels` for which there are.

    What is summed, or averaged encoded, is summed within each node as it is first, by which each rank has the sum of a
    part. It goes on with that among the ranks of the same number, which are on the other nodes, and in the end the
    parts are gathered within the node: as hierarchical all-reduces do it, and ZeRO++ with what is encoded (Wang et al.
    2023, https://arxiv.org/abs/2306.10209, section 3.3). So a rank encodes its part only, remembers what is owed of
    that, and what leaves a node is what one rank would send.

    Legend: n nodes of l ranks each.
    """

    def __init__(self, everyone: Group) -> None:
        super().__init__(everyone)
        self.size, self.rank = everyone.size, everyone.rank
        self._node = next(ranks for ranks in everyone.nodes() if everyone.rank in ranks)

    def parts(self, two_shot: bool = True) -> tuple[Part, Part | None]:
        within, mean = self.within, self.across.parts(two_shot)[1]
        numbers = Part(within.rank, within.size, within, self._node)
        if mean is None:
            return numbers, None
        index, count = within.rank * mean.count + mean.index, within.size * mean.count
        return numbers, Part(index, count, self, range(self.size))

    def _num_payloads(self, two_shot: bool) -> set[int]:
        return self.across._num_payloads(two_shot)

    def _weigh_(self, chunks: Sequence[Chunk], scale: float | Tensor) -> float | Tensor:
        if not (isinstance(scale, float) and scale == 1):
            # Ranks of a node may have different ones.
            for chunk in chunks:
                if chunk.owed is not None:
                    chunk.numbers.mul_(scale)
        return 1.0

    def _begin_averages(
        self, chunks: Iterable[Chunk], kernels: Kernels, factor: Tensor, two_shot: bool
    ) -> list[Callable[[], Tensor]]:
        size = self.within.size
        arriving = deque((chunk, self.within._begin_sum_of_rows(chunk.numbers.view(size, -1))) for chunk in chunks)

        def parts() -> Iterator[Chunk]:
            # While one part is encoded and sent to other nodes, the next ones come from this one.
            while arriving:
                chunk, wait = arriving.popleft()
                yield replace(chunk, numbers=wait().div_(size).view(-1, chunk.numbers.shape[1]))

        waits = self.across._begin_averages(parts(), kernels, factor, two_shot)
        return [self._gathered(wait) for wait in waits]

    def _gathered(self, wait: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Gather payloads within the node, where each rank has those of its part, shape `(k, b / l, bytes)`."""

        def finish() -> Tensor:
            own = wait()
            parts = self.within.all_gather(own.reshape(-1)).view(self.within.size, *own.shape)
            return parts.transpose(0, 1).reshape(own.shape[0], -1, own.shape[2])

        return finish

    def _sum_(self, tensor: Tensor) -> Wait:
        flat, num = tensor.view(-1), self.within.size
        filled = flat.new_zeros(-(-flat.numel() // num) * num)
        filled[: flat.numel()] = flat
        own = self.within._begin_sum_of_rows(filled.view(num, -1))()
        wait = self.across._begin_all_reduce_(own)

        def finish() -> Tensor:
            flat.copy_(self.within.all_gather(wait()).view(-1)[: flat.numel()])
            return tensor

        return finish

    def _expect_all_gather(self, like: Tensor) -> SendToAll:
        return self._everyone._expect_all_gather(like)

    def _begin_all_to_all(self, chunks: Tensor) -> Wait:
        return self._everyone._begin_all_to_all(chunks)

    def _begin_sum_of_rows(self, chunks: Tensor) -> Wait:
        return self._everyone._begin_sum_of_rows(chunks)
