"""Gradients encoded by a codec, with error feedback: what `int8`, `int4` and `fp8` share."""

from __future__ import annotations

import math
import zlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_commhooks.codecs.codec import Codec
from lightning_commhooks.collectives.chunk import Chunk
from lightning_commhooks.collectives.group import Group, Part
from lightning_commhooks.hooks._chunks import Chunks, Place, Segment
from lightning_commhooks.interface.accumulation import scale_
from lightning_commhooks.interface.bucket import Bucket, Slot
from lightning_commhooks.interface.by_parameter import BoundByParameter, Entry, Plan, Shapes
from lightning_commhooks.interface.checks import check_bool, check_integer
from lightning_commhooks.interface.hierarchy import Hierarchy, check_hierarchy, hierarchical
from lightning_commhooks.interface.hook import NEXT_TO_NOTHING, BoundHook, CommHook
from lightning_commhooks.interface.memory import Memory, all_finite
from lightning_commhooks.interface.precision import to_gradient, work_dtype
from lightning_commhooks.interface.state import StateReader


@dataclass(frozen=True, kw_only=True)
class CodecConfig(CommHook):
    """Options of hooks that encode gradients and have error feedback."""

    use_error_feedback: bool = True
    compress_1d: bool = False
    min_bytes: int = 2**17
    random_seed: int = 0
    hierarchy: Hierarchy = None

    def __post_init__(self) -> None:
        for field in ("use_error_feedback", "compress_1d"):
            check_bool(field, getattr(self, field))
        check_integer("min_bytes", self.min_bytes, 0)
        check_integer("random_seed", self.random_seed)
        check_hierarchy(self.hierarchy)
        self.codec  # noqa: B018  # refuses its own options

    @property
    @abstractmethod
    def codec(self) -> Codec:
        """What gradients are encoded by."""

    def compresses(self, shape: Sequence[int]) -> bool:
        """Whether a gradient of that shape is encoded."""
        # A block is sent as a whole, however little of it a gradient fills.
        fills_block = math.prod(shape) >= (self.codec.block_size or 1)
        return fills_block and (self.compress_1d or len(shape) > 1)

    def bind(self, group: Group) -> BoundHook:
        return CodecFeedback(self, group)


class _PartMemory:
    """What is owed of one part of each chunk.

    Args:
        whole: of all chunks, shape `(layout.numel,)`.
        layout: the chunks.
        part: which part.

    Attributes:
        memory: of the part alone, shape `(layout.numel / part.count,)`.
    """

    def __init__(self, whole: Tensor, layout: Chunks, part: Part) -> None:
        self._part = part
        self._shares = layout.shares(part.index, part.count)
        self.memory = Memory(whole if part.count == 1 else torch.cat([whole[place] for place, _ in self._shares]))

    def of_chunk(self, i: int, place: Place) -> tuple[Tensor, Tensor]:
        """What is owed, and where to write what will be, of chunk i."""
        own = self._shares[i][1]
        return self.memory.value[own].view(-1, place.shape[1]), self.memory.next()[own].view(-1, place.shape[1])

    def rows(self, numbers: Tensor) -> Tensor:
        """The part of a chunk."""
        return numbers.chunk(self._part.count)[self._part.index]

    def whole(self, numel: int) -> Tensor:
        """What the ranks that have the other parts owe together, shape `(numel,)`; collective among them."""
        if self._part.count == 1:
            return self.memory.value
        whole = self.memory.value.new_zeros(numel)
        for place, own in self._shares:
            whole[place] = self.memory.value[own]
        counters = self._part.among.counters
        # Not only checkpoints ask for it: DDP has rebuilt its buckets, once.
        with nullcontext() if counters.is_evaluating else counters.paused():
            return self._part.among.all_reduce_(whole)

    def leave(self, segments: Sequence[Segment], unless: Tensor) -> None:
        """Let what is owed of a gradient be in the next step what it is now, unless a boolean is true."""
        new = self.memory.next()
        for segment in segments:
            for place, own in self._shares:
                first, last = max(segment.start, place.start), min(segment.start + segment.numel, place.stop)
                if first < last:
                    stretch = slice(own.start + first - place.start, own.start + last - place.start)
                    new[stretch] = torch.where(unless, new[stretch], self.memory.value[stretch])


@dataclass(frozen=True)
class _Plan(Plan):
    """The gradients of a bucket, and its memory.

    Attributes:
        dense: gradients that are sent as they are.
        slots: the others.
        layout: where they are in the memory.
        residual: what this rank owes of its part of the numbers; `None` without error feedback.
        carried: what it owes of its part of the mean; `None` unless there are two shots.
    """

    dense: list[Slot]
    slots: list[Slot]
    layout: Chunks
    residual: _PartMemory | None = None
    carried: _PartMemory | None = None

    @property
    def parts(self) -> list[_PartMemory]:
        """All that is owed."""
        return [part for part in (self.residual, self.carried) if part is not None]

    @property
    def memories(self) -> list[Memory]:
        return [part.memory for part in self.parts]

    def entries(self) -> dict[str, Entry]:
        named = (("residual", self.residual), ("carried", self.carried))
        wholes = {kind: part.whole(self.layout.numel) for kind, part in named if part is not None}
        return {
            slot.name: {kind: self.layout.gradient(slot, whole) for kind, whole in wholes.items()}
            for slot in self.slots
            if wholes
        }

    def owed(self) -> Iterator[Tensor]:
        for memory in self.memories:
            yield memory.value


class CodecFeedback(BoundByParameter[_Plan]):
    """Error feedback at both ends of a two-shot average.

    A rank owes what its own payload left out, and adds it to its next gradient. What the payload of the mean left out
    is kept by the rank that sent it, and added to the next mean, as the server of DoubleSqueeze does (Tang et al. 2019,
    https://arxiv.org/abs/1905.05957, algorithm 1).
    """

    def __init__(self, config: CodecConfig, group: Group) -> None:
        super().__init__(group)
        self._config = config
        self._ranks = hierarchical(config.hierarchy, group)
        self._kernels = self._ranks.kernels(config.codec, feedback=config.use_error_feedback, two_shot=True)
        self.has_memory = config.use_error_feedback
        # Without, nothing is added to gradients before they are encoded.
        self.scales_gradients = config.use_error_feedback
        self._numel = self._numel_compressed = 0
        # Bytes to encode in the bucket that has most of them.
        self._largest = 0

    def overlaps(self, step: int) -> bool:
        return True

    def reduce(self, flat: Tensor, bucket: Bucket) -> Tensor | None:
        self._numel += flat.numel()
        if not flat.is_floating_point() or not self._is_worth_it(flat, bucket):
            scale_(flat, bucket.scale)
            self._pay_off_(flat, bucket)
            self.group.counters.numel_uncompressed += flat.numel()
            self._ranks.all_reduce_mean_(flat)
            return None
        plan = self._plan(flat, bucket)
        dense = torch.cat([flat[:0], *(slot.view(flat).reshape(-1) for slot in plan.dense)])
        dense.div_(self._ranks.size / bucket.scale)
        used = bucket.used(plan.slots if bucket.unused is not None and self.has_memory else (), flat)
        finish = self._ranks.begin_all_reduce_coalesced_([dense, used])
        finite = self._average_encoded(flat, bucket, plan)
        finish()
        finite = finite & all_finite(dense)
        for slot, mean in zip(plan.dense, dense.split([slot.numel for slot in plan.dense]), strict=True):
            slot.view(flat).copy_(mean.view(slot.shape))
        self.group.counters.numel_uncompressed += dense.numel()
        for slot, is_used in zip(plan.slots, used > 0, strict=False):
            if slot.name in (bucket.unused or ()):
                # DDP throws away what a hook returns for what no rank has used.
                for part in plan.parts:
                    part.leave(plan.layout.segments(slot.name), unless=is_used)
        # The product with the scale may be infinite where the mean is not.
        return finite if isinstance(bucket.loss_scale, float) and bucket.loss_scale == 1 else None

    def _is_worth_it(self, flat: Tensor, bucket: Bucket) -> bool:
        slots = [slot for slot in bucket.slots if self._config.compresses(slot.shape)]
        num_bytes = sum(slot.numel for slot in slots) * flat.element_size()
        self._largest = max(self._largest, num_bytes)
        return bool(slots) and num_bytes >= self._config.min_bytes

    def _average_encoded(self, flat: Tensor, bucket: Bucket, plan: _Plan) -> Tensor:
        dtype = work_dtype(flat.dtype)
        chunks = []
        for i, place in enumerate(plan.layout.places):
            owed = None if plan.residual is None else plan.residual.of_chunk(i, place)
            carried = None if plan.carried is None else plan.carried.of_chunk(i, place)
            seed = f"{self._config.random_seed}:{bucket.step}:{self.group.rank}:{place.segments[0].key}"
            chunks.append(Chunk(place.gather(flat, dtype), owed, carried, zlib.crc32(seed.encode()) % 2**30))
        finite = self._ranks.average_encoded_(chunks, self._kernels, loss_scale=bucket.loss_scale, scale=bucket.scale)
        for place, mean in zip(plan.layout.places, chunks, strict=True):
            if dtype != flat.dtype:
                rounded = to_gradient(mean.numbers, flat.dtype)
                if plan.residual is not None and mean.owed is not None:
                    # Equal on all ranks, so it is owed to the mean.
                    left = plan.residual.rows(mean.numbers - rounded.to(dtype))
                    mean.owed[1].add_(left / bucket.loss_scale)
                mean.numbers = rounded
            place.scatter(mean.numbers, flat)
        numel = sum(slot.numel for slot in plan.slots)
        self.group.counters.numel_compressed += numel
        self._numel_compressed += numel
        return finite

    def _make_plan(self, flat: Tensor, bucket: Bucket) -> _Plan:
        slots = [slot for slot in bucket.slots if self._config.compresses(slot.shape)]
        dense = [slot for slot in bucket.slots if not self._config.compresses(slot.shape)]
        numbers, mean = self._ranks.parts()
        layout = Chunks(slots, self._config.codec.block_size, self._ranks.num_owners(), numbers.count)
        if not self._config.use_error_feedback:
            return _Plan(dense, slots, layout)
        residual = flat.new_zeros(layout.numel, dtype=work_dtype(flat.dtype))
        carried = torch.zeros_like(residual)
        for slot in slots:
            entry = self._take(slot.name, "residual", "carried")
            if "residual" in entry:
                layout.write(slot, entry["residual"], residual)
            if "carried" in entry:
                layout.write(slot, entry["carried"], carried)
        if mean is None:
            return _Plan(dense, slots, layout, _PartMemory(residual.add_(carried), layout, numbers))
        own = _PartMemory(residual, layout, numbers), _PartMemory(carried, layout, mean)
        return _Plan(dense, slots, layout, *own)

    def _settled(self, entry: Mapping[str, Tensor]) -> Tensor:
        return entry["residual"] + entry["carried"] if "carried" in entry else entry["residual"]

    def load_state_dict(self, state: dict[str, Any], reader: StateReader) -> None:
        ranks = self._ranks.parts()[0].ranks
        with reader.of_ranks(ranks) if ranks else nullcontext():
            super().load_state_dict(state, reader)

    def _entry_shapes(self, shapes: list[tuple[int, ...]]) -> Shapes:
        owes = self._config.use_error_feedback and self._config.compresses(shapes[0])
        return {"residual": shapes[0], "carried": shapes[0]} if owes else {}

    def not_begun(self, step: int) -> str | None:
        if self._numel_compressed > NEXT_TO_NOTHING * self._numel:
            return None
        config, share = self._config, self._numel_compressed / max(1, self._numel)
        which = "" if config.compress_1d else "in two dimensions "
        how_much = f"only {share:.2%}, few buckets have" if share else "nothing, no bucket has"
        lower = "lower block_size"
        if not share and self._largest:
            lower = f"the largest has {self._largest}: lower min_bytes to that"
        elif share:
            lower = "lower min_bytes or block_size"
        return (
            f"hook={config.name!r} compresses {how_much} min_bytes={config.min_bytes} bytes of gradients with "
            f"block_size={config.codec.block_size} elements or more {which}(compress_1d={config.compress_1d}); "
            f"{lower}, or use hook='bf16'"
        )
