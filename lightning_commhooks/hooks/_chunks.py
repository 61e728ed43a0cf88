"""How the compressed gradients of a bucket are cut into chunks that are encoded and sent together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_commhooks.collectives.chunk import CHUNK_NUMEL
from lightning_commhooks.interface.bucket import Slot

# A gradient of fewer elements is copied together with others.
_ALONE_NUMEL = 2**17


@dataclass(frozen=True)
class Segment:
    """A stretch of one gradient.

    Attributes:
        slot: the gradient.
        first: first element of the stretch in the gradient.
        start: its first element in the chunk.
        numel: its length.
    """

    slot: Slot
    first: int
    start: int
    numel: int

    @property
    def key(self) -> str:
        """Tells it from all others of the model."""
        return f"{self.slot.name}:{self.first}"

    def of(self, flat: Tensor) -> Tensor:
        """The stretch as a view of a flat bucket."""
        return flat[self.slot.offset + self.first :][: self.numel]


@dataclass(frozen=True)
class Place:
    """What is encoded and sent together: segments, each filled up with zeros to whole blocks.

    Attributes:
        segments: the segments, in order.
        shape: `(b, s)`, b a multiple of the number of owners.
    """

    segments: tuple[Segment, ...]
    shape: tuple[int, int]

    def gather(self, flat: Tensor, dtype: torch.dtype) -> Tensor:
        """Gradients or residuals, shape `(b, s)`: a view of `flat` if they lie so and have that dtype, or a copy."""
        numel = self.shape[0] * self.shape[1]
        if len(self.segments) == 1 and self.segments[0].numel == numel and flat.dtype == dtype:
            return self.segments[0].of(flat).view(self.shape)
        numbers = flat.new_zeros(numel, dtype=dtype)
        for segment in self.segments:
            numbers[segment.start :][: segment.numel] = segment.of(flat)
        return numbers.view(self.shape)

    def scatter(self, numbers: Tensor, flat: Tensor) -> None:
        """Write `numbers`, shape `(b, s)`, to `flat`, if they are not there already."""
        if numbers.data_ptr() != self.segments[0].of(flat).data_ptr():
            for segment in self.segments:
                segment.of(flat).copy_(numbers.view(-1)[segment.start :][: segment.numel])


def chunks(slots: Sequence[Slot], block_size: int | None, num_owners: int) -> list[Place]:
    """Cut gradients into chunks. Each begins a block, so that what a block has does not depend on the bucket.

    Args:
        slots: the gradients.
        block_size: elements of a block; `None`: all gradients together are one block for each owner.
        num_owners: into how many parts, of as many blocks each, every chunk can be cut.
    """
    size = block_size or -(-sum(slot.numel for slot in slots) // num_owners)
    unit = size * num_owners
    at_once = max(unit, CHUNK_NUMEL // unit * unit)
    places: list[Place] = []
    together: list[tuple[Slot, int, int]] = []

    def filled(numel: int) -> int:
        return numel if block_size is None else -(-numel // size) * size

    def add(pieces: Iterable[tuple[Slot, int, int]]) -> None:
        segments, end = [], 0
        for slot, first, numel in pieces:
            segments.append(Segment(slot, first, end, numel))
            end += filled(numel)
        places.append(Place(tuple(segments), (-(-end // unit) * num_owners, size)))

    for slot in slots:
        alone = slot.numel // unit * unit if slot.numel >= _ALONE_NUMEL else 0
        for first in range(0, alone, at_once):
            add([(slot, first, min(at_once, alone - first))])
        if slot.numel > alone:
            together.append((slot, alone, slot.numel - alone))
        if sum(filled(numel) for _, _, numel in together) >= at_once:
            add(together)
            together = []
    if together:
        add(together)
    return places
