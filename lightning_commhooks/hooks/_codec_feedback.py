"""Gradients encoded by a codec, with error feedback: what `int8`, `int4` and `fp8` share."""

from __future__ import annotations

import math
import zlib
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_commhooks.codecs.codec import Codec
from lightning_commhooks.collectives.chunk import Chunk
from lightning_commhooks.collectives.group import Group
from lightning_commhooks.collectives.steps import Steps, begun
from lightning_commhooks.hooks._chunks import Place, chunks
from lightning_commhooks.hooks._shares import reduce_scatter, reduce_scatter_encoded
from lightning_commhooks.interface.bucket import Bucket, Slot
from lightning_commhooks.interface.checks import check_bool, check_integer
from lightning_commhooks.interface.error_feedback import ErrorFeedback, Shapes
from lightning_commhooks.interface.finite import all_finite
from lightning_commhooks.interface.hierarchy import Hierarchy, bind_by_node, check_hierarchy
from lightning_commhooks.interface.hook import NEXT_TO_NOTHING, BoundHook, CommHook
from lightning_commhooks.interface.precision import to_gradient, work_dtype


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
        return bind_by_node(self.hierarchy, group, lambda ranks: CodecFeedback(ranks, self))


class CodecFeedback(ErrorFeedback):
    """Error feedback at both ends of a two-shot average.

    What a rank's payload leaves out is its residual. What the payload of the mean leaves out is added, times the number
    of ranks, to the residual of the rank that sends it, so that it is in the next mean. DoubleSqueeze has a second
    memory for it (Tang et al. 2019, https://arxiv.org/abs/1905.05957, algorithm 1).
    """

    def __init__(self, group: Group, hook: CodecConfig) -> None:
        super().__init__(group, hook)
        self._kernels = group.kernels(hook.codec, feedback=hook.use_error_feedback, two_shot=True)
        self.has_memory = hook.use_error_feedback
        # Without, nothing is added to gradients before they are encoded.
        self.scales_gradients = hook.use_error_feedback
        self._places: dict[tuple[str, ...], list[Place]] = {}
        self._numel = self._numel_compressed = 0
        # Bytes to encode in the bucket that has most of them, of the last step: DDP builds its buckets anew.
        self._largest = 0

    def reduce(self, bucket: Bucket, ranks: Group) -> Steps[Tensor | None]:
        self._numel += bucket.flat.numel()
        return super().reduce(bucket, ranks)

    def compressed(self, bucket: Bucket) -> Sequence[Slot] | None:
        slots = [slot for slot in bucket.slots if self.hook.compresses(slot.shape)]
        num_bytes = sum(slot.numel for slot in slots) * bucket.flat.element_size()
        self._largest = max(self._largest if bucket.index else 0, num_bytes)
        return slots if slots and num_bytes >= self.hook.min_bytes else None

    def average_(self, residual: Tensor | None, bucket: Bucket, ranks: Group) -> Steps[Tensor | None]:
        flat = bucket.flat
        rest = [slot.view(flat).view(-1) for slot in bucket.slots if not self.hook.compresses(slot.shape)]
        dense = torch.cat([flat[:0], *rest]).div_(self.group.size / bucket.scale)
        averaging = begun(ranks.all_reduce_(dense))
        finite = yield from self._average_encoded(residual, bucket, ranks)
        yield from averaging
        for view, mean in zip(rest, dense.split([len(view) for view in rest]), strict=True):
            view.copy_(mean)
        numel = flat.numel() - dense.numel()
        self.group.counters.numel_uncompressed += dense.numel()
        self.group.counters.numel_compressed += numel
        self._numel_compressed += numel
        # The product with the scale may be infinite where the mean is not.
        return finite & all_finite(dense) if isinstance(bucket.loss_scale, float) and bucket.loss_scale == 1 else None

    def _average_encoded(self, residual: Tensor | None, bucket: Bucket, ranks: Group) -> Steps[Tensor]:
        flat, dtype = bucket.flat, work_dtype(bucket.flat.dtype)
        places, parts = self._places_of(bucket), []
        for place in places:
            own = None if residual is None else place.gather(residual, dtype)
            parts.append(Chunk(place.gather(flat, dtype), own, self._seed(bucket, place.segments[0].key)))
        finite = yield from ranks.average_encoded_(
            parts, self._kernels, loss_scale=bucket.loss_scale, scale=bucket.scale
        )
        for place, part in zip(places, parts, strict=True):
            numbers = part.numbers
            if dtype != flat.dtype:
                numbers = to_gradient(part.numbers, flat.dtype)
                if part.residual is not None:
                    part.residual.add_((part.numbers - numbers.to(dtype)) / bucket.loss_scale)
            place.scatter(numbers, flat)
            if residual is not None and part.residual is not None:
                place.scatter(part.residual, residual)
        return finite

    def reduce_scatter(self, bucket: Bucket, out: Tensor, ranks: Group) -> Steps[None]:
        """Write this rank's share of the average to `out`: see `_shares.reduce_scatter`."""
        flat = bucket.flat
        # A block is sent as a whole, however little of it is filled.
        fills_block = out.numel() >= (self.hook.codec.block_size or 1)
        if ranks.size == 1 or not fills_block or flat.nbytes < self.hook.min_bytes:
            return reduce_scatter(bucket, out, ranks)
        self.group.counters.numel_compressed += flat.numel()
        return reduce_scatter_encoded(bucket, out, ranks, self._kernels, self._seed(bucket, bucket.slots[0].name))

    def _seed(self, bucket: Bucket, key: str) -> int:
        seed = f"{self.hook.random_seed}:{bucket.step}:{self.group.rank}:{key}"
        return zlib.crc32(seed.encode()) % 2**30

    def _places_of(self, bucket: Bucket) -> list[Place]:
        if bucket.names not in self._places:
            slots = [slot for slot in bucket.slots if self.hook.compresses(slot.shape)]
            self._places[bucket.names] = chunks(slots, self.hook.codec.block_size, self.group.num_owners())
        return self._places[bucket.names]

    def _shapes(self, shapes: list[tuple[int, ...]]) -> Shapes:
        return {"residual": shapes[0]} if self.has_residuals and self.hook.compresses(shapes[0]) else {}

    def not_begun(self, step: int) -> str | None:
        if self._numel_compressed > NEXT_TO_NOTHING * self._numel:
            return None
        config, share = self.hook, self._numel_compressed / max(1, self._numel)
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
