"""How the compressed gradients of a bucket are cut into chunks that are encoded and sent together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

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
        start: its first element in the chunks, one behind the other.
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
        start: first element, as `Segment.start`.
        shape: `(b, s)`, b a multiple of the number of owners.
    """

    segments: tuple[Segment, ...]
    start: int
    shape: tuple[int, int]

    @property
    def numel(self) -> int:
        """Elements, zeros included."""
        return self.shape[0] * self.shape[1]

    def gather(self, flat: Tensor, dtype: torch.dtype) -> Tensor:
        """Gradients in `flat`, shape `(b, s)`: a view where they lie so and have that dtype, or else a copy."""
        if len(self.segments) == 1 and self.segments[0].numel == self.numel and flat.dtype == dtype:
            return self.segments[0].of(flat).view(self.shape)
        numbers = flat.new_zeros(self.numel, dtype=dtype)
        for segment in self.segments:
            numbers[segment.start - self.start :][: segment.numel] = segment.of(flat)
        return numbers.view(self.shape)

    def scatter(self, numbers: Tensor, flat: Tensor) -> None:
        """Write `numbers`, shape `(b, s)`, to `flat`, if they are not there already."""
        if numbers.data_ptr() != self.segments[0].of(flat).data_ptr():
            for segment in self.segments:
                segment.of(flat).copy_(numbers.view(-1)[segment.start - self.start :][: segment.numel])


@dataclass
class Chunks:
    """The chunks of a bucket, and where its gradients are in tensors that are laid out as the chunks.

    Each gradient begins a block, so that what a block has does not depend on the bucket.

    Args:
        slots: the gradients.
        block_size: elements of a block; `None`: all gradients together are one block for each owner.
        num_owners: into how many parts, of as many blocks each, every chunk can be cut.
        num_within: ranks of a node, if each encodes a part of every chunk only. Chunks are larger by as much then, and
            more gradients are copied together: there is more to do for a chunk than to encode it.

    Attributes:
        places: where each chunk is.
        numel: elements of all of them.
    """

    slots: Sequence[Slot]
    block_size: int | None
    num_owners: int
    num_within: int = 1
    places: list[Place] = field(default_factory=list)
    numel: int = 0
    _segments: dict[str, list[Segment]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        total = sum(slot.numel for slot in self.slots)
        self._size = self.block_size or -(-total // self.num_owners)
        unit = self._size * self.num_owners
        at_once = max(unit, CHUNK_NUMEL * self.num_within // unit * unit)
        alone_numel = _ALONE_NUMEL if self.num_within == 1 else at_once // 2
        together: list[tuple[Slot, int, int]] = []
        for slot in self.slots:
            alone = slot.numel // unit * unit if slot.numel >= alone_numel else 0
            for first in range(0, alone, at_once):
                self._add([(slot, first, min(at_once, alone - first))])
            if slot.numel > alone:
                together.append((slot, alone, slot.numel - alone))
            if sum(self._filled(numel) for _, _, numel in together) >= at_once:
                self._add(together)
                together = []
        if together:
            self._add(together)

    def _filled(self, numel: int) -> int:
        return numel if self.block_size is None else -(-numel // self._size) * self._size

    def _add(self, pieces: Iterable[tuple[Slot, int, int]]) -> None:
        segments, end = [], self.numel
        for slot, first, numel in pieces:
            segments.append(Segment(slot, first, end, numel))
            self._segments.setdefault(slot.name, []).append(segments[-1])
            end += self._filled(numel)
        unit = self._size * self.num_owners
        rows = -(-(end - self.numel) // unit) * self.num_owners
        self.places.append(Place(tuple(segments), self.numel, (rows, self._size)))
        self.numel += rows * self._size

    def segments(self, name: str) -> list[Segment]:
        """The segments of one gradient, in order."""
        return self._segments.get(name, [])

    def gradient(self, slot: Slot, memory: Tensor) -> Tensor:
        """What a tensor that is laid out as the chunks has of one gradient: a copy, in the gradient's shape."""
        stretches = [memory[segment.start :][: segment.numel] for segment in self.segments(slot.name)]
        return torch.cat([memory[:0], *stretches]).view(slot.shape)

    def write(self, slot: Slot, gradient: Tensor, memory: Tensor) -> None:
        """Put one gradient, in its shape, into a tensor that is laid out as the chunks."""
        for segment in self.segments(slot.name):
            memory[segment.start :][: segment.numel] = gradient.reshape(-1)[segment.first :][: segment.numel]

    def shares(self, index: int, count: int) -> list[tuple[slice, slice]]:
        """Where one of `count` equal parts of each chunk is: in the chunks, and in a tensor of these parts alone."""
        shares, start = [], 0
        for place in self.places:
            numel = place.numel // count
            first = place.start + index * numel
            shares.append((slice(first, first + numel), slice(start, start + numel)))
            start += numel
        return shares
