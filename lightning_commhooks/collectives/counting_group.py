"""What would a hook send? Ranks that are not there, and tensors without memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_commhooks.codecs.codec import Codec, Kernels
from lightning_commhooks.collectives.communicator import SendToAll, Wait
from lightning_commhooks.collectives.counters import Counters
from lightning_commhooks.collectives.group import Group


class CountingGroup(Group):
    """As many ranks as another group has, for tensors on the meta device: counts what a hook sends, and sends nothing.

    Results have the right shapes and no numbers, so it serves hooks that read none on the host. Those that do raise, as
    PyTorch does for tensors on that device.

    Args:
        like: the group; it is asked for nothing that it would have to communicate for.
        size: number of ranks, if it is another one.
        counters: where bytes are counted.
    """

    is_dry_run = True
    _why_no_process_group = "this is a dry run: there is no process group, only collectives of the hook's Group count"

    def __init__(self, like: Group, size: int | None = None, counters: Counters | None = None) -> None:
        super().__init__(None, counters, "meta")
        self.size = like.size if size is None else size
        self.rank = like.rank if size is None else 0
        self.global_rank = like.global_rank
        self.num_lanes = like.num_lanes
        self._latency = like.latency
        self._nodes = [list(node) for node in like._nodes]

    @property
    def latency(self) -> float:
        return self._latency

    def nodes(self) -> list[list[int]]:
        """Ranks by node.

        Raises:
            RuntimeError: nobody has asked for them in the real group.
        """
        if not self._nodes:
            raise RuntimeError("which ranks are on one node is not known in a dry run")
        return self._nodes

    def all_gather_numbers(self, numbers: list[int], dtype: torch.dtype = torch.int64) -> list[list[int]]:
        """As if all ranks had the numbers of this one."""
        self.all_gather(torch.empty(len(numbers), dtype=dtype, device=self.device))
        return [list(numbers) for _ in range(self.size)]

    def kernels(self, codec: Codec, *, feedback: bool, two_shot: bool) -> Kernels:
        return _CountingKernels(codec)

    def _split(self, subgroups: tuple[tuple[int, ...], ...]) -> Group:
        own = next(ranks for ranks in subgroups if self.rank in ranks)
        group = CountingGroup(self, len(own), self.counters)
        group.rank, group._nodes = own.index(self.rank), []
        return group

    def _sum_(self, tensor: Tensor) -> Wait:
        return lambda: tensor

    def _gather(self, like: Tensor) -> SendToAll:
        def send(tensor: Tensor, of_equals: Callable[[], Tensor] | None) -> Wait:
            gathered = tensor.new_empty((self.size, tensor.numel()))
            return lambda: gathered

        return send

    def _exchange(self, chunks: Tensor) -> Wait:
        received = torch.empty_like(chunks)
        return lambda: received


class _CountingKernels(Kernels):
    """Payloads of the right size, without encoding anything but one block."""

    def __init__(self, codec: Codec) -> None:
        super().__init__(codec)
        self._num_bytes: dict[int, int] = {}

    def seed(self, number: int, device: torch.device) -> Tensor:
        return torch.empty((), dtype=torch.int32, device=device)

    def encode(self, numbers: Tensor, residual: Tensor | None, factor: Tensor, seed: Tensor) -> Tensor:
        rows, size = numbers.shape
        if size not in self._num_bytes:
            codes, scales, _ = self.codec.quantize(numbers.new_empty((1, size)), seed)
            self._num_bytes[size] = sum(part.numel() * part.element_size() for part in (codes, scales))
        return numbers.new_empty((rows, self._num_bytes[size]), dtype=torch.uint8)

    def encode_mean(self, mean: Tensor, residual: Tensor | None, factor: Tensor, seed: Tensor) -> Tensor:
        return self.encode(mean, residual, factor, seed)

    def decode_mean(self, payloads: Tensor, factor: Tensor, out: Tensor) -> Tensor:
        return out.new_empty((), dtype=torch.bool)


def on_meta(tensor: Tensor) -> Tensor:
    """A tensor on the meta device with the dtype and layout of this one."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
