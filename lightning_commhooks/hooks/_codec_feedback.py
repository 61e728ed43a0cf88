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
from lightning_commhooks.collectives.group import Group
from lightning_commhooks.hooks._chunks import Chunks
from lightning_commhooks.interface.accumulation import scale_
from lightning_commhooks.interface.bucket import Bucket, Slot
from lightning_commhooks.interface.by_parameter import BoundByParameter, Entry, Plan, Shapes
from lightning_commhooks.interface.checks import check_bool, check_integer
from lightning_commhooks.interface.hierarchy import Hierarchy, bind_by_node, check_hierarchy
from lightning_commhooks.interface.hook import NEXT_TO_NOTHING, BoundHook, CommHook
from lightning_commhooks.interface.memory import Memory, all_finite
from lightning_commhooks.interface.precision import to_gradient, work_dtype
from lightning_commhooks.interface.state import StateWriter


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
        return bind_by_node(self.hierarchy, group, lambda ranks: CodecFeedback(self, ranks))


@dataclass(frozen=True)
class _Plan(Plan):
    """The gradients of a bucket, and its memory.

    Attributes:
        dense: gradients that are sent as they are.
        slots: the others.
        layout: where they are in the memory.
        residual: what this rank owes, shape `(layout.numel,)`.
        carried: what is owed of this rank's share of the mean, shape `(layout.numel / w,)`; `None` unless there are
            two shots.
        group: the ranks.
    """

    dense: list[Slot]
    slots: list[Slot]
    layout: Chunks
    residual: Memory | None
    carried: Memory | None
    group: Group

    @property
    def memories(self) -> list[Memory]:
        return [memory for memory in (self.residual, self.carried) if memory is not None]

    def entries(self) -> dict[str, Entry]:
        if self.residual is None:
            return {}
        entries = {slot.name: {"residual": self.layout.gradient(slot, self.residual.value)} for slot in self.slots}
        if self.carried is not None:
            # Each rank has its share; who has which depends on the bucket.
            whole = torch.zeros_like(self.residual.value)
            for place, own in self.layout.shares(self.group.rank):
                whole[place] = self.carried.value[own]
            counters = self.group.counters
            # Not only checkpoints ask for it: DDP has rebuilt its buckets, once.
            with nullcontext() if counters.is_evaluating else counters.paused():
                self.group.all_reduce_(whole)
            for slot in self.slots:
                entries[slot.name]["carried"] = self.layout.gradient(slot, whole)
        return entries

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
        self._kernels = group.kernels(config.codec, feedback=config.use_error_feedback, two_shot=True)
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
            self.group.all_reduce_mean_(flat)
            return None
        plan = self._plan(flat, bucket)
        dense = torch.cat([flat[:0], *(slot.view(flat).reshape(-1) for slot in plan.dense)])
        dense.div_(self.group.size / bucket.scale)
        used = bucket.used(plan.slots if bucket.unused is not None and self.has_memory else (), flat)
        finish = self.group.begin_all_reduce_coalesced_([dense, used])
        finite = self._average_encoded(flat, bucket, plan)
        finish()
        finite = finite & all_finite(dense)
        for slot, mean in zip(plan.dense, dense.split([slot.numel for slot in plan.dense]), strict=True):
            slot.view(flat).copy_(mean.view(slot.shape))
        self.group.counters.numel_uncompressed += dense.numel()
        for slot, is_used in zip(plan.slots, used > 0, strict=False):
            if slot.name in (bucket.unused or ()):
                _restore(plan, slot, is_used)
        # The product with the scale may be infinite where the mean is not.
        return finite if isinstance(bucket.loss_scale, float) and bucket.loss_scale == 1 else None

    def _is_worth_it(self, flat: Tensor, bucket: Bucket) -> bool:
        slots = [slot for slot in bucket.slots if self._config.compresses(slot.shape)]
        num_bytes = sum(slot.numel for slot in slots) * flat.element_size()
        self._largest = max(self._largest, num_bytes)
        return bool(slots) and num_bytes >= self._config.min_bytes

    def _average_encoded(self, flat: Tensor, bucket: Bucket, plan: _Plan) -> Tensor:
        dtype = work_dtype(flat.dtype)
        shares = plan.layout.shares(self.group.rank) if plan.carried is not None else []
        chunks = []
        for i, place in enumerate(plan.layout.places):
            owed = carried = None
            if plan.residual is not None:
                owed = place.of(plan.residual.value), place.of(plan.residual.next())
            if plan.carried is not None:
                size, (_, own) = place.shape[1], shares[i]
                carried = plan.carried.value[own].view(-1, size), plan.carried.next()[own].view(-1, size)
            seed = f"{self._config.random_seed}:{bucket.step}:{self.group.rank}:{place.segments[0].key}"
            chunks.append(Chunk(place.gather(flat, dtype), owed, carried, zlib.crc32(seed.encode()) % 2**30))
        finite = self.group.average_encoded_(chunks, self._kernels, loss_scale=bucket.loss_scale, scale=bucket.scale)
        for place, mean in zip(plan.layout.places, chunks, strict=True):
            if dtype != flat.dtype:
                rounded = to_gradient(mean.numbers, flat.dtype)
                if mean.owed is not None:
                    # Equal on all ranks, so it is owed to the mean.
                    mean.owed[1].add_((mean.numbers - rounded.to(dtype)) / bucket.loss_scale)
                mean.numbers = rounded
            place.scatter(mean.numbers, flat)
        numel = sum(slot.numel for slot in plan.slots)
        self.group.counters.numel_compressed += numel
        self._numel_compressed += numel
        return finite

    def _make_plan(self, flat: Tensor, bucket: Bucket) -> _Plan:
        slots = [slot for slot in bucket.slots if self._config.compresses(slot.shape)]
        dense = [slot for slot in bucket.slots if not self._config.compresses(slot.shape)]
        layout = Chunks(slots, self._config.codec.block_size, self.group.num_owners())
        if not self._config.use_error_feedback:
            return _Plan(dense, slots, layout, None, None, self.group)
        residual = flat.new_zeros(layout.numel, dtype=work_dtype(flat.dtype))
        carried = torch.zeros_like(residual)
        for slot in slots:
            entry = self._take(slot.name, "residual", "carried")
            if "residual" in entry:
                layout.write(slot, entry["residual"], residual)
            if "carried" in entry:
                layout.write(slot, entry["carried"], carried)
        if self.group.num_owners() == 1:
            return _Plan(dense, slots, layout, Memory(residual.add_(carried)), None, self.group)
        own = torch.cat([carried[place] for place, _ in layout.shares(self.group.rank)])
        return _Plan(dense, slots, layout, Memory(residual), Memory(own), self.group)

    def _settled(self, entry: Mapping[str, Tensor]) -> Tensor:
        return entry["residual"] + entry["carried"] if "carried" in entry else entry["residual"]

    def state_dict(self, writer: StateWriter) -> dict[str, Any]:
        # Making the entries is collective.
        return {"entries": {}} if writer.kind == "none" else super().state_dict(writer)

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


def _restore(plan: _Plan, slot: Slot, is_used: Tensor) -> None:
    """Leave the memory of a gradient as it was unless a rank used it: DDP throws away what a hook returns for it."""
    if plan.residual is None:
        return
    ranges = [slice(segment.start, segment.start + segment.numel) for segment in plan.layout.segments(slot.name)]
    changed = [(plan.residual, ranges)]
    if plan.carried is not None:
        changed.append((plan.carried, _within(ranges, plan.layout.shares(plan.group.rank))))
    for memory, stretches in changed:
        for stretch in stretches:
            new = memory.next()[stretch]
            new.copy_(torch.where(is_used, new, memory.value[stretch]))


def _within(ranges: list[slice], shares: list[tuple[slice, slice]]) -> list[slice]:
    """Where `ranges` of the layout are in a rank's share."""
    found = []
    for stretch in ranges:
        for place, own in shares:
            first, last = max(stretch.start, place.start), min(stretch.stop, place.stop)
            if first < last:
                found.append(slice(own.start + first - place.start, own.start + last - place.start))
    return found
