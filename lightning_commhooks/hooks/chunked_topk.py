"""The largest numbers of each chunk, in 2 bit, with a decaying residual."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_commhooks.codecs.codec import pack, unpack
from lightning_commhooks.codecs.formats import Int2Codec
from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.steps import Steps
from lightning_commhooks.interface.bucket import Bucket, Slot
from lightning_commhooks.interface.checks import check_bool, check_integer
from lightning_commhooks.interface.error_feedback import ErrorFeedback
from lightning_commhooks.interface.hook import BoundHook, CommHook
from lightning_commhooks.interface.registry import register
from lightning_commhooks.interface.state import Shapes

# Indices have 12 bits.
_LARGEST_CHUNK = 4096


@register
@dataclass(frozen=True, kw_only=True)
class ChunkedTopK(CommHook):
    """Send the `k` largest numbers of each chunk, in 2 bit and with 12 bits for where they are; keep the rest.

    The encoding of SparseLoCo, Sarfi et al. 2025, https://arxiv.org/abs/2508.15706, meant for pseudo-gradients:
    `DiLoCo(pseudo_gradient="topk", outer_momentum=0, outer_lr=1)`. Differs from it in that chunks are consecutive
    numbers of a parameter, not squares of a matrix, and in the levels of the 2-bit values, which are those of
    [`Int2Codec`][].

    An all-gather: sends `(w-1) * (1.75 k + 8)` bytes for a chunk, 120 by default with two ranks, where a ring sends
    16,384 in float32, 137 times as many. With 9 ranks it is 30 times.

    Args:
        k: how many numbers of each chunk are sent, a multiple of 8; 64 of 4,096 are 1.6%.
        chunk_size: consecutive elements of a chunk, at most 4,096. Each parameter begins one.
        decay: factor by which residuals are multiplied before each step. Below 1, numbers that wait for long are
            forgotten in part, which replaces momentum; 1 forgets nothing.
        compress_1d: also encode biases and other one-dimensional parameters. Gradients of fewer elements than a chunk
            are never encoded.

    Raises:
        ValueError: a value is out of range.
    """

    name: ClassVar[str] = "chunked_topk"

    k: int = 64
    chunk_size: int = 4096
    decay: float = 0.95
    compress_1d: bool = False

    def __post_init__(self) -> None:
        check_integer("k", self.k, 8)
        check_integer("chunk_size", self.chunk_size, 8)
        if self.chunk_size > _LARGEST_CHUNK:
            raise ValueError(f"chunk_size must be at most {_LARGEST_CHUNK}, got {self.chunk_size}")
        if self.k % 8 or self.k > self.chunk_size:
            raise ValueError(f"k must be a multiple of 8 up to chunk_size={self.chunk_size}, got {self.k}")
        if not isinstance(self.decay, (int, float)) or not 0 < self.decay <= 1:
            raise ValueError(f"decay must be above 0 and up to 1, got {self.decay!r}")
        check_bool("compress_1d", self.compress_1d)

    def compresses(self, shape: Sequence[int]) -> bool:
        """Whether a gradient of that shape is encoded."""
        return math.prod(shape) >= self.chunk_size and (self.compress_1d or len(shape) > 1)

    def bind(self, group: Group) -> BoundHook:
        return _BoundChunkedTopK(group, self)


class _BoundChunkedTopK(ErrorFeedback):
    hook: ChunkedTopK

    def __init__(self, group: Group, hook: ChunkedTopK) -> None:
        super().__init__(group, hook)
        self._codec = Int2Codec(block_size=hook.k)

    def compressed(self, bucket: Bucket) -> Sequence[Slot] | None:
        slots, _ = self.plan(bucket)
        return slots or None

    def lay_out(self, bucket: Bucket) -> tuple[list[Slot], list[Slot]]:
        """Gradients that are encoded, and the rest."""
        slots = [slot for slot in bucket.slots if self.hook.compresses(slot.shape)]
        return slots, [slot for slot in bucket.slots if not self.hook.compresses(slot.shape)]

    def average_(self, residual: Tensor | None, bucket: Bucket, ranks: Group) -> Steps[Tensor | None]:
        assert residual is not None
        residual.mul_(self.hook.decay)
        return (yield from super().average_(residual, bucket, ranks))

    def average(self, residual: Tensor, bucket: Bucket, ranks: Group) -> Steps[tuple[Tensor, Tensor]]:
        mean, sent = residual.clone(), residual.clone()
        slots, rest = self.plan(bucket)
        exact = torch.cat([residual[:0], *(slot.view(residual).view(-1) for slot in rest)])
        averaging = ranks.all_reduce_mean_(exact)
        chunks = torch.cat([self._chunks(slot.view(residual)) for slot in slots])
        places = chunks.abs().topk(self.hook.k, dim=1).indices
        codes, scales, values = self._codec.quantize(chunks.gather(1, places), chunks.new_zeros((), dtype=torch.int32))
        payload = torch.cat([pack(codes, scales), _packed(places)], dim=1)
        payloads = (yield from ranks.all_gather(payload.view(-1))).view(ranks.size, *payload.shape)
        self._write(torch.zeros_like(chunks).scatter_(1, places, values), slots, sent)
        total = torch.zeros_like(chunks)
        for theirs in payloads:  # in the order of ranks, so that all have the same sum
            total.scatter_add_(1, *self._decoded(theirs, chunks.dtype))
        self._write(total, slots, mean)
        yield from averaging
        for slot, own in zip(rest, exact.split([slot.numel for slot in rest]), strict=True):
            slot.view(mean).copy_(own.view(slot.shape))
        return mean, sent

    def _chunks(self, numbers: Tensor) -> Tensor:
        """Numbers one after another, filled up with zeros, shape `(c, chunk_size)`."""
        flat, size = numbers.reshape(-1), self.hook.chunk_size
        return torch.nn.functional.pad(flat, (0, -flat.numel() % size)).view(-1, size)

    def _write(self, chunks: Tensor, slots: Sequence[Slot], flat: Tensor) -> None:
        rows = [-(-slot.numel // self.hook.chunk_size) for slot in slots]
        for slot, own in zip(slots, chunks.split(rows), strict=True):
            slot.view(flat).copy_(own.reshape(-1)[: slot.numel].view(slot.shape))

    def _decoded(self, payload: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Places and values of a payload, the latter over the number of ranks."""
        head = 4 * self._codec.num_scales + self.hook.k // 4
        codes, scales = unpack(self._codec, payload[:, :head])
        values = self._codec.dequantize(codes, scales.to(dtype)).reshape(-1, self.hook.k)
        return _unpacked(payload[:, head:]), values / self.group.size

    def kept(self, shapes: list[tuple[int, ...]]) -> Shapes:
        return {"residual": shapes[0]} if self.hook.compresses(shapes[0]) else {}

    def inactive_reason(self, step: int) -> str | None:
        if not self.plans or any(slots for _, (slots, _) in self.plans.values()):
            return None
        which = "" if self.hook.compress_1d else "in two dimensions "
        return (
            f"hook='chunked_topk' compresses nothing, no gradient has chunk_size={self.hook.chunk_size} elements "
            f"or more {which}(compress_1d={self.hook.compress_1d}); use hook='bf16'"
        )


def _packed(places: Tensor) -> Tensor:
    """Indices, shape `(c, k)`, two in three bytes."""
    first, second = places.view(len(places), -1, 2).unbind(dim=2)
    three = torch.stack([first & 255, (first >> 8) + 16 * (second & 15), second >> 4], dim=2)
    return three.to(torch.uint8).view(len(places), -1)


def _unpacked(packed: Tensor) -> Tensor:
    low, middle, high = packed.reshape(len(packed), -1, 3).to(torch.int64).unbind(dim=2)
    return torch.stack([low + 256 * (middle & 15), (middle >> 4) + 16 * high], dim=2).view(len(packed), -1)
